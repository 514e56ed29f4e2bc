"""Ends a group of ranks that makes no progress."""

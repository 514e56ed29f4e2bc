"""Detects a group of ranks that makes no progress, and ends it."""

"""Finds duplicates, near-duplicates and benchmark text."""

"""Finds duplicates, near-duplicates and benchmark text in documents."""

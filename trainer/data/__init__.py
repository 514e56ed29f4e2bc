"""Rows to batches, in a fixed order."""

"""Turns rows into batches, in a fixed order."""

"""Judges documents by their tokens."""

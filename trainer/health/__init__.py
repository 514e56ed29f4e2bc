"""Judges whether a run is sound."""

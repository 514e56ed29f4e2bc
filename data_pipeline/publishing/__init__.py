"""Gives finished data its place."""

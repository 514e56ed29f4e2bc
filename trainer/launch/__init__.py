"""Starts the ranks of one node."""

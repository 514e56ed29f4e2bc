"""Proves what a run did: its files, its steps, its data."""

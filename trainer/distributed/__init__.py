"""The group of ranks of a run, and the checks between ranks."""

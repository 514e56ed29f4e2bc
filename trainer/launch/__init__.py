"""Starts the ranks of one node, passes stop requests on to them, and starts them again after a crash."""

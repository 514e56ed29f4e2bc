"""Checks of the machine: what was found, what is needed, and how to correct it."""

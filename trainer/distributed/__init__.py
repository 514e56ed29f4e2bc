"""The ranks of a run, and what they check about each other."""

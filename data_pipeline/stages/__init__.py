"""The stages of a preparation, one file for each: its task, its work, and the call that runs all of it."""

"""The stages of a preparation. Each has one file with its task, its work, its result and its call."""

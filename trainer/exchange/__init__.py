"""Models in and out: directories that other programs read."""

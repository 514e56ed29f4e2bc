"""Models in and out: formats of other programs."""

"""Updates the weights."""

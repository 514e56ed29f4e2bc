"""Code of the user: hooks, losses and models."""

"""Searches for the settings of a training with the lowest validation loss. Each trial is an ordinary run."""

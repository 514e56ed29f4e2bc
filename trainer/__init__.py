"""Trains, evaluates and verifies language models. `loop` tells the whole story."""

"""Optimizers, learning-rate schedule and moving average of the weights."""

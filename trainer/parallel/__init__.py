"""Gradients and weights over ranks."""

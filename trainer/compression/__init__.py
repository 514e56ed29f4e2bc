"""Smaller weights of a trained model: quantised or pruned, and what that costs."""

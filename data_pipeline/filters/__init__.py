"""Keeps or rejects one document by its text."""

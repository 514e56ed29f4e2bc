"""Validation loss, with groups by source, kind and length."""

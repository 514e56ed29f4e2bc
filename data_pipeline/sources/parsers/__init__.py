"""Turns the bytes of each format into documents."""

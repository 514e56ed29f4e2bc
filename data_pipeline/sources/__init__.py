"""Reads files and URLs as documents."""

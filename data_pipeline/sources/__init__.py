"""Reads files and addresses as documents."""

"""Places documents in rows of fixed length."""

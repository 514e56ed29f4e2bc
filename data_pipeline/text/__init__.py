"""Many texts in one array."""

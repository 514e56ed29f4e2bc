"""The decoder, its loss, and what both cost."""

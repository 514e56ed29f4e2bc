"""Pages and charts for people, as HTML that escapes all values by default."""

"""Everything that the loop calls."""

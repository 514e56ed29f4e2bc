"""Reports about prepared data, for people."""

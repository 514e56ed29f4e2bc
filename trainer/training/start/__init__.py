"""Puts a run together: plans it, checks it against its folder, builds and restores it, and opens the files that it writes."""

"""The commands that show, compare and check existing runs."""

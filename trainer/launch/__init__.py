"""Starting the ranks of one node."""

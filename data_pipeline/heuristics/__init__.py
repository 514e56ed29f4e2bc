"""Published rules about the form of a text: each with its measure, its reason and its threshold in one place."""

"""The format of prepared data, which the trainer reads."""

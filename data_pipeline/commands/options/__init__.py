"""The settings model of each small command. These modules import neither pyarrow nor numpy, so `--help` is fast."""

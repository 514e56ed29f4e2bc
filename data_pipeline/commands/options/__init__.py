"""The settings model of each small command. Nothing here imports pyarrow or numpy, so that `--help` is fast."""

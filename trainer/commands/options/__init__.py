"""The settings model of each small command. Nothing here imports torch, so that `--help` is fast."""

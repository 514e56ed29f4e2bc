"""The options of each command on existing runs. Nothing here imports torch, so `--help` is fast."""

"""The options of each command except `train` and `schema`. Nothing here imports torch, so `--help` is fast."""

"""Checkpoints: complete or absent, all bytes covered by digests, unchanged tensors stored once, nothing executable.

A save writes the object files, syncs them, and then renames the directory with the manifest to the name of the checkpoint. That
rename is the commit, so a directory with the name of a checkpoint is complete. It is still verified before it is used, because
storage can change afterwards. docs/training.md shows the files.
"""

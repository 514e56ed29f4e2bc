"""Checkpoints: complete or absent, all bytes covered by digests, unchanged tensors stored once, nothing executable.

    checkpoints/step-00000500/manifest.json     tensors by name, their object files, counters; sealed
                objects/<sha256>.safetensors    tensors; the name is the digest of the file
                .bad-step-00000400/             a checkpoint that failed verification, set aside

A save writes the object files, syncs them, and then renames the directory with the manifest to the name of the checkpoint. That
rename is the commit, so a directory with the name of a checkpoint is complete. It is still verified before it is used, because
storage can change afterwards.
"""

"""Checkpoints: complete or absent, every byte of them under a digest, an unchanged tensor stored once, nothing executable.

    checkpoints/step-00000500/manifest.json     what is saved: tensors by name, their object files, counters; sealed
                objects/<sha256>.safetensors    tensors; the name is the digest of the file
                .bad-step-00000400/             a checkpoint that failed verification, set aside

A save writes the object files, forces them to the device, and then gives the directory with the manifest its name: that rename is
the commit. What has a checkpoint's name is therefore whole; it is verified all the same before it is used, because storage
can change afterwards.
"""

from trainer.checkpoint.async_saver import AsyncSaver
from trainer.checkpoint.copying import checkpoint_files
from trainer.checkpoint.disk_space import check_space, required_bytes
from trainer.checkpoint.store import Checkpoint, CheckpointStore, steps_to_keep

__all__ = ["AsyncSaver", "Checkpoint", "CheckpointStore", "check_space", "checkpoint_files", "required_bytes", "steps_to_keep"]

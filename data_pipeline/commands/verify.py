"""`verify`: checks every digest of prepared data."""

from __future__ import annotations

from data_pipeline.commands.options.verify import VerifyOptions
from data_pipeline.dataset.manifest import verify

__all__ = ["run"]


def run(options: VerifyOptions) -> None:
    """Print the root digest if all files match. Raises the errors of `verify`."""
    manifest = verify(options.directory)
    print(f"{len(manifest.shards) + len(manifest.files)} files match\nroot digest {manifest.root_digest}")

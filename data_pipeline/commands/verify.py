from __future__ import annotations

from data_pipeline.commands.folder_options import FolderOptions


class VerifyOptions(FolderOptions):
    """Checks every digest of prepared data and names the first file that does not match."""


def run(options: VerifyOptions) -> None:
    from data_pipeline.dataset.manifest import verify

    manifest = verify(options.directory)
    print(f"{len(manifest.shards) + len(manifest.files)} files match\nroot digest {manifest.root_digest}")

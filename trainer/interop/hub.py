"""Finds the directory of a published model: on this machine, or on the Hugging Face Hub by its name.

The Hub's client keeps the files of a model in a cache, as links to other files of it. Links of strangers are never followed, so an
import reads a folder with the same files and without links.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import ConfigError, ProjectError
from common.redaction import redacted

_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_READ = ("*.json", "*.safetensors", "*.model", "*.jinja")
_NOT_READ = ("*/*", "consolidated*")  # folders with other formats, and Mistral's second copy of the weights


@dataclass(frozen=True)
class PublishedDirectory:
    path: Path  # has no links to files of the Hub's cache
    source: Path  # what the record names
    hub: Mapping[str, str] = field(default_factory=dict)  # repository and commit, if it is of the Hub


@contextmanager
def published_directory(named: Path, beside: Path) -> Iterator[PublishedDirectory]:
    """Yield the directory `named`, or that of the model `organisation/name[@revision]` of the Hub, which is downloaded if needed.

    A folder of the Hub's cache gets hard links, or copies on another file system, in a temporary folder in `beside`.
    """
    source = named if named.is_dir() else _downloaded(named)
    cached = source.absolute()
    repository, commit = cached.parent.parent, cached.name
    blobs = repository / "blobs"
    if cached.parent.name != "snapshots" or not repository.name.startswith("models--") or not blobs.is_dir():
        yield PublishedDirectory(source, source)
        return
    beside.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".import-", dir=beside) as folder:
        for entry in sorted(cached.iterdir()):
            if entry.is_file():
                _link(entry, blobs.resolve(), Path(folder) / entry.name)
        name = repository.name.removeprefix("models--").replace("--", "/")
        try:
            yield PublishedDirectory(Path(folder), source, {"repository": name, "commit": commit})
        except ProjectError as error:
            raise type(error)(str(error).replace(folder, str(source))) from error


def _link(entry: Path, blobs: Path, target: Path) -> None:
    real = entry.resolve()
    if entry.is_symlink() and real.parent != blobs:
        raise ConfigError(f"{entry}: a link to {real}, outside of {blobs}; download the model again")
    try:
        os.link(real, target)
    except OSError:  # another file system, or a file of another user
        shutil.copyfile(real, target)


def _downloaded(named: Path) -> Path:
    name = _NAME.fullmatch(str(named))
    if name is None:
        raise ConfigError(
            f"{named}: no such directory; name the Hugging Face directory with config.json and the weights, or a model of the "
            "Hub as organisation/name"
        )
    from httpx2 import HTTPError  # noqa: PLC0415 - with the next line half a second, for an import by name alone
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    repository, revision = name["repository"], name["revision"]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_READ), ignore_patterns=list(_NOT_READ)))
    except errors.GatedRepoError:
        raise ConfigError(f"{repository}: its owner asks for consent; agree on its page of the Hub, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{named}: no such directory, and the Hub shows no model {repository} to this account; correct the name, or set "
            "HF_TOKEN if the model is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{named}: {repository} has no revision {revision}; name a branch, a tag or a commit") from None
    except (OSError, ValueError, HTTPError) as error:
        at = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"{named}: no such directory, and the model cannot be downloaded ({redacted(str(error).splitlines()[0])}); run on a "
            f"machine with a network: hf download {repository}{at} --local-dir models/{repository.partition('/')[2]}, and import "
            "that directory"
        ) from None

"""Puts the results of the stages together and publishes them: moves them into place, the manifest last.

A reader finds old data, new data, or no manifest.
"""

from __future__ import annotations

import logging
import os
import reprlib
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, PreparedDataError
from common.files import (
    UnusableFileError,
    canonical_json,
    commit_directory,
    digest_bytes,
    digest_file,
    open_input,
    sync_directory,
    write_atomic,
)
from common.settings.dotted import flatten
from common.text import some_of
from data_pipeline.config.prepare import KeptRejects
from data_pipeline.dataset.layout import (
    CARD,
    CHOSEN,
    FOLDERS,
    INPUTS,
    LABELS,
    MANIFEST,
    PUBLISHED,
    REFERENCE,
    REJECTS,
    REPORT,
    REPORT_PAGE,
    SINGLE_FILES,
    TIMINGS,
    TOKENIZER,
    TOKENS,
    WORK,
    rejected_name,
)
from data_pipeline.dataset.locks import replacing
from data_pipeline.dataset.manifest import FORMAT, MASKED_FORMAT, Manifest, OtherFormatError, ShardEntry, read_manifest
from data_pipeline.dataset.shards import token_type
from data_pipeline.dataset.tables import data_path
from data_pipeline.publishing.fingerprint import fingerprint_of
from data_pipeline.publishing.ownership import check_nothing_foreign, noted_files, own_files, work_folders, write_note
from data_pipeline.reports.pages import render_card, render_report
from data_pipeline.stages.pack import DocumentsOf, PackResult, PackTask
from data_pipeline.stages.train_tokenizer import TrainedTokenizer

logger = logging.getLogger(__name__)
_SHOWN = 3  # most settings and files in a message


def reuse_finished(directory: Path, fingerprint: str, *, rejects: KeptRejects = "none") -> Manifest | None:
    """Return the manifest, and remove the work; None unless the folder holds the undamaged result of these settings and inputs.

    A file whose size and times match the note is not read, because digesting a terabyte takes about an hour.
    """
    try:
        manifest = read_manifest(directory)
    except PreparedDataError:
        return None
    wanted = [] if rejects == "none" else [REJECTS]
    wanted += [rejected_name(number) for number in range(len(manifest.partitions))] if rejects == "all" else []
    if manifest.fingerprint != fingerprint or any(_state(directory, name) is None for name in wanted):
        return None
    noted = noted_files(directory)
    for name, digest in manifest.digests.items():
        state = _state(directory, name)
        if state is None or (state != noted.get(name) and not _matches(directory, name, digest)):
            logger.warning("%s: missing or damaged since it was published; everything is prepared again", directory / name)
            return None
    settle(directory, manifest)
    logger.info("%s already holds the data of these settings and inputs: nothing to do", directory)
    return manifest


def settle(directory: Path, manifest: Manifest) -> None:
    """Remove the work, and note the states of the files, so that later runs need not read them."""
    clear_work(directory)  # first: removing a hard link changes a file's ctime
    files = {name: _state(directory, name) for name in manifest.digests}
    if files != noted_files(directory):
        write_note(directory, files)


def clear_work(directory: Path) -> None:
    for work in work_folders(directory):
        shutil.rmtree(work, ignore_errors=True)
    with suppress(OSError):  # it does not exist or is not empty
        (directory / WORK).rmdir()


@dataclass(frozen=True)
class Prepared:
    settings: Mapping[str, Any]  # the result of `settings_of`
    inputs: Sequence[Mapping[str, Any]]
    partitions: Sequence[Mapping[str, Any]]
    tokenizer: TrainedTokenizer
    tokenizer_folder: Path  # folder of the tokenizer's files. Only the files of `tokenizer.files` are published.
    documents: Sequence[DocumentsOf]
    packed: Sequence[tuple[PackTask, PackResult]]
    report: dict[str, Any]
    timings: dict[str, Any]
    has_mask: bool  # whether tables or shards have a loss mask
    reference: Path | None = None  # the reference model, if one was trained


def assemble(prepared: Prepared, output: Path, work: Path, more: Mapping[str, Path | bytes]) -> Manifest:
    report = canonical_json(prepared.report)
    tokenizer = prepared.tokenizer
    shards, listed = _named(prepared.packed)
    listed |= {f"{TOKENIZER}/{name}": (prepared.tokenizer_folder / name, digest) for name, digest in tokenizer.files.items()}
    listed[REPORT] = (report, digest_bytes(report))
    if prepared.reference is not None:
        listed[REFERENCE] = (prepared.reference, digest_file(prepared.reference))
    for partition in prepared.documents if prepared.settings["packing"]["keep_tokens"] else ():
        for folder in (TOKENS, CHOSEN):
            path = data_path(partition.place(folder))
            listed[f"{folder}/{path.name}"] = (path, partition.digests[folder])
    manifest, _ = Manifest(
        fingerprint=fingerprint_of(prepared.settings, prepared.inputs),
        row_length=prepared.settings["row_length"],
        vocab_size=tokenizer.vocab_size,
        token_type=token_type(tokenizer.vocab_size).name,
        tokenizer_kind=tokenizer.kind,
        tokenizer_digest=tokenizer.digest,
        sources=tuple(dict.fromkeys(partition["source"] for partition in prepared.partitions)),
        shards=tuple(shards),
        files={name: digest for name, (_, digest) in listed.items()},
        inputs=tuple(dict(identity) for identity in prepared.inputs),
        partitions=tuple(dict(identity) for identity in prepared.partitions),
        config=dict(prepared.settings),
        totals=prepared.report,
        format=MASKED_FORMAT if prepared.has_mask else FORMAT,
    ).sealed()
    files: dict[str, Path | bytes] = {
        **{entry.path: path for entry, path in shards.items()},
        **{name: content for name, (content, _) in listed.items()},
        REPORT_PAGE: render_report(manifest, prepared.timings).encode(),
        CARD: render_card(manifest).encode(),
        TIMINGS: canonical_json(prepared.timings),
        **more,
    }
    return publish(output, work, manifest, files)


def _named(packed: Sequence[tuple[PackTask, PackResult]]) -> tuple[dict[ShardEntry, Path], dict[str, tuple[Path | bytes, str]]]:
    """Return the current path of each shard, and path and digest of each table of facts or labels, by its published name."""
    numbers: Counter[str] = Counter()
    shards: dict[ShardEntry, Path] = {}
    tables: dict[str, tuple[Path | bytes, str]] = {}

    def name(begin: str) -> str:
        numbers[begin] += 1
        return f"{begin}-{numbers[begin] - 1:05d}.arrow"

    for task, result in packed:
        for shard in result.shards:
            counts = {key: value for key, value in shard.items() if key != "name"}
            path = name(f"{task.split}/{task.source}")
            shards[ShardEntry(path=path, split=task.split, source=task.source, **counts)] = task.output / shard["name"]
        for folder, digest in result.tables.items():
            of_split = f"{task.split}-" if folder == LABELS else ""
            tables[name(f"{folder}/{of_split}{task.source}")] = (data_path(task.output / folder), digest)
    return shards, tables


def publish(directory: Path, work: Path, manifest: Manifest, files: Mapping[str, Path | bytes]) -> Manifest:
    """Replace the files of an earlier preparation. After a kill a second run completes it: the results stay until the end."""
    check_nothing_foreign(directory)
    built = work / "final"
    shutil.rmtree(built, ignore_errors=True)
    sealed, manifest_bytes = manifest.sealed()
    for name, content in files.items():
        target = built / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
            continue
        try:
            os.link(content, target)
        except OSError:  # a file system without hard links
            shutil.copyfile(content, target)
    for split in ("train", "val"):
        (built / split).mkdir(exist_ok=True)
    with replacing(directory):
        write_note(directory, dict.fromkeys({*own_files(directory), *files}))
        _swap(built, directory)
        write_atomic(directory / MANIFEST, manifest_bytes)
        settle(directory, sealed)
    return sealed


def _swap(built: Path, directory: Path) -> None:
    outgoing = built.with_name("outgoing")
    shutil.rmtree(outgoing, ignore_errors=True)
    outgoing.mkdir()
    ready = built.with_name("ready")
    shutil.rmtree(ready, ignore_errors=True)
    commit_directory(built, ready)
    # The old manifest goes first. Until the new one is written, the folder holds no prepared data. In another order, a power
    # failure could keep the manifest and lose files that it lists.
    names = sorted(os.listdir(ready))  # noqa: PTH208 - names are wanted
    _move((MANIFEST,), directory, outgoing)
    sync_directory(directory)
    _move({*SINGLE_FILES, *FOLDERS} - {PUBLISHED, INPUTS}, directory, outgoing)  # also those that are not written this time
    _move(names, ready, directory)
    sync_directory(directory)


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    for name in names:
        if os.path.lexists(source / name):
            (source / name).rename(target / name)


def _state(directory: Path, name: str) -> list[int] | None:
    """Return size and times of a file, which change when it is written; None if it does not exist or is a link."""
    try:
        with open_input(directory / name, below=directory) as file:
            status = os.fstat(file.fileno())
    except (OSError, UnusableFileError):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _matches(directory: Path, name: str, digest: str) -> bool:
    try:
        return digest_file(directory / name, below=directory) == digest
    except (OSError, UnusableFileError):  # the device cannot read it; writing the file again may help
        return False


def check_may_replace(
    output: Path, fingerprint: str, settings: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], *, replace: bool
) -> None:
    """ConfigError: other data without `replace`, or data that is being read. Damaged data may be prepared again as it was."""
    try:
        finished = read_manifest(output)
        is_other = finished.fingerprint != fingerprint
        differences = list_differences(finished.config, settings, finished.inputs, inputs)
    except OtherFormatError:
        is_other, differences = True, []
    except PreparedDataError:  # there is no data, or it is unusable
        return
    if is_other and not replace:
        found = "; ".join(differences) or "it was made by another version of this program"
        raise ConfigError(
            f"{output} holds finished data that was prepared differently: {found}. Choose another --output (in containers: "
            "another DATA_NAME), or replace that data with --replace true (PREP_REPLACE=true)"
        )
    with replacing(output):
        pass


def list_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], old_inputs: Sequence[Mapping[str, Any]], new_inputs: Sequence[Mapping[str, Any]]
) -> list[str]:
    before, now = flatten(old, empty=True), flatten(new, empty=True)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    clauses = [f"{name} was {_short(before.get(name))} and is {_short(now.get(name))}" for name in changed[:_SHOWN]]
    if len(changed) > _SHOWN:
        clauses.append(f"{len(changed) - _SHOWN} more settings differ")
    files_before, files_now = ({f"{one['source']}/{one['path']}": one for one in files} for files in (old_inputs, new_inputs))
    for verb, names in (
        ("added", files_now.keys() - files_before.keys()),
        ("missing", files_before.keys() - files_now.keys()),
        ("changed", {name for name in files_before.keys() & files_now.keys() if files_before[name] != files_now[name]}),
    ):
        if names:
            shown = some_of(sorted(names), _SHOWN)
            clauses.append(f"{len(names)} input file{'s are' if len(names) > 1 else ' is'} {verb} ({shown})")
    if files_before == files_now and list(old_inputs) != list(new_inputs):
        clauses.append("the sources are in another order")
    return clauses


def _short(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else reprlib.repr(value)

"""Packs prepared data into rows of another length, from its tokenised documents: byte for byte as `prepare` would."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from pydantic import ValidationError

from common.command_line import stop_on_signals
from common.errors import ConfigError
from common.settings.messages import explain
from common.storage_errors import naming
from data_pipeline.config import BUILTIN, PackingConfig, PrepareConfig
from data_pipeline.dataset.document_tables import label_names
from data_pipeline.dataset.layout import CHOSEN, REFERENCE, TOKENIZER, TOKENS
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import MASKED_FORMAT, Manifest, check_digests, read_manifest
from data_pipeline.dataset.splits import SPLITS
from data_pipeline.dataset.stored_documents import check_tables, check_tokens_kept, read_tokenizer, settings_in
from data_pipeline.dataset.tables import read_side_by_side
from data_pipeline.execution.tasks import Counts, add_counts, commit_result, open_runner
from data_pipeline.publishing.fingerprint import fingerprint_of
from data_pipeline.publishing.ownership import exclusive
from data_pipeline.publishing.publish import Prepared, assemble, check_may_replace
from data_pipeline.reports.facts import lookup
from data_pipeline.reports.lengths import compare_row_lengths
from data_pipeline.reports.terminal import check_report
from data_pipeline.reports.totals import row_counts
from data_pipeline.stages.pack import DocumentsOf, pack_all
from data_pipeline.stages.train_tokenizer import TrainedTokenizer


@dataclass(frozen=True)
class CountTask:
    tokens: Path
    chosen: Path
    output: Path


def repack(directory: Path, output: Path, row_length: int, workers: int | None = None, *, replace: bool = False) -> Manifest:
    try:  # the numbers have the bounds that they have in `prepare`
        config = PrepareConfig(sources=(BUILTIN,), row_length=row_length, workers=workers)
    except ValidationError as error:
        raise ConfigError(explain(PrepareConfig, error)) from None
    if directory.resolve() == output.resolve():
        raise ConfigError(f"--output {output} is the folder of the data that is repacked; choose another --output")
    with reading(directory, "repack"), ExitStack() as opened:
        before = read_manifest(directory)
        check_tokens_kept(directory, before)
        check_report(directory, before)
        packing = settings_in(before, "packing", PackingConfig)
        settings = before.config | {"row_length": row_length, "packing": packing.model_dump(mode="json")}
        fingerprint = fingerprint_of(settings, before.inputs)
        opened.enter_context(stop_on_signals())
        opened.enter_context(naming(output))
        folder = opened.enter_context(exclusive(output))
        check_may_replace(output, fingerprint, settings, before.inputs, replace=replace)
        # Checked before they are packed, because the packed shards get new digests, which would hide damage.
        files = {name: digest for name, digest in before.files.items() if PurePosixPath(name).parent == PurePosixPath(TOKENIZER)}
        tokenizer = dataclasses.replace(
            TrainedTokenizer.of(read_tokenizer(directory, before)),
            files={PurePosixPath(name).name: digest for name, digest in files.items()},
        )
        check_digests(directory, {name: digest for name, digest in before.files.items() if name == REFERENCE})
        for number in range(len(before.partitions)):
            check_tables(directory, before, number)
        with open_runner(config, ("count", "pack"), len(before.partitions)) as run:
            work = folder.start_work(fingerprint)
            labels = label_names(directory, before) if "labels" in before.totals else ()
            fields = lookup(before.totals, "labels", "fields")
            tasks = [
                CountTask(directory / TOKENS / name, directory / CHOSEN / name, work / "counted" / name)
                for name in (f"{number:06d}" for number in range(len(before.partitions)))
            ]
            counted = run("count", count_partition, tasks, [1] * len(tasks), dict[str, Counts])
            documents = [
                DocumentsOf(
                    partition["source"],
                    number,
                    directory,
                    result["tokens"],
                    {folder: before.files[f"{folder}/{number:06d}.arrow"] for folder in (TOKENS, CHOSEN)},
                    fields.get(partition["source"]),
                )
                for number, (partition, result) in enumerate(zip(before.partitions, counted, strict=True))
            ]
            lengths = add_counts(result["lengths"] for result in counted)
            if before.has_pairs and (longest := max(map(int, lengths), default=0)) > row_length:
                raise ConfigError(
                    f"--row_length {row_length}: the longest preference pair has {longest} tokens, and a pair cannot be cut; use "
                    f"at least {longest}, or prepare the pairs again, which rejects those that are too long"
                )
            packed = pack_all(run, row_length, packing, tokenizer, documents, work, labels, has_pairs=before.has_pairs)
        report = before.totals | {
            "truncation": compare_row_lengths(lengths, row_length),
            **row_counts([(task.split, result) for task, result in packed], row_length),
        }
        prepared = Prepared(
            settings=settings,
            inputs=before.inputs,
            partitions=before.partitions,
            tokenizer=tokenizer,
            tokenizer_folder=directory / TOKENIZER,
            documents=documents,
            packed=packed,
            report=report,
            timings=run.progress.summary(),
            has_mask=before.format == MASKED_FORMAT,
            reference=directory / REFERENCE if REFERENCE in before.files else None,
        )
        return assemble(prepared, output, work, {})


def count_partition(task: CountTask) -> dict[str, Counts]:
    """Return the packed tokens by split, and the documents by length, from the borders of the documents alone."""
    tokens: Counts = dict.fromkeys(SPLITS, 0)
    lengths: Counter[str] = Counter()
    for batch, chosen in read_side_by_side(task.tokens, task.chosen):
        copies_D = chosen.column("copies").to_numpy().astype(np.int64)
        lengths_D = np.diff(batch.column("tokens").offsets.to_numpy())
        split_D = batch.column("split").to_numpy()
        for number, split in enumerate(SPLITS):
            tokens[split] += int((lengths_D * copies_D)[split_D == number].sum())
        lengths.update(map(str, lengths_D[copies_D > 0].tolist()))
    return commit_result(task, {"tokens": tokens, "lengths": dict(lengths)})

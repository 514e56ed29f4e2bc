"""Measures what thresholds of `language.min_confidence` keep, on texts whose language is known.

    python -m tests.benchmarks.languages FOLDER

FOLDER has one folder for each language, named by its ISO 639-1 code, with an optional variant after a hyphen (`zh-TW`). All files
that `prepare` can read are read. The files of a folder `und` have no language, such as code. Each row of the table is one language
with its number of documents. For each threshold it has two percentages, for `language.keep` = this language: how many of its own
documents are kept, and how many of the documents in the folders of other languages. The last row is the mean of the languages.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from data_pipeline.config import PrepareConfig
from data_pipeline.filters.html import PageReader
from data_pipeline.filters.judge import JudgedDocument, judge_batch
from data_pipeline.filters.language import UNDETERMINED, Identified, identify
from data_pipeline.sources.inputs import Part, find_inputs
from data_pipeline.sources.readers import read_part

THRESHOLDS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

Found = dict[str, list[Identified]]


def identified(folder: Path, num_documents: int, sample_bytes: int) -> list[Identified]:
    """Return the language that is found for each of the first documents in a folder, after cleaning."""
    with tempfile.TemporaryDirectory() as output:
        update = {"identify": False, "sample_bytes": sample_bytes}
        config = PrepareConfig(sources=(str(folder),), output=Path(output), language=update)
        items = (
            item
            for file in find_inputs(config, Path(output) / "inputs.json")
            for item in read_part(Part(file, 0, file.bytes), config)
        )
        with PageReader(config.limits) as pages:
            judged = judge_batch(list(islice(items, num_documents)), config, pages).items
    return [identify(one.document.text.encode(), config.language) for one in judged if isinstance(one, JudgedDocument)]


def print_table(found: Found) -> None:
    print("| language | documents | " + " | ".join(f"{threshold:g}" for threshold in THRESHOLDS) + " |")
    print("|---|---|" + "---|" * len(THRESHOLDS))
    rows = []
    for name in (name for name in found if name != UNDETERMINED):
        code = code_of(name)
        foreign = [one for other, documents in found.items() if code_of(other) != code for one in documents]
        rows.append([(share_kept(found[name], code, threshold), share_kept(foreign, code, threshold)) for threshold in THRESHOLDS])
        print(f"| {name} | {len(found[name])} | {shown(rows[-1])} |")
    means = [tuple(sum(values) / len(rows) for values in zip(*column, strict=True)) for column in zip(*rows, strict=True)]
    print(f"| mean | | {shown(means)} |")


def share_kept(documents: Sequence[Identified], code: str, threshold: float) -> float:
    return sum(one.language == code and one.confidence >= threshold for one in documents) / max(len(documents), 1)


def shown(shares: Sequence[tuple[float, ...]]) -> str:
    return " | ".join(f"{100 * own:.1f} / {100 * foreign:.2f}" for own, foreign in shares)


def code_of(name: str) -> str:
    return name.partition("-")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=1000, help="most documents of each language (default: 1000)")
    parser.add_argument("--sample_bytes", type=int, default=2048, help="language.sample_bytes (default: 2048)")
    arguments = parser.parse_args()
    folders = sorted(path for path in arguments.folder.iterdir() if path.is_dir())
    found = {folder.name: identified(folder, arguments.documents, arguments.sample_bytes) for folder in folders}
    print_table(found)


if __name__ == "__main__":
    main()

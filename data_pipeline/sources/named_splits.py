"""Which split a published data set gives a file: by the names of files and folders, and by the card of the data set.

The names are those of Hugging Face's datasets library: a word such as `test` between separators, in the path of a file of records.
Of plain text and source code only a whole name counts, because a folder `tests` or a file `test_model.py` is no split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml

from common.errors import SourceError
from common.files import parse_json, read_input

NamedSplit = Literal["train", "validation", "test"]
CARD = "README.md"
_WORDS: Mapping[str, NamedSplit] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_DASHES = "---"
_SEPARATORS = re.compile(r"[-_. 0-9]+")
_MAX_CARD_BYTES = 256 << 10
_MOST_PATTERNS = 10_000
_NO_CARD = (yaml.YAMLError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""Errors of the YAML library, and of a file with other content."""


def named_splits(paths: Mapping[str, bool], root: Path | None) -> dict[str, NamedSplit]:
    """Return the splits of the files of one source, by path. A source of test files alone has none, because it was asked for.

    Args:
        paths: for each path whether the file has records.
        root: the folder of the source if it is on this machine, for its card.
    """
    patterns = _patterns_of_card(root) if root is not None else []
    found = {path: split for path, has_records in paths.items() if (split := _split_of(path, patterns, has_records))}
    has_train = any(found.get(path) == "train" for path in paths)
    # Names of files of text mean a split only beside those of a training split: a book may be called `test.txt`.
    found = {path: split for path, split in found.items() if paths[path] or has_train}
    if not any(found.get(path) in (None, "train") for path in paths):
        found = {path: split for path, split in found.items() if split == "test"}
    return found if any(found.get(path) != "test" for path in paths) else {}


def _split_of(path: str, patterns: Sequence[tuple[str, NamedSplit]], has_records: bool) -> NamedSplit | None:
    for pattern, split in patterns:
        if fnmatchcase(path, pattern):
            return split
    *folders, name = PurePosixPath(path).parts
    stem = (
        name[: -len(suffix)]
        if (suffix := "".join(PurePosixPath(name).suffixes[-1:])) and suffix[1:].lower() not in _WORDS
        else name
    )
    for part in (stem, *reversed(folders)):
        words = [word for word in _SEPARATORS.split(part.lower()) if word]
        chosen = words if has_records else words[-1:] if part == stem or len(words) == 1 else []
        for word in chosen:
            if word in _WORDS:
                return _WORDS[word]
    return None


def _patterns_of_card(root: Path) -> list[tuple[str, NamedSplit]]:
    """Return the paths that the card gives to a split. A card that cannot be read says nothing."""
    found: list[tuple[str, NamedSplit]] = []
    try:
        card: Any = yaml.safe_load(_front_matter(read_input(root / CARD, _MAX_CARD_BYTES, below=root).decode("utf-8-sig")))
        for config in _list(card["configs"]):
            folder = f"{config['data_dir']}/" if isinstance(config.get("data_dir"), str) else ""
            files = config.get("data_files")
            entries = files.items() if isinstance(files, dict) else [(one.get("split"), one.get("path")) for one in _list(files)]
            for name, paths in entries:
                if (split := _word_of(name)) is None:
                    continue
                for path in [paths] if isinstance(paths, str) else _list(paths):
                    found.append((PurePosixPath(folder + path).as_posix(), split))
                    if len(found) >= _MOST_PATTERNS:
                        return found
    except (OSError, *_NO_CARD):
        pass
    return found


def _front_matter(card: str) -> str:
    """Return the YAML between the first line and the next one of three dashes."""
    first, *lines = [line.rstrip() for line in card.split("\n")]
    return "\n".join(lines[: lines.index(_DASHES)]) if first == _DASHES and _DASHES in lines else ""


def _word_of(name: object) -> NamedSplit | None:
    words = _SEPARATORS.split(name.lower()) if isinstance(name, str) else []
    return next((_WORDS[word] for word in words if word in _WORDS), None)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def stale_files(paths: Iterable[str], root: Path) -> set[str]:
    """Return the Arrow files that the state.json beside them does not name: an earlier `save_to_disk` of datasets has left them."""
    by_folder: dict[str, set[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if name.endswith(".arrow"):
            by_folder.setdefault(folder, set()).add(name)
    stale = set()
    for folder, names in by_folder.items():
        try:
            state = parse_json(read_input(root / folder / "state.json", _MAX_CARD_BYTES, below=root))
            named = {PurePosixPath(one["filename"]).name for one in state["_data_files"]}
        except (OSError, *_NO_CARD):
            continue
        if missing := sorted(named - names):
            raise SourceError(f"{root / folder / 'state.json'} names {missing[0]}, which is missing; copy the whole folder again")
        stale |= {f"{folder}/{name}" if folder else name for name in names - named}
    return stale

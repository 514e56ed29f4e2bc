"""Says why a source holds no text: what is in it instead, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common.files import UnusableFileError, read_input
from common.mounts import named_mount
from data_pipeline.sources.formats import UNDERSTOOD, extension_of, shape_of
from data_pipeline.sources.storage import Found, Listing, is_url

__all__ = ["count_extensions", "explain_no_text", "is_placeholder"]

_PLACEHOLDERS = {"README.md", ".gitignore"}
"""What the folder `text` of a fresh checkout holds."""
_FIRST_LINE = b"# Put your text here\n"
_MAX_README_BYTES = 1 << 20
_SHOWN = 8  # extensions in a message


def is_placeholder(folder: Path) -> bool:
    """Whether a folder is empty, or holds nothing but the files that say "put your text here"."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names <= _PLACEHOLDERS:
        return False
    try:
        return "README.md" not in names or read_input(folder / "README.md", _MAX_README_BYTES).startswith(_FIRST_LINE)
    except UnusableFileError:
        return False


def explain_no_text(shown: str, listing: Listing, files: Sequence[Found]) -> str:
    """One line about a source without text.

    Args:
        shown: the source without its secrets, for the message.
        listing: what was found there.
        files: those of its files that were looked at.
    """
    unknown = [file for file in files if shape_of(file.path) is None]
    found, remedies = [], []
    if unknown:
        found.append(f"{count_extensions(unknown)} cannot be read")
        remedies.append("convert these files to text")
    if len(unknown) < len(files):
        num_empty = len(files) - len(unknown)
        found.append(f"{num_empty} file{'s are' if num_empty > 1 else ' is'} empty")
    for links in listing.unfollowed:
        found.append(links.found)
        remedies.append(links.remedy)
    if not found and listing.is_folder and not is_url(listing.root):
        is_empty = not any(Path(listing.root).iterdir())
        found.append("it is empty" if is_empty else "names that begin with a dot, and a README.md at its top, do not count")
    mount = named_mount(Path(listing.root))
    remedies.append(f"name another folder{f' with {mount}' if mount else ''}")
    *first, last = remedies
    advice = f"{', '.join(first)}, or {last}" if first else last
    found[:0] = ["no file with text in it"]
    return f"source {shown}: {'; '.join(found)}. Formats that are read: {UNDERSTOOD}. To do: {advice}"


def count_extensions(files: Sequence[Found]) -> str:
    """The number of files with each extension, the most frequent first: `7 .pdf, 5 .docx`."""
    counts = Counter(extension_of(file.path) or "without an extension" for file in files)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ordered[:_SHOWN]) + (", …" if len(ordered) > _SHOWN else "")

"""Writes docs/reference/settings.md, docs/reference/commands.md and parts of other pages from the code (`make reference`).

    python -m docs.write_reference

A part of a page is between the lines `<!-- made: NAME -->` and `<!-- end -->`. `tests/unit/test_reference_pages.py` checks that the
pages are those of the code.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, takewhile, zip_longest
from pathlib import Path

from common.command_line import PROGRAM
from common.errors import ExitCode
from common.settings.command import loaded
from common.settings.markers import NotSearched
from common.settings.model import Settings, markers_of, section_title
from common.settings.options import SettingText, setting_texts
from data_pipeline.config import PrepareConfig
from data_pipeline.sources.formats import UNDERSTOOD
from docs.conversations import FIELDS, outcomes
from trainer.config import TrainConfig
from trainer.program import all_commands

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
_PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMN = 44
_SHARED = 4
"""An option that this many commands have stands once, above the commands."""
_BOTH_BOUNDS = re.compile(r">= (\S+), <= (\S+)")
_SECTION = re.compile(r"`--(\w+)\.")
"""An option of a command that is a setting of a section of `train`."""
_NOTE = "<!-- Made by `python -m docs.write_reference`; do not edit. -->\n"


def settings_page() -> str:
    """Return the page with every setting of `prepare` and `train`."""
    parts = [
        _NOTE,
        "# Settings\n",
        "Each setting has one name and three places: `--optim.lr 3e-4` on the command line, `TRAIN_OPTIM__LR=3e-4` in the\n"
        "environment, and `lr = 3e-4` below `[train.optim]` in a recipe. The first of them that sets it wins. For `prepare` the\n"
        "variables begin with `PREP_`, and the tables with `[prepare…]`. `none` unsets a setting that may be unset.\n",
        "The default follows the name, with type and bounds. Without a default, a setting is not set.\n",
    ]
    for model, command in ((PrepareConfig, "prepare"), (TrainConfig, "train")):
        parts.append(f"## {PROGRAM} {command}\n")
        for section, title, rows in _sections(model):
            parts += [f"### {command}: {section or 'main settings'}\n", f"{title}\n" if title else ""]
            parts.append(_list(_items(rows)))
    return "\n".join(part for part in parts if part)


def commands_page() -> str:
    """Return the page with every command and its options."""
    parts = [
        _NOTE,
        "# Commands\n",
        f"`{PROGRAM} COMMAND --help` prints the same. The last line of stdout of a command is for programs, and does not change.\n",
    ]
    commands = all_commands()
    models = {name: loaded(command)[0] for name, command in commands.items()}
    options = {name: list(map(_item, setting_texts(model))) for name, model in models.items() if not issubclass(model, Settings)}
    uses = Counter(row for rows in options.values() for row in rows)
    shared = [row for row, number in uses.items() if number >= _SHARED]
    parts += ["Options of several commands, which the list of a command only names:\n", _list(shared)]
    for name, command in commands.items():
        parts += [f"## {PROGRAM} {name}\n", f"{command.summary[:1].upper()}{command.summary[1:]}.\n"]
        if name not in options:
            page = "prepare" if issubclass(models[name], PrepareConfig) else "train"
            parts.append(f"It has the settings of [`{page}`](settings.md#trainer-{page}).\n")
            continue
        sections = {row: found[1] for row in options[name] if (found := _SECTION.match(row))}
        own = [row for row in options[name] if row not in {*shared, *sections}]
        if own:
            parts.append(_list(own))
        also = [row.split()[0].rstrip(":") for row in options[name] if row in shared]
        also += [f"the settings [`{section}`](settings.md#train-{section})" for section in sorted({*sections.values()})]
        if also:
            parts.append(f"{'Also' if own else 'It has'} {', '.join(also)}.\n")
    return "\n".join(parts)


def layers() -> str:
    """Return the layers of the packages side by side, as the contracts in pyproject.toml have them."""
    contracts = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    columns = [
        [*contract["containers"], *(f"  {layer.replace(' | ', '  ')}" for layer in contract["layers"])]
        for contract in contracts
        if contract["type"] == "layers"
    ]
    lines = [f"{left:<{_COLUMN}}{right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]
    return "\n".join(["```", *lines, f"{'common':>{_COLUMN}}", "```", ""])


def commands_without_a_socket() -> str:
    """Return a sentence with the commands that listen on no socket."""
    names = sorted(name for name, command in all_commands().items() if not command.listens)
    return f"Apart from the cases in the table, these commands listen on no socket: {', '.join(f'`{name}`' for name in names)}.\n"


def fields_of_conversations() -> str:
    """Return the table of what becomes of the fields of a record."""
    found = outcomes()
    forms = list(found)
    return _table(("field", *forms), ((f"`{field}`", *(found[form][field] for form in forms)) for field in FIELDS))


def exit_codes() -> str:
    """Return the table of the exit codes."""
    return _table(("exit code", "means"), ((str(int(code)), code.meaning) for code in ExitCode))


def extensions() -> str:
    """Return the extensions of all source formats."""
    return f"{UNDERSTOOD}.\n"


def not_searched() -> str:
    """Return a sentence with the settings that a search cannot vary."""
    names = ", ".join(f"`{name}`" for name in markers_of(TrainConfig, NotSearched))
    return f"A search cannot vary these settings and sections: {names}.\n"


def pages_with_parts() -> list[Path]:
    """Return the pages that have a part made from the code."""
    return sorted(page for page in (*DOCS.rglob("*.md"), DOCS.parent / "text/README.md") if _PART.search(page.read_text()))


def with_made_parts(page: str) -> str:
    """Return the text of a page with its parts as the code makes them."""
    made = (layers, commands_without_a_socket, fields_of_conversations, exit_codes, extensions, not_searched)
    by_name = {function.__name__: function for function in made}
    return _PART.sub(lambda part: part[1] + by_name[part[2]]() + part[3], page)


def _sections(model: type[Settings]) -> Iterable[tuple[str, str, list[SettingText]]]:
    sections: dict[str, list[SettingText]] = {}
    for one in setting_texts(model):
        sections.setdefault(one.name.rpartition(".")[0], []).append(one)
    for section, rows in sections.items():
        yield section, section_title(model, section) if section else "", rows


def _items(rows: list[SettingText], num_said: int = 0) -> Iterable[str]:
    """Yield the items of a list, whose first `num_said` needs stand above it. Neighbours with common needs are below an item."""
    for need, group in groupby(rows, lambda one: one.needs[num_said : num_said + 1]):
        alike = list(group)
        if not need or len(alike) == 1:
            yield from (_item(one, num_said) for one in alike)
            continue
        same = takewhile(lambda column: len({*column}) == 1, zip(*(one.needs for one in alike), strict=False))
        common = [column[0] for column in same]
        yield f"These need {' and '.join(common[num_said:])}:"
        yield from (f"    {'' if item.startswith(' ') else '- '}{item}" for item in _items(alike, len(common)))


def _item(one: SettingText, num_said: int = 0) -> str:
    kind = ", ".join(filter(None, (one.values, _compact(one.bounds))))
    says_none = one.default == "none" and one.values.endswith("|none")
    default = "" if says_none or not one.default else f"`{one.default}`"
    head = " ".join(filter(None, (f"`{one.name}`", default, f"({kind})" if kind else "")))
    needs = f" Needs {' and '.join(one.needs[num_said:])}." if one.needs[num_said:] else ""
    return f"{head}: {one.description}{needs}"


def _compact(bounds: str) -> str:
    """Return two inclusive bounds as `1..9`, and others as signs without spaces."""
    both = _BOTH_BOUNDS.fullmatch(bounds)
    return f"{both[1]}..{both[2]}" if both else re.sub("([<>]=?) ", r"\1", bounds).replace(">=", "≥").replace("<=", "≤")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    first, *lines = [f"| {' | '.join(map(_cell, line))} |\n" for line in (head, *rows)]
    return f"{first}|{'---|' * len(head)}\n{''.join(lines)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _list(items: Iterable[str]) -> str:
    return "".join(f"{'' if item.startswith(' ') else '- '}{item}\n" for item in items)


if __name__ == "__main__":
    REFERENCE.mkdir(exist_ok=True)
    (REFERENCE / "settings.md").write_text(settings_page())
    (REFERENCE / "commands.md").write_text(commands_page())
    for page in pages_with_parts():
        page.write_text(with_made_parts(page.read_text()))

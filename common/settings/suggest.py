from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module

from pydantic import BaseModel

from common.settings.markers import AlsoCalled
from common.settings.model import PROGRAMS, markers_of

_MOST = 4


def nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def suggest(name: str, spelled: Mapping[str, str], model: type[BaseModel] | None = None) -> str:
    """Return the end of an error message; empty if none is similar. `spelled` has the message's spelling by dotted name.
    `model` has the settings, with what other tools call them.

    The last part of the name decides first, so `lr` and `train.lr` mean `optim.lr`; then names of other tools, then similar ones.
    """
    name = name.lstrip("-").partition("=")[0].replace("-", "_").lower()
    if not name:
        return ""
    found = list(dict.fromkeys(_meant(name, list(spelled), model))) or _similar(name, spelled)
    if found:
        *others, last = [spelled[one] for one in found[:_MOST]]
        return f"; did you mean {' or '.join((', '.join(others), last) if others else (last,))}?"
    for program, place in PROGRAMS.items() if model else ():
        module, _, settings = place.partition(":")
        if elsewhere := list(_also_called(_leaf(name), getattr(import_module(module), settings))):
            return f"; {program} has --{elsewhere[0]}"
    return ""


def _meant(name: str, known: list[str], model: type[BaseModel] | None) -> Iterator[str]:
    exact = [one for one in known if _letters(one) == _letters(name)]
    yield from exact
    if exact:
        return
    section, leaf = name.rpartition(".")[0], _leaf(name)
    of_section = {_leaf(one): one for one in known if section and one.rpartition(".")[0] == section}
    yield from (of_section[close] for close in difflib.get_close_matches(leaf, of_section, n=1, cutoff=0.6))
    yield from (one for one in known if _letters(_leaf(one)) == _letters(leaf))
    yield from (one for one in (_also_called(leaf, model) if model else ()) if one in known)


def _similar(name: str, known: Iterable[str]) -> list[str]:
    """The settings whose last part is similar; else the one with the most similar name."""
    leaves = {_leaf(one) for one in known}
    close = difflib.get_close_matches(_leaf(name), leaves, n=1, cutoff=0.75)
    return [one for one in known if _leaf(one) in close] or difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)


def _also_called(leaf: str, model: type[BaseModel]) -> Iterator[str]:
    for setting, called in markers_of(model, AlsoCalled).items():
        if _letters(leaf) in map(_letters, called.names.split()):
            yield setting


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _letters(name: str) -> str:
    return name.replace("_", "").replace(".", "")

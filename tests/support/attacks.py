"""Finds all regular expressions of the product, and texts that make a slow one slow."""

from __future__ import annotations

import ast
import importlib
import os
import re
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import sre_constants as op
    import sre_parse

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "data_pipeline", "trainer")
LENGTH = 100_000
_FUNCTIONS = frozenset(("compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer"))
_AT_THE_START = frozenset(("match", "fullmatch"))
_ORDINARY = " \n\ta1\"'.<\\/=-_\u00e9"
_TYPICAL = {
    op.CATEGORY_DIGIT: "1",
    op.CATEGORY_NOT_DIGIT: "a",
    op.CATEGORY_SPACE: " ",
    op.CATEGORY_NOT_SPACE: "a",
    op.CATEGORY_WORD: "a",
    op.CATEGORY_NOT_WORD: " ",
}
_MAX_EXAMPLES = 12
_MAX_PREFIXES = 24


@dataclass(frozen=True)
class Site:
    """A place in the source where a regular expression is made."""

    module: str
    place: str
    """Module and enclosing functions, such as `common.files` or `trainer.doctor.host.Settings.number`."""
    line: int
    patterns: tuple[re.Pattern[Any], ...]
    """Empty if the values of the place are only known when it runs."""
    at_the_start: bool
    """Whether it is only compared with the beginning of a text."""


def sites() -> Iterator[Site]:
    """Yield every call of a function of `re` in the product."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            calls = list(_calls(tree, ()))
            if calls:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                values = vars(importlib.import_module(name))
                for call, functions, method in calls:
                    uses = {method} if method != "compile" else _uses(tree, _names_of(tree, call, "".join(functions[-1:])))
                    at_the_start = bool(uses) and uses <= _AT_THE_START
                    yield Site(name, ".".join((name, *functions)), call.lineno, _patterns(call, values), at_the_start)


def _calls(node: ast.AST, functions: tuple[str, ...]) -> Iterator[tuple[ast.Call, tuple[str, ...], str]]:
    for child in ast.iter_child_nodes(node):
        inner = (*functions, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else functions
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in _FUNCTIONS:
            yield from [(child, inner, child.func.attr)] * (ast.unparse(child.func.value) == "re")
        yield from _calls(child, inner)


def _names_of(tree: ast.Module, call: ast.Call, function: str) -> set[str]:
    """Return the names that get the result of a call, or of the function that makes it."""

    def is_from(value: ast.expr) -> bool:
        return any(one is call or (isinstance(one, ast.Call) and ast.unparse(one.func) == function) for one in ast.walk(value))

    found = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and is_from(node.value))
    return {one.id for node in found for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _uses(tree: ast.Module, names: set[str]) -> set[str]:
    """Return the methods by which a compiled expression is used; `search` for any other use."""
    methods = {id(node.value): node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    loads = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names)
    return {methods.get(id(node), "search") for node in loads}


class _Escaped(ast.NodeTransformer):
    """Puts an example in the place of a text that `re.escape` makes a literal."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.Constant("ab") if ast.unparse(node.func) == "re.escape" else node


def _patterns(call: ast.Call, values: Mapping[str, Any]) -> tuple[re.Pattern[Any], ...]:
    """Return the expression of a call; nothing if it has names that only exist when the call is made."""
    source = _value(call.args[0], values)
    flags = [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "compile":
        flags += call.args[1:2]
    if source is None or isinstance(source, re.Pattern):
        return () if source is None else (source,)
    return (re.compile(source, _value(flags[0], values) if flags else 0),)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression of the source; None if it needs a local name."""
    body = _Escaped().visit(ast.parse(ast.unparse(node), mode="eval").body)
    try:
        return eval(compile(ast.fix_missing_locations(ast.Expression(body)), "", "eval"), dict(values))
    except NameError:
        return None


def attacks_on(pattern: re.Pattern[Any]) -> Iterator[str]:
    """Yield texts of `LENGTH` characters: equal characters, and what the expression nearly matches, again and again."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    parsed = sre_parse.parse(source, pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags)
    examples = sorted(set(_examples(parsed)), key=len)[:_MAX_EXAMPLES]
    prefixes = list(dict.fromkeys(one[:end] for one in examples for end in range(1, len(one) + 1)))
    step = max(1, len(prefixes) // _MAX_PREFIXES)
    chosen = prefixes[::step]
    characters = dict.fromkeys(_ORDINARY + "".join(sorted({one for text in examples for one in text})))
    units = [*characters, *("".join(pair) for pair in product("a1 ", ". '\"\n") if pair[0] != pair[1]), *chosen]
    yield from (_filled("", unit) for unit in dict.fromkeys(units))
    yield from (_filled(prefix, one) for prefix in chosen[:: max(1, len(chosen) // 6)] for one in " a1")
    yield from (_filled(prefix, prefix[-1]) for prefix in chosen[:: max(1, len(chosen) // 6)])


def problem_within(seconds: int, work: Callable[[Callable[[str], None]], None]) -> str:
    """Run a function in a forked process with a limit on processor time; return an empty string, or its last note.

    Args:
        seconds: of processor time, so that a busy machine changes nothing.
        work: gets a function that takes a note. It must not take locks, because other threads of this process do not exist there.
    """
    receiver, sender = os.pipe()

    def note(text: str) -> None:
        os.write(sender, f"{text}\0".encode("utf-8", "replace"))

    if (child := os.fork()) == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            work(note)
            os._exit(0)
        except BaseException as error:
            note(f"{type(error).__name__}: {error}")
        finally:
            os._exit(1)
    os.close(sender)
    with os.fdopen(receiver, "rb") as file:
        notes = file.read().decode("utf-8", "replace").split("\0")
    return "" if os.waitpid(child, 0)[1] == 0 else ["no note", *notes][-2]


def _filled(prefix: str, unit: str) -> str:
    return prefix + unit * (LENGTH // len(unit)) + "\0"


def _examples(parsed: Iterable[tuple[Any, Any]]) -> list[str]:
    """Return short texts that match an expression, or nearly do, one for each alternative."""
    texts = [""]
    for code, value in parsed:
        if code is op.BRANCH:
            parts = [text for branch in value[1] for text in _examples(branch)]
        elif code is op.SUBPATTERN:
            parts = _examples(value[3])
        elif code in (op.MAX_REPEAT, op.MIN_REPEAT, getattr(op, "POSSESSIVE_REPEAT", None)):
            parts = _examples(value[2])[:_MAX_EXAMPLES]
        elif code is getattr(op, "ATOMIC_GROUP", None):
            parts = _examples(value)
        elif code is op.LITERAL:
            parts = [chr(value)]
        elif code in (op.IN, op.NOT_LITERAL, op.ANY):
            parts = [_member(code, value)]
        elif code is op.ASSERT and value[0] > 0:
            parts = _examples(value[1])
        else:
            parts = [""]
        texts = [text + part for text in texts for part in parts][: 4 * _MAX_EXAMPLES]
    return texts


def _member(code: Any, value: Any) -> str:
    if code is op.ANY or code is op.NOT_LITERAL or value[0][0] is op.NEGATE:
        return "a"
    kind, first = value[0]
    return _TYPICAL[first] if kind is op.CATEGORY else chr(first[0] if kind is op.RANGE else first)

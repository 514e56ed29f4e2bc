"""What `python -m data_pipeline` makes of its words; what the commands do is tested elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError, DataError
from data_pipeline.__main__ import main
from data_pipeline.commands.repack import RepackOptions
from data_pipeline.commands.table import COMMANDS
from data_pipeline.config import PrepareConfig


def test_the_usage_lists_every_command_and_another_word_is_refused_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert re.findall(r"^  (\w+) +", capsys.readouterr().out, re.MULTILINE) == list(COMMANDS)
    with pytest.raises(ConfigError, match=f"is not a command; the commands are {', '.join(COMMANDS)}$"):
        main(["prepaer"])


@pytest.mark.parametrize("name", ["row_length", "workers"])
def test_repack_has_the_bounds_of_prepare(name: str) -> None:
    own, of_prepare = (
        [item for item in model.model_fields[name].metadata if hasattr(item, "ge") or hasattr(item, "le")]
        for model in (RepackOptions, PrepareConfig)
    )
    assert own == of_prepare != []


def test_the_options_of_repack_reach_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def remember(*given: Any, **named: Any) -> SimpleNamespace:
        calls.append((given, named))
        return SimpleNamespace(root_digest="sha256:1")

    monkeypatch.setattr("data_pipeline.repack.repack", remember)
    main(["repack", "d", "--output", "o", "--row_length", "64"])
    main(["repack", "d", "--output", "o", "--row_length", "64", "--workers", "2", "--replace"])
    assert capsys.readouterr().out == "root digest sha256:1\n" * 2
    assert calls == [
        ((Path("d"), Path("o"), 64, None), {"replace": False}),
        ((Path("d"), Path("o"), 64, 2), {"replace": True}),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("repack", "d", "--row_length", "64"), "^--output is not set"),
        (("repack", "d", "--output", "o", "--row_length", "7"), "^--row_length = '7': input should be greater than or equal to 8$"),
        (("verify",), "the following arguments are required: DIR"),
        (("inspect", "d", "--document", "first"), "^--document = 'first': input should be a valid integer"),
        (("leaks", "d", "--agianst", "f"), r"--agianst f; did you mean --against\?"),
    ],
)
def test_a_mistake_is_answered_with_what_is_needed(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(words)


@pytest.mark.parametrize(("leaked", "contaminated", "strict", "fails"), [(1, 0, 0, 1), (0, 1, 0, 0), (0, 1, 1, 1), (0, 0, 1, 0)])
def test_leaks_fails_on_a_leak_and_if_it_is_strict_on_benchmarks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leaked: int, contaminated: int, strict: int, fails: int
) -> None:
    report = SimpleNamespace(leaked=leaked, contaminated=contaminated, describe=lambda: "")
    for name in ("manifest.read_manifest", "stored_documents.settings_in", "stored_documents.read_documents"):
        monkeypatch.setattr(f"data_pipeline.dataset.{name}", lambda *_, **__: None)
    monkeypatch.setattr("data_pipeline.dedup.leaks.check_leaks", lambda *_: report)
    words = ["leaks", str(tmp_path), *(["--strict"] if strict else [])]
    if fails:
        with pytest.raises(DataError, match="the list above shows where"):
            main(words)
    else:
        main(words)

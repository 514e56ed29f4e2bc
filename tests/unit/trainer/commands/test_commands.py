"""What `python -m trainer` makes of its words, and how it ends; what the commands do is tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.command_line import run_command
from common.errors import ConfigError, ExitCode, StorageError
from trainer.__main__ import _announce, main

TRAIN = ("train", "--data", "data", "--run", "run", "--limits.steps", "1")


@pytest.fixture
def exit_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "exit"
    monkeypatch.setenv("TRAINER_EXIT_FILE", str(path))
    return path


def broken_pipe(*_: Any, **__: Any) -> str:
    raise BrokenPipeError(32, "Broken pipe")


def test_a_training_whose_log_is_closed_is_not_done(exit_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.commands.train.train", broken_pipe)
    with pytest.raises(StorageError, match="run the same command again"):
        main(TRAIN)
    monkeypatch.setattr("builtins.print", broken_pipe)  # errors went the same way as the log
    assert run_command(main, TRAIN, _announce) == ExitCode.STORAGE
    assert exit_file.read_text() == f"{int(ExitCode.STORAGE)}\n"


def test_a_training_is_done_where_only_its_result_has_no_reader(exit_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.commands.train.train", lambda _: "weights")
    monkeypatch.setattr("builtins.print", broken_pipe)
    with pytest.raises(BrokenPipeError):
        main(TRAIN)
    assert exit_file.read_text() == f"{int(ExitCode.DONE)}\n"


@pytest.mark.parametrize(("rank", "local_rank", "leaves"), [("0", "0", True), ("8", "0", True), ("1", "1", False)])
def test_every_node_learns_that_a_training_is_done_and_one_rank_tells_its_result(
    exit_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    local_rank: str,
    leaves: bool,
) -> None:
    monkeypatch.setattr("trainer.commands.train.train", lambda _: "weights")
    monkeypatch.setattr("trainer.__main__.end_with_parent", lambda: None)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    main(TRAIN)
    assert exit_file.exists() == leaves
    assert capsys.readouterr().out == ("weights\n" if rank == "0" else "")


def test_stops_and_stop_tokens_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def remember(request: Any) -> Iterator[str]:
        requests.append(request)
        yield ""

    monkeypatch.setattr("trainer.commands.generate.written_texts", remember)
    main(["generate", "run", "--stop", "a", "b", "--stop", "c", "--stop_token", "1", "--stop_token", "2"])
    main(["generate", "run"])
    assert [(request.sampling.stop, list(request.stop_tokens)) for request in requests] == [(("a", "b", "c"), ["1", "2"]), ((), [])]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", "once", "caf\udce9"), "--prompt is no UTF-8 text"),
        (("--reference", "other"), "add --score, or leave out --reference"),
    ],
)
def test_words_that_cannot_be_obeyed_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["generate", "run", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "run", "--level", "integrity", "--from", "0"), "add --replay N or --level replay, or leave out --from"),
        (("verify", "run", "--sources", "text"), "add --level data, or leave out --sources"),
        (("verify", "run", "--replay", "3", "--sources", "text"), "add --level data, or leave out --sources"),
        (("audit", "run", "--full"), "add --step N, or leave out --full"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(words)


def test_help_names_every_command_and_another_word_is_refused_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    commands = [line.split()[0] for line in capsys.readouterr().out.split("commands:\n")[1].splitlines()]
    assert commands[:3] == ["train", "evaluate", "generate"]
    with pytest.raises(ConfigError, match=f"the commands are {', '.join(commands)}$"):
        main(["trian"])

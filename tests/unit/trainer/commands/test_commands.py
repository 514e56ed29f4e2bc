"""What `python -m trainer` makes of its words, and how it ends; what the commands do is tested elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.command_line import run_command
from common.errors import CheckpointError, ConfigError, ExitCode, StorageError
from tests.support.runs import ROOT
from trainer.__main__ import _announce, main
from trainer.commands import generate
from trainer.commands.evaluate import EvaluateOptions
from trainer.commands.generate import GenerateOptions
from trainer.launch.command import COMMANDS
from trainer.verification.verify import Outcome

TRAIN = ("train", "--data", "data", "--run", "run", "--limits.steps", "1")


@pytest.fixture
def exit_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "exit"
    monkeypatch.setenv("TRAINER_EXIT_FILE", str(path))
    return path


def broken_pipe(*_: Any, **__: Any) -> str:
    raise BrokenPipeError(32, "Broken pipe")


def test_a_training_whose_log_is_closed_is_not_done(exit_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.loop.train", broken_pipe)
    with pytest.raises(StorageError, match="run the same command again"):
        main(TRAIN)
    monkeypatch.setattr("builtins.print", broken_pipe)  # errors went the same way as the log
    assert run_command(main, TRAIN, _announce) == ExitCode.STORAGE
    assert exit_file.read_text() == f"{int(ExitCode.STORAGE)}\n"


def test_a_training_is_done_where_only_its_result_has_no_reader(exit_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.loop.train", lambda _: "weights")
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
    monkeypatch.setattr("trainer.loop.train", lambda _: "weights")
    monkeypatch.setattr("trainer.__main__.end_with_parent", lambda: None)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    main(TRAIN)
    assert exit_file.exists() == leaves
    assert capsys.readouterr().out == ("weights\n" if rank == "0" else "")


def test_stops_and_stop_tokens_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[GenerateOptions] = []

    def remember(options: GenerateOptions) -> Iterator[str]:
        requests.append(options)
        yield ""

    monkeypatch.setattr("trainer.commands.generate.written_texts", remember)
    main(["generate", "run", "--stop", "a", "b", "--stop", "c", "--stop_token", "1", "--stop_token", "2"])
    main(["generate", "run"])
    assert [(options.stop, options.stop_token) for options in requests] == [(("a", "b", "c"), ("1", "2")), ((), ())]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", "once", "caf\udce9"), "--prompt is not UTF-8 text"),
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
    lines = capsys.readouterr().out.split("commands:\n")[1].splitlines()
    assert max(map(len, lines)) <= 80
    commands = [line.split()[0] for line in lines if line[2] != " "]  # a deeper line continues the one above
    assert commands[:3] == ["train", "plan", "evaluate"]
    with pytest.raises(ConfigError, match=f"the commands are {', '.join(commands)}$"):
        main(["trian"])


def test_the_help_of_each_command_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom trainer.__main__ import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: trainer ") == len(COMMANDS)


def test_the_options_of_evaluate_reach_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []
    monkeypatch.setattr("trainer.commands.evaluate.evaluate_run", lambda *given: calls.append(given))
    monkeypatch.setattr("trainer.commands.evaluate.benchmark_run", lambda *given: calls.append(given))
    monkeypatch.setenv("TRAIN_RUN", "mine")
    main(["evaluate"])
    main(["evaluate", "other", "--checkpoint", "best", "--data", "d", "--limit", "3", "--by", "all", "--json", "--trust-code"])
    main(["evaluate", "--lm-eval", "arc_easy", "--limit", "3", "--trust-code"])
    full = {"data": Path("d"), "limit": 3, "by": "all", "as_json": True, "trust_code": True}
    assert calls == [
        (EvaluateOptions(run=Path("mine")),),
        (EvaluateOptions(run=Path("other"), checkpoint="best", **full),),
        (EvaluateOptions(run=Path("mine"), lm_eval="arc_easy", limit=3, trust_code=True), "arc_easy"),
    ]
    assert calls[1][0].groups == ("source", "kind", "length")
    monkeypatch.setenv("RANK", "1")
    capsys.readouterr()
    main(["evaluate"])
    assert capsys.readouterr().out == "", "one rank prints the result of all"


@pytest.mark.parametrize("words", [("--data", "d"), ("--by", "kind")])
def test_benchmarks_have_texts_of_their_own(words: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="--lm-eval brings its own texts; leave out --data and --by"):
        main(["evaluate", "run", "--lm-eval", "arc_easy", *words])


def test_verify_prints_levels_as_they_hold_and_its_json_holds_an_error_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def levels(run: Path, **given: Any) -> Iterator[Outcome]:
        calls.append((run, {name: value for name, value in given.items() if name != "train"}))
        yield Outcome("integrity", "all files match", {"files": 3})
        raise CheckpointError("step 2 differs")

    monkeypatch.setattr("trainer.verification.verify.verify_run", levels)
    words = ["verify", "run", "--level", "replay", "--replay", "4", "--from", "2", "--data", "d", "--sources", "a", "b=c"]
    with pytest.raises(CheckpointError):
        main([*words, "--trust-code"])
    assert capsys.readouterr().out == "all files match\n"
    with pytest.raises(CheckpointError):
        main([*words, "--json"])
    held = [{"level": "integrity", "files": 3}]
    assert json.loads(capsys.readouterr().out) == {"ok": False, "held": held, "error": "step 2 differs"}
    options = {"level": "replay", "num_steps": 4, "start": 2, "data": Path("d"), "sources": ("a", "b=c")}
    assert calls == [(Path("run"), options | {"trust_code": True}), (Path("run"), options | {"trust_code": False})]


def test_generate_asks_for_standard_input_if_it_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input, which is closed"):
        generate.run(GenerateOptions(run=tmp_path, interactive=True))


def test_an_interrupt_ends_a_command_with_one_line_and_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    assert run_command(interrupted, ()) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "stopped: interrupted with Ctrl-C\n"


def test_a_misspelt_option_of_generate_leads_to_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"--promt.*did you mean --prompt\?"):
        main(["generate", "run", "--promt", "once"])

"""`python -m trainer generate` on a run, as used by people and programs."""

from __future__ import annotations

import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.command_line import run_command as command_ends
from common.errors import ConfigError, ExitCode
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, run_command, tiny_config
from tests.support.terminals import terminal_as
from trainer.__main__ import main
from trainer.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    data = write_prepared(folder / "data")
    train(tiny_config(data, folder / "run", eval={"sample_tokens": 0}))
    return folder / "run"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["generate", *words])
    return capsys.readouterr().out


def test_one_prompt_is_streamed_and_several_are_told_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = printed(capsys, str(run), "--max_tokens", "9", "--prompt", "the cat")
    assert one.startswith("the cat")
    assert one.endswith("\n")
    several = printed(capsys, str(run), "--max_tokens", "9", "--prompt", "the cat", "a dog", "--prompt", "it")
    assert several.startswith(f"=== 1 of 3 (length)\n{one}=== 2 of 3 (")
    assert printed(capsys, str(run), "--max_tokens", "9", "--prompt", "the cat", "--seed", "1") != one


def test_a_text_steers_no_terminal_unless_that_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "the \x1b]0;title\x07\x9b31m\u202ecat\tä\n"
    words = ["generate", str(run), "--max_tokens", "1", "--prompt", prompt]
    with terminal_as("stdout") as shown:
        assert command_ends(main, words) == ExitCode.DONE
        assert shown().startswith("the ⟨U+001B⟩]0;title⟨U+0007⟩⟨U+009B⟩31m⟨U+202E⟩cat\tä\r\n")
        assert command_ends(main, [*words, "--json"]) == ExitCode.DONE
        assert "\x9b" not in shown()
        assert command_ends(main, [*words, "--raw"]) == ExitCode.DONE
        assert shown().startswith(prompt.replace("\n", "\r\n"))
    assert command_ends(main, words) == ExitCode.DONE
    assert capsys.readouterr().out.startswith(prompt), "text was changed for a pipe"


def test_json_lines_are_the_same_with_and_without_the_cache_and_for_any_batch(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("the cat\na dog\nbirds sang of old ships at sea while it ran\n")
    words = (str(run), "--max_tokens", "50", "--json", "--prompts", str(tmp_path / "prompts.txt"), "--prompt", "x")
    out = printed(capsys, *words)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["x", "the cat", "a dog", "birds sang of old ships at sea while it ran"]
    assert all(set(line) == {"prompt", "text", "tokens", "finish_reason"} for line in lines)
    assert {line["tokens"] for line in lines if line["finish_reason"] == "length"} <= {50}
    assert printed(capsys, *words, "--no_cache", "--batch", "3") == out


def test_every_setting_of_the_sampling_reaches_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(run), "--prompt", "the ", "--max_tokens", "24", "--json")
    plain = json.loads(printed(capsys, *words, "--temperature", "2"))["text"]
    greedy = json.loads(printed(capsys, *words, "--temperature", "0"))["text"]
    for setting in ("--top_k=1", "--top_p=0.0001", "--min_p=1"):
        assert json.loads(printed(capsys, *words, "--temperature", "2", setting))["text"] == greedy != plain
    assert json.loads(printed(capsys, *words, "--temperature", "0", "--repetition_penalty", "3"))["text"] != greedy
    stopped = json.loads(printed(capsys, *words, "--temperature", "0", "--stop", greedy[3:5]))
    assert (stopped["text"], stopped["finish_reason"]) == (greedy[: greedy.index(greedy[3:5])], "stop")
    token = str(greedy.encode()[0] + 4)
    assert json.loads(printed(capsys, *words, "--temperature", "0", "--stop_token", token))["text"] == ""


def test_scores_come_last_and_may_use_another_run_as_reference(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(run), "--prompt", "the cat", "a dog", "--max_tokens", "20", "--score")
    own, other = (json.loads(printed(capsys, *words, "--json", *more).splitlines()[-1]) for more in ((), ("--reference", str(run))))
    assert own == other
    assert own["scores"]["num_texts"] == 2
    assert own["scores"]["perplexity"] > 1
    assert "=== scores\n" in (table := printed(capsys, *words))
    assert f"{'distinct_2':<18}{own['scores']['distinct_2']:.4g}\n" in table


@pytest.mark.parametrize("perplexity", [math.inf, math.nan])
def test_a_score_that_is_not_finite_is_text_in_json(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, perplexity: float
) -> None:
    monkeypatch.setattr("trainer.inference.samples.text_perplexity", lambda *_: perplexity)
    words = (str(run), "--max_tokens", "2", "--score")
    assert json.loads(printed(capsys, *words, "--json").splitlines()[-1])["scores"]["perplexity"] == str(perplexity)
    assert f"{'perplexity':<18}{perplexity}\n" in printed(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--top_p", "0"), "--top_p = '0': input should be greater than 0"),
        (("--batch", "0"), "--batch = '0': input should be greater than or equal to 1"),
        (("--interactive", "--json"), "--interactive reads prompts from the terminal"),
        (("--prompts", "missing.txt"), "missing.txt: cannot be read"),
        (("--stop_token", "<|none|>"), "no such token"),
    ],
)
def test_mistakes_are_answered_with_what_is_needed(run: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        main(["generate", str(run), *words])
    assert message in str(error.value)


def test_a_mistake_is_one_line_and_the_exit_code_of_settings(run: Path) -> None:
    outcome = run_command("trainer", "generate", str(run), "--min_p", "2")
    assert (outcome.returncode, outcome.stdout) == (ExitCode.CONFIG, "")
    assert outcome.stderr == "error: --min_p = '2': input should be less than or equal to 1\n"


def test_a_terminal_can_converse_break_off_and_end(run: Path) -> None:
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "trainer", "generate", str(run), "--interactive", "--max_tokens", "1000000"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True, env=os.environ | {"TERM": "dumb"}
    )
    os.close(its_end)
    try:
        read_until(terminal, "> ")
        os.write(terminal, b"the cat\n")
        shown = read_until(terminal, "the cat", minimum=60)
        os.killpg(process.pid, signal.SIGINT)
        assert "Traceback" not in shown + read_until(terminal, "\r\n> ")
        os.write(terminal, b"/max_tokens 3\n")
        read_until(terminal, "max_tokens 3\r\n> ")
        os.write(terminal, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_a_line_of_other_bytes_does_not_end_the_conversation(run: Path) -> None:
    command = [sys.executable, "-m", "trainer", "generate", str(run), "--interactive", "--max_tokens", "1"]
    done = subprocess.run(command, cwd=ROOT, input=b"caf\xe9\nthe cat\n", capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"> the line is not UTF-8 text\n> the cat")


def read_until(terminal: int, wanted: str, minimum: int = 0, timeout_s: float = 120) -> str:
    """Read from the terminal until its output contains `wanted` and has at least `minimum` characters, and return the output."""
    shown, deadline = "", time.monotonic() + timeout_s
    while wanted not in shown or len(shown) < minimum:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{wanted!r} was not shown, but {shown!r}")
        shown += os.read(terminal, 4096).decode(errors="replace")
    return shown

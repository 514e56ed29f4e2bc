from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from data_pipeline.tokenizer import ByteTokenizer
from trainer.inference.conversation import HELP, converse, read_prompts, stop_token_ids
from trainer.inference.sampling import Sampling


class Terminal:
    """Lines that are typed; an exception among them is a key."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines, self.out = list(lines), io.StringIO()
        self.asked: list[tuple[str, Sampling]] = []

    def read(self, _question: str) -> str:
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line

    def write(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        self.asked.append((prompt, sampling))
        yield " and"
        if prompt == "break":
            raise KeyboardInterrupt
        yield " on"

    def run(self, sampling: Sampling = Sampling(seed=9)) -> str:  # noqa: B008 - it never changes
        converse(self.write, sampling, self.read, self.out)
        return self.out.getvalue()


def test_lines_are_continued_until_the_input_ends() -> None:
    assert Terminal("once", "", "twice").run() == "once and on\ntwice and on\n\n"


def test_ctrl_c_ends_a_continuation_or_a_line_and_never_the_program() -> None:
    assert Terminal("break", KeyboardInterrupt, "once").run() == "break and\n\nonce and on\n\n"


def test_a_line_that_is_no_utf8_is_answered_and_the_next_one_continued() -> None:
    terminal = Terminal("caf\udce9", "/stop \udce9", "\ud83d", "caf\udcc3\udca9", "once")
    assert terminal.run() == "the line is not UTF-8 text\n" * 3 + "café and on\nonce and on\n\n"
    assert [prompt for prompt, _ in terminal.asked] == ["café", "once"]


def test_settings_hold_from_the_line_on_that_changes_them() -> None:
    terminal = Terminal("a", "/temperature 0.5", "/top_k 7", "/stop  end", "b", "/top_k none", "/stop", "/seed 3", "c")
    assert "temperature 0.5\n" in terminal.run()
    assert terminal.asked == [
        ("a", Sampling(seed=9)),
        ("b", Sampling(seed=9, temperature=0.5, top_k=7, stop=(" end",))),
        ("c", Sampling(seed=3, temperature=0.5)),
    ]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/temperature -1", "--temperature = '-1': input should be greater than or equal to 0"),
        ("/temperature hot", "--temperature = 'hot': input should be a valid number"),
        ("/max_tokens 2.5", "--max_tokens = '2.5': input should be a valid integer"),
        ("/top_k", "--top_k = '': input should be a valid integer"),
        ("/temprature 1", "/temprature is not a command; /help lists the commands"),
    ],
)
def test_a_wrong_line_is_answered_and_changes_nothing(line: str, answer: str) -> None:
    terminal = Terminal(line, "a")
    assert answer in terminal.run()
    assert terminal.asked == [("a", Sampling(seed=9))]


def test_help_names_every_setting_and_settings_shows_their_values() -> None:
    assert HELP in Terminal("/help").run()
    names = {line.split()[0].removeprefix("/") for line in HELP.splitlines()[1:]} - {"settings", "help"}
    shown = Terminal("/settings").run()
    assert names == set(Sampling.model_fields) - {"stop_tokens"}
    assert {line.split()[0] for line in shown.split("\n") if line} == names
    assert "seed 9\n" in shown


def test_two_slashes_begin_a_prompt_with_one() -> None:
    terminal = Terminal("//usr/bin")
    assert terminal.run() == "/usr/bin and on\n\n"
    assert terminal.asked[0][0] == "/usr/bin"


def test_prompts_are_the_lines_of_a_text_file_or_the_texts_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once\n\n  two\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "x\\ny"}\n\n{"prompt": ""}\n')
    assert read_prompts(tmp_path / "a.txt") == ["Once", "  two"]
    assert read_prompts(tmp_path / "b.jsonl") == ["x\ny", ""]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_lines_end_at_the_ends_of_lines_only(tmp_path: Path, character: str) -> None:
    text = f"one{character}line"
    (tmp_path / "a.txt").write_text(f"{text}\r\ntwo\n", newline="")
    (tmp_path / "b.jsonl").write_text(f'{{"prompt": "{text}"}}\n' if character >= " " else '{"prompt": "x"}\n')
    assert read_prompts(tmp_path / "a.txt") == [text, "two"]
    assert read_prompts(tmp_path / "b.jsonl") == [text if character >= " " else "x"]


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffOnce\n")
    (tmp_path / "b.jsonl").write_text('\ufeff{"prompt": "Once"}\n')
    assert read_prompts(tmp_path / "a.txt") == read_prompts(tmp_path / "b.jsonl") == ["Once"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "the file has no prompt"),
        (
            "a.txt",
            b"\xff\xfe",
            r"cannot be read \('utf-8' codec can't decode byte 0xff .*\); name a UTF-8 text file with a prompt on each line",
        ),
        ("a.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', r'a\.jsonl, line 2: no text under "prompt"'),
        ("a.jsonl", b"once\n", "line 1: no text"),
        ("a.jsonl", b"[1]\n", "line 1: no text"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1: no text"),
        ("a.jsonl", b'{"prompt": "\\ud83d"}\n', "line 1: no text"),
        ("a.jsonl", b"[" * 100_000, r'line 1: no text under "prompt"'),
        (None, b"", r"cannot be read \(No such file or directory\); name a UTF-8 text file"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, name: str | None, content: bytes, message: str) -> None:
    path = tmp_path / (name or "missing.txt")
    if name:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)


def test_stop_tokens_are_ids_or_names_of_special_tokens() -> None:
    tokenizer = ByteTokenizer(["<|sep|>"])
    assert stop_token_ids(tokenizer, ["7", "<|sep|>"]) == (7, 260)
    for name in ("261", "<|pad|>"):
        with pytest.raises(ConfigError, match=f"--stop_token .*: the run's tokenizer has no such token; give a number below 261"):  # noqa: F541
            stop_token_ids(tokenizer, [name])

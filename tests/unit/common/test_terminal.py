"""Text of strangers on a terminal: nothing in it steers the terminal, everything else stays readable."""

import io
import logging
import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.command_line import run_command
from common.errors import CheckpointError, ExitCode
from common.redaction import RedactingFormatter
from common.terminal import printable
from tests.support.terminals import terminal_as

TITLE = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b0m"
REVERSED = "\u202egnp.exe\u2066\u200f"


@given(st.text())
@example(TITLE + REVERSED + "\ud800\u2028\r\x08\x7f\U000e0041")
def test_no_character_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    left = {unicodedata.category(character) for character in shown if character not in "\n\t\u200c\u200d"}
    assert not left & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode()


@pytest.mark.parametrize(
    "text",
    [
        "plain words, 3 % of them: <b>&amp;</b>",
        "two\n\tlines\n",
        "Füße, naïve, Ελληνικά, русский, 日本語, 한국어, עברית, العربية",
        "می‌خواهم क्‍ष 👩‍👩‍👧‍👦 🇩🇪 e\u0301 ✔️",
        "",
    ],
)
def test_visible_text_in_any_script_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_what_is_taken_away_is_named() -> None:
    assert printable(f"a{REVERSED}b") == "a⟨U+202E⟩gnp.exe⟨U+2066⟩⟨U+200F⟩b"
    assert printable("\x1b[31m\r\n") == "⟨U+001B⟩[31m⟨U+000D⟩\n"


def test_a_text_in_pieces_is_shown_as_it_is_in_one() -> None:
    text = f"Ж{TITLE}a\n{REVERSED}👩‍👧"
    assert "".join(map(printable, text)) == printable(text)


def test_what_a_command_prints_on_a_terminal_cannot_steer_it() -> None:
    def main(_: Sequence[str]) -> None:
        print(f"text {TITLE}", end="", flush=True)

    with terminal_as("stdout") as shown:
        assert run_command(main, ()) == ExitCode.DONE
        assert shown() == f"text {printable(TITLE)}"


def test_what_a_command_prints_into_a_pipe_or_file_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(lambda _: print(f"text {TITLE}"), ())
    assert capsys.readouterr().out == f"text {TITLE}\n"


def test_error_lines_name_control_characters_wherever_they_go(capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: Sequence[str]) -> None:
        raise CheckpointError(f"step {TITLE} is bad")

    assert run_command(main, ()) == ExitCode.CHECKPOINT
    assert capsys.readouterr().err == f"error: step {printable(TITLE)} is bad\n"
    lines: list[str] = []
    run_command(main, (), lambda line, _: lines.append(line))
    assert lines == [f"error: step {printable(TITLE)} is bad"]


def test_log_lines_name_control_characters() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RedactingFormatter("%(levelname)s: %(message)s"))
    logger = logging.Logger("terminal")
    logger.addHandler(handler)
    logger.warning("shard %s", TITLE)
    assert stream.getvalue() == f"WARNING: shard {printable(TITLE)}\n"

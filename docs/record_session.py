"""Records the terminal session of docs/guide/first-model.md, and the end of its training in README.md.

    make recordings        (about five minutes; needs documents in /usr/share/doc and /usr/share/man, as Debian installs them)

The documents are copied into four formats. The commands run on a terminal of 80 columns and 24 lines. The boxes below the commands
in the page get what it showed, with the lines that had scrolled away. Of long outputs they get the beginning and the end.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.terminals import screen_of

PAGE = Path(__file__).parent / "guide/first-model.md"
README = Path(__file__).parents[1] / "README.md"
STOP = "(Ctrl-C after 60 seconds)"
COMMANDS = (
    "trainer prepare --sources my-text --output data --recipe auto",
    "trainer plan --recipe auto --data data --run runs/first --limits.minutes 3",
    "trainer train --recipe auto --data data --run runs/first --limits.minutes 3",
    "trainer train --run runs/first",
    "trainer evaluate runs/first",
    "trainer generate runs/first --prompt 'The option ' --max_tokens 60",
    "trainer runs runs",
)
_STOPPED, _STOP_AFTER_S = 2, 60.0
_COLUMNS, _LINES = 80, 24
_LINES_OF_END = 7
_LONG, _FIRST_SHOWN, _LAST_SHOWN = 12, 3, 9
"""The page shows about so many first and last lines of an output with more lines than this."""
_BEFORE_END = "looks like this:\n\n```text\n"
_MANUALS = 900
_NOTES = 400
_LARGEST_NOTE = 50_000


def write_documents(folder: Path, manuals: int = _MANUALS, notes: int = _NOTES) -> None:
    """Write manuals as text and JSON Lines, and other documents as HTML and Markdown, from the documents of this machine."""
    folder.mkdir()
    pages = sorted(Path("/usr/share/man/man1").glob("*.gz"))[:manuals]
    texts = [_plain(gzip.decompress(page.read_bytes()).decode(errors="replace")) for page in pages if not page.is_symlink()]
    middle = len(texts) // 2
    for number, text in enumerate(texts[:middle]):
        (folder / f"manual-{number:04d}.txt").write_text(text)
    with (folder / "manuals.jsonl").open("w") as file:
        for text in texts[middle:]:
            file.write(json.dumps({"text": text}) + "\n")
    for kind in ("html", "md"):
        found = (path for path in sorted(Path("/usr/share/doc").rglob(f"*.{kind}")) if _is_small(path))
        for number, (_, path) in enumerate(zip(range(notes), found, strict=False)):
            (folder / f"note-{number:04d}.{kind}").write_bytes(path.read_bytes())


def record(command: str, folder: Path, stop_after_s: float | None = None) -> str:
    """Return what a terminal shows while a command runs in a folder."""
    lines = screen_of("".join(_output(command, folder, stop_after_s)), _COLUMNS)
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join((*lines, *([] if stop_after_s is None else [STOP])))


def shortened(shown: str) -> str:
    """Return an output without the middle of its lines if it is long. `…` stands for them. A line that goes on below is not cut."""
    lines = shown.splitlines()
    if len(lines) <= _LONG:
        return shown
    begin, end = _FIRST_SHOWN, len(lines) - _LAST_SHOWN
    while lines[begin].startswith(" "):
        begin -= 1
    while lines[end].startswith(" "):
        end += 1
    return "\n".join((*lines[:begin], "…", *lines[end:]))


def with_recording(page: str, command: str, shown: str) -> str:
    """Return a page with this text in the box below a command. The box is the next one of the kind `text`."""
    before, block, after = page.partition(f"```sh\n{command}\n```\n")
    if not block:
        raise ValueError(f"the page has no block with the command {command}")
    box = re.compile(r"\n```text\n.*?```\n", re.DOTALL)
    if not box.match(after):
        raise ValueError(f"no box follows the command {command}")
    return before + block + box.sub(lambda _: f"\n```text\n{shown}\n```\n", after, count=1)


def _output(command: str, folder: Path, stop_after_s: float | None) -> Iterator[str]:
    """Yield what a command writes to its terminal. Send it SIGINT after a time, as Ctrl-C does."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        shlex.split(command), cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    begin, pending = time.monotonic(), b""
    while True:
        if stop_after_s is not None and time.monotonic() - begin > stop_after_s:
            process.send_signal(signal.SIGINT)
            stop_after_s = None
        if not select.select([controller], [], [], 0.5)[0]:
            continue
        try:
            pending += os.read(controller, 1 << 16)
        except OSError:  # the last process has closed the terminal
            break
        text = pending.decode(errors="ignore")
        if text.encode() == pending:
            yield text
            pending = b""
    process.wait()
    os.close(controller)


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < _LARGEST_NOTE


def _plain(page: str) -> str:
    """Return a manual page as text, without its formatting."""
    done = subprocess.run(
        ["man", "-l", "-"], input=page, capture_output=True, text=True, check=False, env=os.environ | {"MANWIDTH": "80"}
    )
    return done.stdout if done.returncode == 0 and done.stdout.strip() else page


def _with_end(readme: str, lines: list[str]) -> str:
    """Return the README with these lines as the end of a training."""
    before, mark, rest = readme.partition(_BEFORE_END)
    _, fence, after = rest.partition("\n```\n")
    if not mark or not fence:
        raise ValueError("README.md has no box for the end of a training")
    return before + mark + "\n".join(lines) + fence + after


def main() -> None:
    """Run the commands, and write what the terminal showed into the pages."""
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_documents(place / "my-text")
        for number, command in enumerate(COMMANDS):
            shown = record(command, place, _STOP_AFTER_S if number == _STOPPED else None)
            page = with_recording(page, command, shortened(shown))
            if number == _STOPPED + 1:
                README.write_text(_with_end(README.read_text(), shown.splitlines()[-_LINES_OF_END:]))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()

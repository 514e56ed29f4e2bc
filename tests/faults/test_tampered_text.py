"""Row 56: conversations, tokenizers and chat templates from strangers with one random change, given to a preparation."""

from __future__ import annotations

import csv
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.chats import TEMPLATES, conversations, write_hugging_face_tokenizer
from tests.support.claims import counted, measured
from tests.support.confined import Confined, Job, Outcome, confined
from tests.support.faults import flip, seeds, truncate, zero_tail
from tests.support.tampered_cases import SPECIAL_KINDS, Untouched, changed_value, put_special

MAX_BYTES = 1 << 30
CODES = (0, 2, 3, 74)
FIELDS = {
    "messages": ["--records.messages_field", "messages"],
    "pairs": ["--records.prompt_field", "prompt", "--records.chosen_field", "chosen", "--records.rejected_field", "rejected"],
    "turns": ["--records.prompt_field", "prompt", "--records.text_field", "chosen"],
}
TEXTS = (
    *(" " * 100_000, "<|end|>" * 20_000, " <|end|>" * 20_000, '"' * 100_000, '\\"' * 50_000, "[{" * 50_000, "\U000f0000" * 1000),
    *("<0x0A>", "\ud800", "\x00", "[" * 600 + "]" * 600, '[{"role": "user", "content": "a", "b": ' + "[" * 600 + "]" * 600 + "}]"),
    json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "<|end|>"}]),
)
PROGRAMS = (
    "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ ' ' * 200000 }}",
    "{{ '<|end|>' * 100000 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{{ messages | tojson }}",
    "{{ messages[99999].content }}",
    "{% for a in 'b' %}" * 60,
    "{{ " + "(" * 5000,
    "{{ raise_exception('no') }}",
    "{{ cycler.__init__.__globals__ }}",
    "\ud800",
)


def write_case(base: Path) -> None:
    """Write the same conversations in each format, and a tokenizer with a chat template."""
    text = base / "text"
    text.mkdir(parents=True)
    records = [
        {"messages": messages, "prompt": f"Question {number}?", "chosen": "Yes, of course.", "rejected": f"No {number}."}
        for number, messages in enumerate(conversations(20))
    ]
    texts = [{name: value if isinstance(value, str) else json.dumps(value) for name, value in one.items()} for one in records]
    (text / "a.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    (text / "b.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in texts))
    with (text / "c.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(texts[0]))
        writer.writeheader()
        writer.writerows(texts)
    pq.write_table(pa.Table.from_pylist(records), text / "d.parquet")
    folder = write_hugging_face_tokenizer(base / "tokenizer")
    (folder / "chat_template.jinja").write_text(TEMPLATES["instruct-like"])


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Confined]]:
    folder = tmp_path_factory.mktemp("tampered-text")
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.txt").write_text("nobody reads this")
    write_case(folder / "base")
    with confined(folder / "server.log") as server:
        yield folder / "base", folder / "outside", server


def change_lines(path: Path, draw: random.Random) -> str:
    """Change a value of a line, in JSON."""
    lines = path.read_text().splitlines()
    number = draw.randrange(len(lines))
    value = json.loads(lines[number])
    if draw.random() < 0.5:
        told = changed_value(value, draw)
    else:
        holder: Any = draw.choice(value["messages"]) if isinstance(value["messages"], list) else value
        name, text = draw.choice(list(holder)), draw.choice(TEXTS)
        holder[name], told = text, f"{name} = {text[:20]!r}"
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    return told


def change_json(path: Path, draw: random.Random) -> str:
    """Change a value of a JSON file of a tokenizer."""
    value = json.loads(path.read_text())
    told = changed_value(value, draw)
    if path.name == "tokenizer.json" and draw.random() < 0.3 and isinstance(tokens := value.get("added_tokens"), list):
        token = draw.choice(tokens)
        if isinstance(token, dict):
            name = draw.choice((" ", "\n<|end|>", "e", "Ġ", "<0x0A>", "<|" * 1000))
            token |= {"lstrip": True, "rstrip": True, "special": True, "content": draw.choice((token.get("content"), name))}
            told += f", {token['content']!r} strips"
    path.write_text(json.dumps(value))
    return told


def change_program(path: Path, draw: random.Random) -> str:
    """Insert a hostile program into a chat template."""
    source, program = path.read_text(), draw.choice(PROGRAMS)
    place = draw.choice((0, len(source), source.index("%}") + 2))
    path.write_bytes((source[:place] + program + source[place:]).encode(errors="surrogatepass"))
    return f"{program[:30]!r} at {place}"


def tamper(case: Path, outside: Path, draw: random.Random) -> str:
    """Change one file. Return what was changed."""
    path = draw.choice(sorted(file for file in case.rglob("*") if file.is_file()))
    how = draw.random()
    if how < 0.1:
        kinds = [kind for kind in SPECIAL_KINDS if kind != "huge" and (kind != "link out" or path.parent.name == "text")]
        told = put_special(path, draw.choice(kinds), outside)
    elif how < 0.3 or path.suffix in (".csv", ".parquet"):
        content = bytearray(path.read_bytes())
        for _ in range(draw.choice((1, 1, 20))):
            (change := draw.choice((flip, truncate, zero_tail)))(content, draw)
            if not content:
                break
        told = f"{change.__name__} and so on"
        path.write_bytes(content)
    else:
        told = {".jsonl": change_lines, ".json": change_json, ".jinja": change_program}[path.suffix](path, draw)
    return f"{path.relative_to(case)}: {told}"


def prepared(case: Path, children: Confined, fields: str, template: str, broken: str = "") -> Outcome:
    words = ["prepare", "--sources", str(case / "text"), "--output", str(case / "data"), "--chat.template", template]
    words += [*FIELDS[fields], "--row_length", "512", "--workers", "1", "--dedup.near", "false"]
    words += ["--tokenizer.path", str(case / "tokenizer")] if template == "tokenizer" else ["--tokenizer.kind", "byte"]
    return children.run(Job("data_pipeline", words, str(case), [str(case / "data")], broken=broken))


def faults_of(ended: Outcome) -> list[str]:
    """Return the problems of a preparation. It may start programs that read files of strangers, and use files without a name."""
    without_name = f"opened for writing: {tempfile.gettempdir()}"
    found = ended.faults(MAX_BYTES, CODES)
    return [one for one in found if one != without_name and not (one.startswith("subprocess.Popen") and "_child.py" in one)]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("template", ["tokenizer", "chatml"])
def test_an_untouched_case_is_prepared(children: tuple[Path, Path, Confined], tmp_path: Path, fields: str, template: str) -> None:
    base, _, server = children
    shutil.copytree(base, tmp_path / "case")
    ended = prepared(tmp_path / "case", server, fields, template)
    assert (ended.code, faults_of(ended)) == (0, []), ended.errors


@pytest.mark.claim("56", "one change of conversations, of a tokenizer or of a chat template", unit="preparations")
def test_no_preparation_hangs_breaks_or_leaves_its_folder(children: tuple[Path, Path, Confined], tmp_path: Path) -> None:
    base, outside, server = children
    failures = []
    for seed in seeds(8, 500):
        draw = random.Random(seed)
        case = tmp_path / "case"
        shutil.copytree(base, case)
        told, fields, untouched = tamper(case, outside, draw), draw.choice(list(FIELDS)), Untouched(outside)
        ended = prepared(case, server, fields, draw.choice(("tokenizer", "tokenizer", "chatml")))
        measured("MiB of memory", ended.peak_bytes >> 20)
        measured("s of CPU", ended.cpu_s)
        counted("preparations refused", ended.code != 0)
        if faults := [*faults_of(ended), *untouched.faults()]:
            failures.append(f"seed {seed}: {fields}, {told}: {'; '.join(faults)}")
            print(failures[-1], ended.errors[-2000:], sep="\n")
        shutil.rmtree(case)
    assert not failures, "\n".join(failures)

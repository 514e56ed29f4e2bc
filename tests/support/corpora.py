"""A corpus with every format, compression, archive, encoding and fault, and the expected result for each of its documents.

The counts in `EXPECTED` were counted by hand from the lines of this file. They do not come from the output of a preparation.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

MAX_LINE_BYTES = 20_000
MAX_DOCUMENT_BYTES = 40_000


@dataclass(frozen=True)
class Expected:
    """The expected result for one source."""

    read: int
    """Number of documents that are read, including malformed ones."""
    rejected: dict[str, int]
    """Number of rejected documents by reason."""

    @property
    def kept(self) -> int:
        return self.read - sum(self.rejected.values())


EXPECTED = {
    "books": Expected(
        # texts, languages, spellings, not UTF-8, short and blank, too large; tar.gz, zip, cut tar; compressed text
        read=40 + 6 + 4 + 2 + 2 + 1 + (20 + 5 + 3 + 1 + 1) + (10 + 1 + 1) + (2 + 1) + 4,
        rejected={
            "invalid-utf8": 1,  # a byte order mark names UTF-16
            "too-short": 1,
            "empty": 1,
            "file-too-large": 1,
            "unsafe-member": 3 + 1,
            "nested-archive": 1,
            "corrupt-compression": 1,
            "corrupt-archive": 1,
        },
    ),
    "code": Expected(read=40 + 10 + 2, rejected={"code-generated": 1, "code-line-length": 1}),
    "web": Expected(
        # plain, compressed, cut gz, CRLF and its link, bad lines, CSV, TSV, Parquet and a cut one, pages, copies, spam, noise, leak
        read=250 + 4 * 30 + (10 + 1) + 2 * 3 + 14 + (20 + 2) + 10 + (30 + 1) + 1 + (4 + 1) + (5 + 5) + 3 + 6 + 1,
        rejected={
            "not-json": 2,
            "duplicate-key": 1,
            "not-an-object": 1,
            "no-text-field": 1,
            "text-not-a-string": 1 + 1,
            "invalid-utf8": 1 + 1,
            "lone-surrogate": 1,
            "too-deep": 1,
            "line-too-long": 1,
            "empty": 2 + 1,
            "too-short": 1,
            "corrupt-compression": 1,
            "field-count": 1,
            "corrupt-parquet": 1,
            "exact-duplicate": 5 + 3,
            "near-duplicate": 5,
            "benchmark-overlap": 1,
            "spam-upper-case": 2,
            "spam-repeated": 1,
            "perplexity-high": 6,
        },
    ),
}
"""Expected results by source. The functions that make the files follow below in the same order."""

_RECIPE = """
[prepare]
row_length = 64
partition_bytes = 12_288

[prepare.records]
metadata = ["topic"]

[prepare.tokenizer]
vocab_size = 600

[prepare.packing]
window_tokens = 8192
shard_bytes = 16_384

[prepare.dedup]
benchmarks = ["{folder}/benchmark.jsonl"]

[prepare.quality]
trusted = "books"
max_perplexity = 1e9
good = ["{folder}/good.jsonl"]
bad = ["{folder}/bad.jsonl"]
min_good_probability = 0.0

[prepare.balance]
by = "source"
max_repeats = 8.0

[prepare.augment]
subword_rate = 0.1
fim_rate = 0.5

[prepare.limits]
max_rejected_fraction = 0.1
max_line_bytes = {max_line_bytes}
max_document_bytes = {max_document_bytes}

[prepare.source.books]
paths = ["{folder}/books"]

[prepare.source.books.clean]
min_chars = 30

[prepare.source.code]
paths = ["{folder}/code"]
weight = 0.5

[prepare.source.code.heuristics]
presets = ["code"]

[prepare.source.web]
paths = ["{folder}/web"]
kind = "web"

[prepare.source.web.heuristics]
presets = ["spam"]

[prepare.source.web.quality]
max_perplexity = 2000.0
"""


def write_corpus(folder: Path, seed: int = 0) -> Path:
    """Write about 300 KB in three sources under `folder`, and the recipe that names them. Return the path of the recipe.

    Another seed gives other words and the same counts.
    """
    for name, files in (("books", _books(seed)), ("code", _code(seed)), ("web", _web(seed))):
        for path, data in files:
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_bytes(data)
    (folder / "web" / "linked.jsonl").symlink_to("crlf.jsonl")
    (folder / "web" / "dangling.jsonl").symlink_to("nowhere.jsonl")
    (folder / "web" / "itself").symlink_to(".")
    (folder / "benchmark.jsonl").write_bytes(json_lines([_question(seed)]))
    (folder / "good.jsonl").write_bytes(json_lines(sentences(seed + 90, 40)))
    (folder / "bad.jsonl").write_bytes(json_lines(noise(seed + 91, 40)))
    return write_recipe(folder, _RECIPE)


def write_recipe(folder: Path, recipe: str) -> Path:
    """Write a recipe in which `{folder}` is replaced by the path of its folder. Return the path of the recipe."""
    path = folder / "recipe.toml"
    values = {"folder": folder, "max_line_bytes": MAX_LINE_BYTES, "max_document_bytes": MAX_DOCUMENT_BYTES}
    for name, value in values.items():
        recipe = recipe.replace(f"{{{name}}}", str(value))
    path.write_text(recipe)
    return path


def write_texts(path: Path, texts: Iterable[str], **fields: str) -> Path:
    """Write JSON Lines with these texts, each with the same further fields. Return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json_lines(texts, **fields))
    return path


def sentences(seed: int, count: int, min_words: int = 12) -> list[str]:
    """Return documents of made-up words from one vocabulary. All differ; most are short, some have many sentences."""
    generator = random.Random(seed)
    lengths = [int(generator.lognormvariate(3, 0.8)) + min_words for _ in range(count)]
    return [f"{_prose(generator, length)} {seed}-{number}." for number, length in enumerate(lengths)]


def reworded(text: str) -> str:
    """Return nearly the same text. In a long text, fewer than one in twenty shingles of five words differs."""
    words = text.split(" ")
    words[len(words) // 2] = "otherwise"
    return " ".join(words)


def code_file(seed: int, functions: int = 4) -> str:
    """Return source code whose names depend on the seed."""
    generator = random.Random(seed)
    names = [f"{'_'.join(generator.choices(_WORDS, k=2))}_{seed}" for _ in range(functions)]
    bodies = (f"    total = {generator.randrange(1000)}\n    return total + {generator.choice(_WORDS)}\n" for _ in names)
    return "\n\n".join(f"def {name}({generator.choice(_WORDS)}):\n{body}" for name, body in zip(names, bodies, strict=True))


def json_lines(texts: Iterable[str], **fields: str) -> bytes:
    """Return lines with one JSON object each, which holds a text and the further fields."""
    return b"".join(json.dumps({"text": text, **fields}, ensure_ascii=False).encode() + b"\n" for text in texts)


def _vocabulary() -> list[str]:
    generator = random.Random("vocabulary")
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "io", "un", "or", "é")]
    return sorted({"".join(generator.choices(syllables, k=generator.randint(1, 3))) for _ in range(300)})


_WORDS = _vocabulary()


def _prose(generator: random.Random, num_words: int) -> str:
    return " ".join(generator.choices(_WORDS, k=num_words))


def noise(seed: int, count: int) -> list[str]:
    """Return texts of random letters. No other text is similar to them."""
    generator = random.Random(f"noise {seed}")
    letters = "qwxzjvhyc"
    return [" ".join("".join(generator.choices(letters, k=7)) for _ in range(40)) for _ in range(count)]


def _question(seed: int) -> str:
    return _prose(random.Random(f"question {seed}"), 30)


def _books(seed: int) -> Iterator[tuple[str, bytes]]:
    for number, text in enumerate(sentences(seed + 1, 40, min_words=60)):
        yield f"old/{number:02d}.{'md' if number % 4 == 0 else 'txt'}", text.encode()
    for language, text in _LANGUAGES.items():
        yield f"languages/{language}.txt", text.encode()
    first, second, third, fourth = (text.encode() for text in sentences(seed + 2, 4))
    yield "spellings/bom.txt", b"\xef\xbb\xbf" + first
    yield "spellings/crlf.txt", second.replace(b" ", b"\r\n", 5)
    yield "spellings/nul.txt", third.replace(b" ", b"\0 ", 3)
    yield "spellings/mojibake.txt", fourth + "schöne Grüße aus dem Café, naïve Übung".encode().decode("latin-1").encode()
    yield "spellings/latin-1.txt", "schöne Grüße aus dem Café, naïve Übung".encode("latin-1")
    yield "spellings/utf-16.txt", "a text of plain words in another encoding".encode("utf-16")
    yield "short.txt", b"long enough elsewhere"  # 21 characters: this source requires 30, the others 20
    yield "blank.txt", b" \n\t\n"
    yield "nothing.txt", b""  # an empty file holds no document
    yield "large.txt", b"one line of a book\n" * (MAX_DOCUMENT_BYTES // 19 + 1)
    yield "archive.tar.gz", _gzip(_tar(_members(seed)))
    yield "archive.zip", _zip(seed)
    in_one_block = [(f"{number}.txt", text[:400]) for number, text in enumerate(sentences(seed + 6, 3, 60))]
    yield "cut.tar", _tar(in_one_block)[: 2 * 1024 + 512 + 99]  # cut in the middle of the third entry
    for number, (name, compress) in enumerate(_COMPRESSIONS.items()):
        yield f"compressed.txt.{name}", compress(sentences(seed + 70 + number, 1, 60)[0].encode())
    yield "picture.bin", b"\x89PNG"
    yield ".notes.txt", b"a hidden file is no text to train on"


def _members(seed: int) -> list[tuple[str, str | bytes | tuple[bytes, str]]]:
    texts: list[tuple[str, str | bytes | tuple[bytes, str]]] = [
        (f"volume/{number}.txt", text) for number, text in enumerate(sentences(seed + 3, 20, 30))
    ]
    return [
        *texts,
        ("volume/records.jsonl", json_lines(sentences(seed + 4, 5))),
        ("../outside.txt", "this must be written nowhere"),
        ("/tmp/member-of-an-archive.txt", "this must be written nowhere"),
        ("link.txt", (tarfile.SYMTYPE, "/etc/passwd")),
        ("inner.zip", _zip(seed)),
        ("broken.txt.gz", b"\x1f\x8b\x08 no gzip at all"),
        (".hidden.txt", "a hidden file is no text to train on"),
        ("picture.bin", b"\x89PNG"),
    ]


def _tar(members: Sequence[tuple[str, str | bytes | tuple[bytes, str]]]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                info.type, info.linkname = content
                archive.addfile(info)
                continue
            data = content.encode() if isinstance(content, str) else content
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return output.getvalue()


def _zip(seed: int) -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        texts = {f"{number}.md": text for number, text in enumerate(sentences(seed + 5, 10, 30))}
        page = {"page.html": _page(sentences(seed + 8, 1, 60)[0])}
        for name, text in {**texts, **page, "../outside.txt": "nowhere"}.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return output.getvalue()


def _code(seed: int) -> Iterator[tuple[str, bytes]]:
    for number in range(40):
        yield f"package/module_{number:02d}.py", code_file(seed + number, 8).encode()
    for number in range(10):
        name = f"{random.Random(seed + number).choice(_WORDS)}_{number}"
        yield f"source/{number}.c", "".join(f"int {name}_{n}(int a) {{ return a * {n}; }}\n" for n in range(20)).encode()
    yield "generated.js", ("// Code generated by a tool. DO NOT EDIT.\n" + "var a = 1;\n" * 30).encode()
    yield "one_line.js", ("var b = [" + "1234567, " * 200 + "];\n").encode()


def _web(seed: int) -> Iterator[tuple[str, bytes]]:
    plain, long = sentences(seed + 10, 245), sentences(seed + 28, 5, min_words=200)
    yield "a.jsonl", json_lines(plain[:150], topic="news") + json_lines([*plain[150:], *long], topic="sport")
    for number, (name, compress) in enumerate(_COMPRESSIONS.items()):
        yield f"b.ndjson.{name}", compress(json_lines(sentences(seed + 11 + number, 30)))
    whole, cut = (_gzip(json_lines(sentences(seed + number, 10))) for number in (20, 21))
    yield "cut.jsonl.gz", whole + cut[:12]
    yield "crlf.jsonl", b"\xef\xbb\xbf" + json_lines(sentences(seed + 22, 3)).replace(b"\n", b"\r\n")
    yield "bad.jsonl", b"\n".join(_BAD_LINES) + b"\n"
    yield "table.csv", _table(sentences(seed + 23, 20), ",")
    yield "table.tsv", b"topic\ttext\n" + b"".join(b"news\t" + text.encode() + b"\n" for text in sentences(seed + 24, 10))
    yield "rows.parquet", _parquet([*sentences(seed + 25, 30), None])
    yield "cut.parquet", _parquet(sentences(seed + 26, 10))[:-6]
    for number, text in enumerate(sentences(seed + 27, 4, 60)):
        yield f"pages/{number}.html", _page(text).encode()
    yield "pages/empty.html", b"<html><body><img src=x></body></html>"
    yield "copies.jsonl", json_lines(plain[:5]) + json_lines(map(reworded, long))
    yield "spam.jsonl", json_lines([*(text.upper() for text in sentences(seed + 29, 2)), "a text of words and " + "=" * 60])
    yield "noise.jsonl", json_lines(noise(seed, 6))
    yield "leak.jsonl", json_lines([f"{sentences(seed + 30, 1)[0]} {_question(seed)} {sentences(seed + 31, 1)[0]}"])


def _table(texts: Sequence[str], separator: str) -> bytes:
    """Return rows with quoted fields that contain separators, line ends and quotes.

    Two bad rows follow: one with a field too many, and one that is not UTF-8.
    """
    quoted = [text.replace(" ", separator, 1).replace(" ", "\n", 1).replace(" ", ' ""so"" ', 1) for text in texts]
    rows = ["topic,text", *(f'news,"{text}"' for text in quoted), "news,a text,of too many fields"]
    return "\n".join(rows).encode() + b"\nnews,caf\xe9 and other words of one encoding\n"


def _parquet(texts: Sequence[str | None]) -> bytes:
    output = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "topic": ["news"] * len(texts)}), output)
    return output.getvalue()


def _page(text: str) -> str:
    paragraphs = "".join(f"<p>{part}.</p>" for part in (text[:200], text[200:]))
    return f"<html><head><title>Page</title></head><body><nav><a href=x>menu</a></nav><article>{paragraphs}</article></body></html>"


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


_COMPRESSIONS = {"gz": _gzip, "zst": zstandard.compress, "xz": lzma.compress, "bz2": bz2.compress}

_BAD_LINES = [
    b'{"text": not quoted}',
    b'{"text": "a raw \0 byte in a string of words"}',
    b'{"text": "one text of words", "text": "another text of words"}',
    b'["a list of words and no object"]',
    b'{"body": "the words are in another field"}',
    b'{"text": 12345}',
    b'{"text": "caf\xe9 and other words of one encoding"}',
    b'{"text": "half of a pair \\ud800 among the words"}',
    b'{"text": ' + b"[" * 300 + b"]" * 300 + b"}",
    b'{"text": "' + b"word " * (MAX_LINE_BYTES // 5) + b'"}',
    b"",
    b'{"text": " \\u0000 "}',
    b'{"text": "few words"}',
    b'{"text": "the one line with words and an escaped \\u0000 byte that is good"}',
]

_LANGUAGES = {
    "ar": "كتب الرجل رسالة طويلة إلى صديقه القديم",
    "de": "Der alte Mann ging langsam durch den stillen Wald und dachte an die Tage, die längst vergangen waren.",
    "fr": "Le vieil homme traversait lentement la forêt silencieuse en pensant aux jours passés depuis longtemps.",
    "hi": "बूढ़ा आदमी चुपचाप जंगल से होकर गुज़र रहा था",
    "ja": "年老いた男は静かな森の中をゆっくりと歩きながら、遠い昔に過ぎ去った日々のことを思い出していた。",
    "ru": "Старый человек медленно шёл через тихий лес и думал о днях, которые давно прошли.",  # noqa: RUF001
}

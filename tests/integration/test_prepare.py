"""`prepare` from text to shards: the same bytes after any interruption, and errors that a person can act on."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from common.errors import ConfigError, PreparedDataError, StorageError
from common.files import digest_file
from data_pipeline import prepare as prepare_module
from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, read_manifest, verify
from data_pipeline.dataset.shards import Rows
from data_pipeline.prepare import prepare
from data_pipeline.publishing.ownership import exclusive
from data_pipeline.stages import pack, read, select, tokenize, train_tokenizer
from data_pipeline.stages import split as split_stage
from data_pipeline.stages.pack import PackResult, PackTask
from data_pipeline.tokenizer import load_tokenizer
from tests.support.prepare_runs import kill_at_random, timed_run
from tests.support.two_ranks import seconds_until

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "row_length": 64,
    "partition_bytes": 4096,
    "tokenizer": {"kind": "bpe", "vocab_size": 400},
    "packing": {"window_tokens": 2048, "shard_bytes": 8192},
}
SMALL_ARGUMENTS = (
    *("--row_length", "64", "--partition_bytes", "4096", "--tokenizer.vocab_size", "400"),
    *("--packing.window_tokens", "2048", "--packing.shard_bytes", "8192"),
)


def sentences(seed: int, count: int) -> list[str]:
    """Return documents of made-up words. All differ; most are short, some have many sentences."""
    generator = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "io", "un", "or", "é")]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 3))) for _ in range(400)]
    lengths = [int(generator.lognormvariate(3, 1)) + 6 for _ in range(count)]
    return [f"{number} {' '.join(generator.choices(words, k=length))}." for number, length in enumerate(lengths)]


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources with every format, and one malformed line."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "web").mkdir()
    (folder / "books" / "old").mkdir(parents=True)
    (folder / "web" / "a.jsonl").write_bytes(json_lines(sentences(1, 300)) + b'{"text": broken}\n')
    (folder / "web" / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(sentences(2, 100))))
    (folder / "web" / "c.ndjson.zst").write_bytes(zstandard.compress(json_lines(sentences(3, 100))))
    for number, text in enumerate(sentences(4, 30)):
        (folder / "books" / "old" / f"{number}.txt").write_text(text)
    (folder / "books" / "long.md").write_text("\n".join(sentences(5, 200)))
    return folder


def config_of(corpus: Path, output: Path, **settings: Any) -> PrepareConfig:
    return PrepareConfig(sources=(str(corpus / "web"), str(corpus / "books")), output=output, **{**SMALL, "workers": 1, **settings})


NOT_DIGESTED = {"inputs.json", "published.json", ".prepare.lock", "timings.json", "report.html", "DATA_CARD.md"}


def content_of(folder: Path) -> dict[str, str]:
    """Return the digest of the manifest and of every file that it lists."""
    names = ("manifest.json", "report.json", "DATA_CARD.md", "tokenizer", "tokens", "chosen", "train", "val")
    return {
        str(path.relative_to(folder)): digest_file(path)
        for name in names
        for path in ([folder / name] if (folder / name).is_file() else sorted((folder / name).iterdir()))
    }


@pytest.fixture(scope="module")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared")
    prepare(config_of(corpus, output))
    return output


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "data_pipeline", *map(str, arguments)]


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_two_workers_and_one_write_the_same_bytes(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    prepare(config_of(corpus, tmp_path, workers=2))
    assert content_of(tmp_path) == content_of(prepared)


def test_another_folder_and_other_times_give_the_same_bytes(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    prepare(config_of(tmp_path / "elsewhere", tmp_path / "out"))
    assert content_of(tmp_path / "out") == content_of(prepared)
    assert str(corpus.parent) not in (prepared / "manifest.json").read_text()


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
@pytest.mark.parametrize("method", ["best-fit", "greedy"])
def test_the_text_can_be_read_back_from_the_rows(corpus: Path, tmp_path: Path, kind: str, method: str) -> None:
    settings = {"tokenizer": {"kind": kind, "vocab_size": 400}, "packing": {"method": method}, "row_length": 1 << 18}
    manifest = prepare(config_of(corpus, tmp_path, **settings))
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    texts = []
    for split in ("train", "val"):
        rows = Rows(tmp_path, manifest, split)
        batch = rows.read(np.arange(len(rows)))
        for tokens, segments in zip(batch.tokens_BL, batch.segments_BL, strict=True):
            for number in range(segments.max() + 1):
                document = tokens[segments == number].tolist()
                assert (document[0], document[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
                texts.append(tokenizer.decode(document))
    written = ["\n".join(sentences(5, 200)), *sentences(1, 300), *sentences(2, 100), *sentences(3, 100), *sentences(4, 30)]
    assert sorted(texts) == sorted(text for text in written if len(text) >= 20)


def test_the_counts_add_up(prepared: Path) -> None:
    manifest = verify(prepared)
    documents, totals = manifest.totals["documents"], manifest.totals
    assert documents["read"] == 300 + 1 + 100 + 100 + 30 + 1
    assert documents["read"] == documents["train"] + documents["val"] + documents["rejected"]
    assert totals["rejected"]["read"] == {"not-json": 1}
    for split in ("train", "val"):
        rows, counts = Rows(prepared, manifest, split), totals["rows"][split]
        everything = rows.read(np.arange(len(rows)))
        inside = everything.segments_BL >= 0
        follows = (everything.segments_BL[:, 1:] == everything.segments_BL[:, :-1]) & inside[:, 1:]
        assert (len(rows), int(inside.sum()), int(follows.sum())) == (counts["rows"], counts["tokens"], counts["targets"])
        assert counts["padding"] == int((~inside).sum())
    num_targets = sum(totals["rows"][split]["targets"] for split in ("train", "val"))
    assert num_targets == totals["lengths"]["tokens"]["total"] - documents["kept"]


def test_training_and_validation_share_no_document(prepared: Path) -> None:
    manifest = read_manifest(prepared)
    sides = [Rows(prepared, manifest, split) for split in ("train", "val")]
    train, val = ({identity for index in range(len(rows)) for identity in rows.document_ids(index).tolist()} for rows in sides)
    assert len(train) == manifest.totals["documents"]["train"]
    assert len(val) == manifest.totals["documents"]["val"]
    assert not train & val


def test_a_second_run_finds_everything_done(prepared: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file() and path.name != "inputs.json"}
    monkeypatch.setattr(prepare_module, "open_runner", forbidden)
    prepare(config_of(corpus, prepared))
    assert {path: path.stat().st_mtime_ns for path in before} == before


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def forbidden(*_: object) -> None:
    raise AssertionError("finished work was done again")


@pytest.mark.parametrize(
    "change",
    [
        lambda corpus, output: (output / "manifest.json").unlink(),
        lambda corpus, output: next((output / "train").iterdir()).unlink(),
        lambda corpus, output: (output / "report.json").unlink(),
        lambda corpus, output: flip_a_byte(next((output / "train").iterdir())),
        lambda corpus, output: os.truncate(output / "tokens" / "000000.arrow", 0),
    ],
    ids=["manifest", "shard", "report", "byte", "table"],
)
def test_what_is_missing_or_changed_is_prepared_again(corpus: Path, tmp_path: Path, change: Callable[[Path, Path], object]) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    first = prepare(config_of(tmp_path / "corpus", tmp_path / "out"))
    change(tmp_path / "corpus", tmp_path / "out")
    second = prepare(config_of(tmp_path / "corpus", tmp_path / "out"))
    assert verify(tmp_path / "out") == first == second


def test_other_data_is_refused_at_once_and_what_is_there_stays(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    output = tmp_path / "out"
    prepare(config_of(tmp_path / "corpus", output))
    before = content_of(output)
    monkeypatch.setattr(prepare_module, "open_runner", forbidden)
    with pytest.raises(ConfigError, match=r"prepared differently: row_length was 64 and is 32\. Choose another --output"):
        prepare(config_of(tmp_path / "corpus", output, row_length=32))
    (tmp_path / "corpus" / "web" / "a.jsonl").write_bytes(json_lines(sentences(9, 300)))
    with pytest.raises(ConfigError, match=r"1 input file is changed \(web/a\.jsonl\)"):
        prepare(config_of(tmp_path / "corpus", output))
    assert content_of(output) == before


def test_data_that_is_read_is_not_replaced_even_if_that_was_asked_for(corpus: Path, tmp_path: Path) -> None:
    prepare(config_of(corpus, tmp_path))
    before = content_of(tmp_path)
    with reading(tmp_path, "run a"), pytest.raises(ConfigError, match="in use by run a, process"):
        prepare(config_of(corpus, tmp_path, replace=True, row_length=32))
    assert content_of(tmp_path) == before


def test_a_reader_that_comes_during_the_work_keeps_its_data_and_the_work_is_not_lost(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config_of(corpus, tmp_path))
    before = content_of(tmp_path)
    other = config_of(corpus, tmp_path, replace=True, row_length=32)
    with ExitStack() as stack, monkeypatch.context() as patch:
        pack_all = prepare_module.pack_all

        def pack_and_read(*arguments: Any, **settings: Any) -> Any:
            stack.enter_context(reading(tmp_path, "run late"))
            return pack_all(*arguments, **settings)

        patch.setattr(prepare_module, "pack_all", pack_and_read)
        with pytest.raises(ConfigError, match="in use by run late, process"):
            prepare(other)
        assert content_of(tmp_path) == before
    for module, stage in ((read, "read_partition"), (tokenize, "tokenize_partition"), (pack, "pack_group")):
        monkeypatch.setattr(module, stage, forbidden)
    assert prepare(other).row_length == 32


def test_new_settings_replace_the_old_data_and_leave_nothing_of_it(corpus: Path, tmp_path: Path) -> None:
    old = prepare(config_of(corpus, tmp_path, keep_rejects=True))
    rows = Rows(tmp_path, old, "train")
    reading = rows.read(np.arange(3)).tokens_BL
    new = prepare(config_of(corpus, tmp_path, replace=True, row_length=32, tokenizer={"kind": "byte"}))
    assert verify(tmp_path) == new
    listed = {shard.path for shard in new.shards} | set(new.files) | NOT_DIGESTED | {"manifest.json"}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == listed
    assert (rows.read(np.arange(3)).tokens_BL == reading).all(), "rows changed that a trainer has open"


def test_rejected_documents_can_be_kept_with_their_place_in_the_whole_file(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    manifest = prepare(config_of(corpus, tmp_path, keep_rejects=True))
    rejects = [json.loads(line) for line in (tmp_path / "rejects.jsonl").read_text().splitlines()]
    broken = next(reject for reject in rejects if reject["reason"] == "not-json")
    assert (broken["source"], broken["path"], broken["line"]) == ("web", "a.jsonl", 301)
    assert manifest == read_manifest(prepared)


EARLIER_STAGES = (
    (read, "read_partition"),
    (split_stage, "split_partition"),
    (train_tokenizer, "sample_partition"),
    (train_tokenizer, "train"),
    (tokenize, "tokenize_partition"),
    (select, "select_partition"),
)


def test_finished_work_is_not_done_again(corpus: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pack, "pack_group", forbidden)
        with pytest.raises(AssertionError):
            prepare(config_of(corpus, tmp_path))
    for module, stage in EARLIER_STAGES:
        monkeypatch.setattr(module, stage, forbidden)
    prepare(config_of(corpus, tmp_path))
    assert content_of(tmp_path) == content_of(prepared)
    assert not (tmp_path / ".work").exists()


@pytest.mark.parametrize("name", ["_swap", "write_atomic", "sync_directory", "clear_work"])
def test_a_crash_while_publishing_leaves_old_data_or_none_and_the_next_run_completes_it(
    corpus: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    old = prepare(config_of(corpus, tmp_path, split={"seed": 1}))
    with monkeypatch.context() as patch:
        patch.setattr(f"data_pipeline.publishing.publish.{name}", forbidden)
        with pytest.raises(AssertionError):
            prepare(config_of(corpus, tmp_path, replace=True))
    if (tmp_path / "manifest.json").exists():
        assert verify(tmp_path) in (old, read_manifest(prepared))
    for module, stage in ((read, "read_partition"), (tokenize, "tokenize_partition"), (pack, "pack_group")):
        monkeypatch.setattr(module, stage, forbidden)
    prepare(config_of(corpus, tmp_path, replace=True))
    assert content_of(tmp_path) == content_of(prepared)
    assert not (tmp_path / ".work").exists()


def test_what_a_killed_process_left_half_written_is_no_part_of_the_data(
    corpus: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pack, "pack_group", forbidden)
        with pytest.raises(AssertionError):
            prepare(config_of(corpus, tmp_path))
    work = next((tmp_path / ".work").iterdir())
    mark = "7.0123456789abcdef.tmp"
    left = [work / "tokenizer" / f".bpe.model.{mark}", work / "text" / f".000000.arrow.{mark}", tmp_path / f".inputs.json.{mark}"]
    for path in left:
        path.write_bytes(b"half")
    pack_group = pack.pack_group

    def beside_an_orphan(task: PackTask) -> PackResult:
        """Write once more, like a worker of the killed run that has not ended yet."""
        assert not any(path.exists() for path in left[1:])
        left[0].write_bytes(b"half")
        return pack_group(task)

    monkeypatch.setattr(pack, "pack_group", beside_an_orphan)
    prepare(config_of(corpus, tmp_path))
    assert content_of(tmp_path) == content_of(prepared)
    assert {path.name for path in tmp_path.glob(".*")} == {".prepare.lock"}


def test_one_worker_killed_at_random_times_ends_with_the_same_bytes(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    """Two workers are killed in `test_prepare_all.py` and for row 34 of docs/faults.md."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    delays, output = random.Random(seed), tmp_path / "out"
    sources = ("--sources", corpus / "web", corpus / "books")
    arguments = ("prepare", *sources, "--output", output, "--workers", "1", *SMALL_ARGUMENTS)
    whole_run_s, num_kills = timed_run(arguments, output), 0
    while num_kills < 3:
        num_kills += kill_at_random(arguments, output, delays, 0.7 * whole_run_s)
    assert run(*arguments).returncode == 0
    assert content_of(output) == content_of(prepared)
    assert not (output / ".work").exists()


def children_of(pid: int) -> set[int]:
    """Return all descendants of a process."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    found, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= frontier
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def long_job(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a preparation that takes some seconds, and returns after it has finished its first task."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(json_lines(sentences(1, 3000)) * 10)
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        arguments = ("prepare", "--sources", tmp_path / "text", "--output", tmp_path / "out", "--workers", "2", *SMALL_ARGUMENTS)
        process = subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        deadline = time.monotonic() + 60
        while not list((tmp_path / "out").glob(".work/*/text/*.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_killed_parent(long_job: Callable[[], subprocess.Popen[str]]) -> None:
    process = long_job()
    workers = children_of(process.pid)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    seconds_until(lambda: not any(map(is_running, workers)), 60)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_it_cleanly_and_the_next_run_goes_on(
    long_job: Callable[[], subprocess.Popen[str]], tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    process = long_job()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == exit_code
    assert f"{number.name} received; finished work is kept: run the same command again to go on" in stderr.splitlines()[-1]
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = len(list((tmp_path / "out").glob(".work/*/text/*.json")))
    assert done > 0
    long_job()
    assert len(list((tmp_path / "out").glob(".work/*/text/*.json"))) >= done


def test_a_second_preparation_of_one_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(StorageError, match="another `prepare` is writing to it"):
        prepare(config_of(corpus, tmp_path))


def manifest_of(folder: Path) -> Manifest:
    return read_manifest(folder)


def test_the_commands_print_what_programs_rely_on(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    digest = manifest_of(prepared).root_digest
    arguments = ("prepare", "--sources", corpus / "web", corpus / "books", "--output", tmp_path, *SMALL_ARGUMENTS)
    for _ in ("prepared", "already there"):
        done = run(*arguments, "--workers", "2")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"root digest {digest}"
    assert "nothing to do" in done.stderr
    assert run("verify", tmp_path).stdout.splitlines()[-1] == f"root digest {digest}"
    assert json.loads(run("inspect", tmp_path, "--json").stdout)["root_digest"] == digest
    assert f"root digest  {digest}" in run("inspect", tmp_path).stdout
    assert "PREP_TOKENIZER__VOCAB_SIZE" in run("schema", "--env").stdout.split()
    assert json.loads(run("schema").stdout)["properties"]["row_length"]["minimum"] == 8


@pytest.mark.parametrize("arguments", [("--help",), ("prepare", "--help"), ("verify", "--help"), ("inspect", "--help"), ()])
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from data_pipeline.__main__ import main\n"
        f"try: main({list(arguments)!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'pyarrow', 'sentencepiece', 'numpy', 'torch'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def folder_with(tmp_path: Path, **files: bytes) -> Path:
    (tmp_path / "text").mkdir()
    for name, data in files.items():
        (tmp_path / "text" / name.replace("__", ".")).write_bytes(data)
    return tmp_path / "text"


GOOD_LINES = json_lines(sentences(1, 60))

BAD_INPUT: dict[str, tuple[dict[str, bytes], tuple[str, ...], int, str]] = {
    "empty folder": ({}, (), 3, "no file with text in it; it is empty. Formats that are read: .txt"),
    "only unknown files": ({"a__bin": b"x"}, (), 3, "no file with text in it; 1 .bin cannot be read. Formats that are read: .txt"),
    "broken lines over budget": (
        {"a__jsonl": GOOD_LINES + b'{"text": "cut\n' * 10},
        (),
        3,
        "source text, a.jsonl:61: not-json: ",
    ),
    "all lines without the field": (
        {"a__jsonl": b'{"body": "words"}\n'},
        (),
        3,
        "a.jsonl:1: no-text-field: no field 'text'; the fields are 'body'",
    ),
    "unknown setting": ({"a__jsonl": GOOD_LINES}, ("--tokenizer.vocab", "400"), 2, "did you mean --tokenizer.vocab_size?"),
    "value out of range": (
        {"a__jsonl": GOOD_LINES},
        ("--row_length", "2"),
        2,
        "row_length = '2': input should be greater than or equal to 8",
    ),
    "vocabulary too large": (
        {"a__jsonl": GOOD_LINES},
        ("--tokenizer.vocab_size", "50000", "--split.min_val_documents", "1"),
        2,
        "tokenizer.vocab_size = 50000: the training text allows ",
    ),
    "one file": ({"a__txt": b"one file of text " * 9}, (), 3, "add --text.documents paragraphs"),
    "too few validation documents": (
        {"a__txt": b"one file of text " * 9},
        ("--text.documents", "paragraphs"),
        3,
        "but split.min_val_documents = 4; add text, raise split.val_fraction, set text.documents to chunks",
    ),
    "nothing long enough": ({"a__txt": b"short"}, (), 3, "no training document is left of 1 that were read"),
    "position in a compressed file": (
        {"a__txt__gz": gzip.compress(b"text")},
        ("--split.by", "tail", "--text.documents", "chunks"),
        3,
        "split.by = tail needs plain uncompressed text files; set split.by to content",
    ),
    "unknown recipe": ({"a__jsonl": GOOD_LINES}, ("--recipe", "dmeo"), 2, "the recipes are auto, classify, demo, "),
}


@pytest.mark.parametrize(("num_documents", "held_out"), [(2, 1), (8, 1), (25, 2), (60, 4)])
def test_a_small_folder_has_validation_documents_too_and_the_same_however_it_is_cut(
    num_documents: int, held_out: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"{'and so it went on, ' * 9}{text}" for text in sentences(6, num_documents)]
    folder = folder_with(tmp_path, **{f"{number}__txt": text.encode() for number, text in enumerate(texts)})
    held = []
    for partition_bytes in (4096, 1 << 20):
        settings = SMALL | {"partition_bytes": partition_bytes, "tokenizer": {"kind": "byte"}, "dedup": {"near": False}}
        output = tmp_path / str(partition_bytes)
        prepare(PrepareConfig(sources=(str(folder),), output=output, workers=1, split={"val_fraction": 1e-9}, **settings))
        report = json.loads((output / "report.json").read_text())
        assert report["documents"]["val"] == held_out
        rows = Rows(output, read_manifest(output), "val")
        held.append(sorted(rows.read(np.arange(len(rows))).tokens_BL.flatten().tolist()))
    assert held[0] == held[1]
    assert ("validation loss is imprecise" in caplog.text) == (held_out < 4)


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_that_names_place_and_remedy(name: str, tmp_path: Path) -> None:
    files, arguments, exit_code, message = BAD_INPUT[name]
    done = run("prepare", "--sources", folder_with(tmp_path, **files), "--output", tmp_path / "out", "--workers", "1", *arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == exit_code, done.stderr
    assert len(errors) == 1
    assert done.stderr.splitlines()[-1] == errors[0]
    assert message in errors[0]
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert "Traceback" not in done.stderr


def test_a_missing_folder_and_an_unknown_variable_are_refused(tmp_path: Path) -> None:
    missing = run("prepare", "--sources", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert (missing.returncode, missing.stderr.count("\n")) == (3, 1)
    assert "nowhere: no such file or folder; check the path" in missing.stderr
    unknown = run("prepare", "--sources", tmp_path, "--output", tmp_path / "out", PREP_ROWLENGTH="64")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "PREP_ROWLENGTH is not a setting; did you mean PREP_ROW_LENGTH?" in unknown.stderr


def test_a_changed_byte_in_any_file_is_found_by_verify(prepared: Path, tmp_path: Path) -> None:
    manifest = read_manifest(prepared)
    for name in [*(shard.path for shard in manifest.shards[:2]), *manifest.files, "manifest.json"]:
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(prepared, folder)
        flip_a_byte(folder / name)
        with pytest.raises(PreparedDataError) as found:
            verify(folder)
        assert str(found.value).startswith(f"{folder / name}: ")
        assert "run `prepare` again" in str(found.value)
    done = run("verify", folder)
    assert (done.returncode, done.stderr) == (3, f"error: {found.value}\n")


def test_an_output_that_is_a_file_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("prepare", "--sources", corpus / "web", "--output", tmp_path / "file")
    assert (done.returncode, done.stderr.count("\n")) == (74, 1)


def test_an_output_with_files_of_the_users_own_is_refused_and_they_stay(corpus: Path, tmp_path: Path) -> None:
    for side in ("train", "val"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "a.txt").write_text("mine")
    done = run("prepare", "--sources", corpus / "web", "--output", tmp_path, *SMALL_ARGUMENTS)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "train/a.txt and 1 more would be replaced" in done.stderr
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["train", "train/a.txt", "val", "val/a.txt"]

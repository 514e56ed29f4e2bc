"""Every feature of `prepare` from end to end, on small corpora: the output has the requested properties."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.errors import ConfigError, ExitCode, PreparedDataError, SourceError, StoppedBySignal, exit_code_of
from data_pipeline import prepare as module_of_prepare
from data_pipeline.config import FIM_TOKENS, PrepareConfig
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.dataset.splits import SPLITS, Split
from data_pipeline.dataset.stored_documents import PublishedDocument, read_document, read_documents
from data_pipeline.dedup import duplicates as dedup_stages
from data_pipeline.prepare import prepare
from data_pipeline.repack import repack
from data_pipeline.stages import pack, read, rejects, select, split, tokenize, train_quality, train_tokenizer
from data_pipeline.tokenizer import load_tokenizer
from tests.support.chats import write_hugging_face_tokenizer
from tests.support.corpora import code_file, noise, reworded, sentences, write_texts
from tests.support.prepare_runs import content_of, run

BYTES = {"kind": "byte"}
PIECES = {"kind": "bpe", "vocab_size": 500}


def prepare_small(output: Path, sources: dict[str, Any], **settings: Any) -> Manifest:
    """Prepare named sources in this process. Each source is a path or a dict of settings."""
    tables = {name: own if isinstance(own, dict) else {"paths": (str(own),)} for name, own in sources.items()}
    defaults = {"workers": 1, "row_length": 128, "partition_bytes": 16_384, "tokenizer": BYTES, "split": {"val_fraction": 0.1}}
    return prepare(PrepareConfig(source=tables, output=output, **{**defaults, **settings}))


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_bytes())
    return report


def rejected(folder: Path, source: str) -> dict[str, int]:
    counts: dict[str, int] = report_of(folder)["sources"][source]["rejected"]
    return counts


def documents(folder: Path, *splits: Split) -> list[PublishedDocument]:
    manifest = read_manifest(folder)
    return [document for split in splits or SPLITS for document in read_documents(folder, manifest, split)]


def texts(folder: Path, *splits: Split) -> set[str]:
    return {document.text for document in documents(folder, *splits)}


def decoded_rows(folder: Path, split: Split) -> list[str]:
    """Return the text of every document in the rows, once for each use. Rows must be long enough for complete documents."""
    manifest, tokenizer = read_manifest(folder), load_tokenizer(folder / "tokenizer")
    rows = Rows(folder, manifest, split)
    everything = rows.read(np.arange(len(rows)))
    return [
        tokenizer.decode(tokens[segments == number].tolist())
        for tokens, segments in zip(everything.tokens_BL, everything.segments_BL, strict=True)
        for number in range(segments.max() + 1)
    ]


# repack and other commands that read stored tokens


@pytest.mark.parametrize("method", ["best-fit", "one-per-row"])
def test_repacked_it_is_what_prepare_writes_with_that_length(tmp_path: Path, method: str) -> None:
    text = write_texts(tmp_path / "text.jsonl", sentences(1, 200))
    settings = {"packing": {"method": method, "window_tokens": 4096}, "balance": {"by": "source", "max_repeats": 2.0}}
    other = write_texts(tmp_path / "other.jsonl", sentences(2, 50))
    sources = {"text": text, "other": other}
    prepare_small(tmp_path / "long", sources, row_length=512, **settings)
    expected = prepare_small(tmp_path / "short", sources, row_length=96, **settings)
    assert repack(tmp_path / "long", tmp_path / "repacked", 96) == expected
    assert content_of(tmp_path / "repacked") == content_of(tmp_path / "short")


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [
        ("row_length", -5, "greater than or equal to 8"),
        ("row_length", 0, "greater than or equal to 8"),
        ("row_length", 1, "greater than or equal to 8"),
        ("row_length", 7, "greater than or equal to 8"),
        ("row_length", 99999999999999, "less than or equal to 1048576"),
        ("workers", -1, "greater than or equal to 1"),
        ("workers", 0, "greater than or equal to 1"),
        ("workers", 5000, "less than or equal to 4096"),
    ],
)
def test_repack_refuses_the_numbers_that_prepare_refuses(tmp_path: Path, option: str, value: int, bound: str) -> None:
    numbers = {"row_length": 64, "workers": 1} | {option: value}
    with pytest.raises(ConfigError, match=rf"^{option} = {value}: input should be {bound}$"):
        repack(tmp_path, tmp_path / "again", **numbers)


@pytest.mark.parametrize("name", ["tokens/000000.arrow", "chosen/000000.arrow", "tokenizer/bytes.json"])
@pytest.mark.parametrize("damage", ["some bytes of it are others", "it is empty"])
def test_damaged_tables_are_named_by_all_that_read_them(tmp_path: Path, name: str, damage: str) -> None:
    prepare_small(tmp_path / "out", {"text": write_texts(tmp_path / "text.jsonl", sentences(1, 80))})
    data = (tmp_path / "out" / name).read_bytes()
    middle = len(data) // 2
    damaged = data[:middle] + bytes(400) + data[middle + 400 :] if damage != "it is empty" else b""
    (tmp_path / "out" / name).write_bytes(damaged)
    manifest = read_manifest(tmp_path / "out")
    readers: list[Callable[[], object]] = [
        lambda: repack(tmp_path / "out", tmp_path / "again", 64, 1),
        lambda: next(read_documents(tmp_path / "out", manifest, "train")),
        lambda: read_document(tmp_path / "out", manifest, 0),
    ]
    for reader in readers:
        with pytest.raises(
            PreparedDataError, match=rf"{name}: its digest is sha256:.* but the manifest says .*; the file was changed"
        ):
            reader()
    assert not (tmp_path / "again" / "manifest.json").exists()


def test_without_kept_tokens_the_commands_that_need_them_say_so(tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text.jsonl", sentences(1, 80))
    prepare_small(tmp_path / "out", {"text": text}, packing={"keep_tokens": False})
    assert not (tmp_path / "out" / "tokens").exists()
    for arguments in (
        ("repack", tmp_path / "out", "--output", tmp_path / "again", "--row_length", "64"),
        ("leaks", tmp_path / "out"),
        ("inspect", tmp_path / "out", "--document", "0"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (ExitCode.CONFIG, 1), arguments
        assert "was prepared with packing.keep_tokens = false; prepare it again with true" in done.stderr


def test_a_document_found_in_a_row_can_be_read(tmp_path: Path) -> None:
    written = sentences(1, 80)
    prepare_small(tmp_path / "out", {"text": write_texts(tmp_path / "text.jsonl", written)}, row_length=1 << 14)
    rows = Rows(tmp_path / "out", read_manifest(tmp_path / "out"), "train")
    identity = rows.document_ids(0).tolist()[3]
    done = run("inspect", tmp_path / "out", "--document", str(identity))
    assert done.stdout == written[identity] + "\n"
    assert done.stdout.rstrip("\n") == decoded_rows(tmp_path / "out", "train")[3]
    for absent in ("999", "-1", str(1 << 70)):
        missing = run("inspect", tmp_path / "out", "--document", absent)
        assert (missing.returncode, missing.stderr.count("\n")) == (ExitCode.CONFIG, 1)
        assert f"has no document {absent}; the column `documents` of the shards contains the ids" in missing.stderr


# quality


def test_a_trusted_source_and_a_bound_drop_the_gibberish_of_another(tmp_path: Path) -> None:
    good, bad = sentences(2, 60), noise(3, 10)
    sources = {
        "trusted": write_texts(tmp_path / "trusted.jsonl", sentences(1, 200)),
        "mixed": write_texts(tmp_path / "mixed.jsonl", [*good, *bad]),
    }
    prepare_small(tmp_path / "out", sources, tokenizer=PIECES, quality={"trusted": "trusted", "max_perplexity": 2000.0})
    assert rejected(tmp_path / "out", "mixed") == {"perplexity-high": 10}
    assert texts(tmp_path / "out") >= set(good)
    assert not texts(tmp_path / "out") & set(bad)


def test_a_percentile_drops_that_share_of_each_source(tmp_path: Path) -> None:
    sources = {
        "trusted": write_texts(tmp_path / "trusted.jsonl", sentences(1, 200)),
        "mixed": write_texts(tmp_path / "mixed.jsonl", [*sentences(2, 90), *noise(3, 10)]),
    }
    quality = {"trusted": "trusted", "max_perplexity": None, "max_perplexity_percentile": 90.0}
    prepare_small(tmp_path / "out", sources, tokenizer=PIECES, quality=quality)
    assert rejected(tmp_path / "out", "mixed") == {"perplexity-high": 10}
    assert not texts(tmp_path / "out") & set(noise(3, 10))


def test_examples_of_good_and_bad_text_teach_what_is_dropped(tmp_path: Path) -> None:
    good, bad = sentences(1, 60), [f"{text} buy now" for text in noise(1, 30)]
    source = write_texts(tmp_path / "mixed.jsonl", [*good, *bad])
    quality = {
        "good": (write_texts(tmp_path / "good.jsonl", sentences(2, 60)),),
        "bad": (write_texts(tmp_path / "bad.jsonl", [f"{text} buy now" for text in noise(2, 60)]),),
    }
    prepare_small(tmp_path / "out", {"mixed": source}, quality=quality)
    assert rejected(tmp_path / "out", "mixed") == {"classified-bad": 30}
    assert texts(tmp_path / "out") == set(good)
    assert report_of(tmp_path / "out")["classifier"]["held_out"]["accuracy"] == 1.0


# balance


def test_sources_have_the_shares_of_their_weights(tmp_path: Path) -> None:
    sources = {
        "much": {"paths": (str(write_texts(tmp_path / "much.jsonl", sentences(1, 800))),), "weight": 1.0},
        "little": {"paths": (str(write_texts(tmp_path / "little.jsonl", sentences(2, 200))),), "weight": 3.0},
    }
    prepare_small(tmp_path / "out", sources, balance={"by": "source"})
    of_sources = report_of(tmp_path / "out")["sources"]
    assert of_sources["little"]["share"] == pytest.approx(0.75, abs=0.03)
    assert rejected(tmp_path / "out", "little") == {}
    assert rejected(tmp_path / "out", "much").keys() == {"over-share"}


def test_a_metadata_field_balances_and_too_little_is_repeated(tmp_path: Path) -> None:
    rare, common = sentences(1, 100), sentences(2, 400)
    (tmp_path / "text.jsonl").write_bytes(
        write_texts(tmp_path / "a.jsonl", rare, topic="rare").read_bytes()
        + write_texts(tmp_path / "b.jsonl", common, topic="common").read_bytes()
    )
    balance = {"by": "field", "field": "topic", "weights": {"rare": 1.0, "common": 1.0}, "max_repeats": 3.0}
    records = {"metadata": ("topic",)}
    prepare_small(tmp_path / "out", {"text": tmp_path / "text.jsonl"}, balance=balance, records=records, row_length=1 << 14)
    times = Counter(decoded_rows(tmp_path / "out", "train"))
    in_training = texts(tmp_path / "out", "train")
    assert {times[text] for text in set(rare) & in_training} == {3}
    assert {times[text] for text in set(common) & in_training} == {1}
    of_rare = sum(times[text] * len(text.encode()) for text in set(rare))
    of_common = sum(times[text] * len(text.encode()) for text in set(common))
    assert of_rare / (of_rare + of_common) == pytest.approx(0.5, abs=0.03)
    assert Counter(decoded_rows(tmp_path / "out", "val")).most_common(1)[0][1] == 1, "balancing changed the validation split"


def test_selection_is_refused_where_it_leaves_nothing_of_a_side_that_there_was(tmp_path: Path) -> None:
    sources = {
        "text": write_texts(tmp_path / "text.jsonl", sentences(1, 60)),
        "other": write_texts(tmp_path / "b.jsonl", noise(3, 9)),
    }
    nobody = {"val_fraction": 1e-9, "min_val_documents": 0}
    manifest = prepare_small(tmp_path / "out", sources, balance={"by": "source"}, split=nobody)
    assert (manifest.totals["documents"]["val"], manifest.totals["rejected"]["balance"].keys()) == (0, {"over-share"})
    letters = {letter: number for number, letter in enumerate(["<pad>", "ж"])}
    TokenizersTokenizer(models.BPE(letters, [])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = {"path": tmp_path / "tokenizer.json", "pad_token": "<pad>", "add_bos": False, "add_eos": False}
    with pytest.raises(SourceError, match=r"none of \d+ train documents is left after selection \(69 no-tokens\)"):
        prepare_small(tmp_path / "none", sources, tokenizer=tokenizer)


# augmentation


def test_fill_in_the_middle_changes_training_code_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    code = {code_file(seed).rstrip() for seed in range(120)}
    for number, text in enumerate(sorted(code)):
        (tmp_path / "code" / f"{number}.py").write_text(text)
    prose = sentences(1, 60)
    sources = {"code": tmp_path / "code", "prose": write_texts(tmp_path / "prose.jsonl", prose)}
    prepare_small(tmp_path / "out", sources, augment={"fim_rate": 1.0}, row_length=1 << 14)
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    special = [tokenizer.token_id(name) for name in FIM_TOKENS]
    assert None not in special
    counts = report_of(tmp_path / "out")["augmentation"]
    held_out = texts(tmp_path / "out", "val")
    assert held_out <= code | set(prose)
    assert held_out & code
    assert counts["fim_psm"] + counts["fim_spm"] == len(code - held_out)
    assert min(counts["fim_psm"], counts["fim_spm"]) > 20
    in_training = texts(tmp_path / "out", "train")
    assert set(prose) - held_out <= in_training
    changed = in_training - set(prose)
    assert sorted(map(sorted, changed)) == sorted(map(sorted, code - held_out)), "not only the order of characters changed"
    assert len(changed & code) < 5


def test_synonyms_replace_words_of_training_prose(tmp_path: Path) -> None:
    prose = [f"{text} An OLD tree." for text in sentences(1, 150)]
    (tmp_path / "synonyms.tsv").write_text("old\taged\n")
    augment = {"synonyms": tmp_path / "synonyms.tsv", "synonym_rate": 1.0}
    prepare_small(tmp_path / "out", {"prose": write_texts(tmp_path / "prose.jsonl", prose)}, augment=augment)
    held_out = texts(tmp_path / "out", "val")
    assert held_out
    assert held_out <= set(prose)
    assert texts(tmp_path / "out", "train") == {text.replace("OLD", "AGED") for text in set(prose) - held_out}


# leaks and benchmarks

BENCHMARK = "which of the seven rivers that cross the northern plain is the longest when measured from its source to the sea"


@pytest.fixture
def look_alikes(tmp_path: Path) -> Path:
    originals = sentences(1, 60, min_words=150)
    return write_texts(tmp_path / "text.jsonl", [*originals, *map(reworded, originals[:30])])


def test_a_preparation_leaks_nothing(look_alikes: Path, tmp_path: Path) -> None:
    prepare_small(tmp_path / "out", {"text": look_alikes}, split={"val_fraction": 0.3})
    assert rejected(tmp_path / "out", "text") == {"near-duplicate": 30}
    done = run("leaks", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["exact"], found["near"], found["train"] + found["val"]) == (0, 0, 60)


def test_without_deduplication_the_leaks_are_found(look_alikes: Path, tmp_path: Path) -> None:
    settings = {"split": {"val_fraction": 0.3}, "dedup": {"exact": False, "near": False}}
    prepare_small(tmp_path / "out", {"text": look_alikes}, **settings)
    held_out = texts(tmp_path / "out", "val")
    apart = {text for text in texts(tmp_path / "out", "train") if reworded(text) in held_out and reworded(text) != text}
    apart |= {text for text in held_out if reworded(text) in texts(tmp_path / "out", "train") and reworded(text) != text}
    done = run("leaks", tmp_path / "out", "--json")
    assert done.returncode == ExitCode.DATA
    assert json.loads(done.stdout)["near"] == len(apart) > 0


def test_benchmark_text_is_found_and_can_be_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tainted = f"{sentences(2, 1)[0]} {BENCHMARK} {sentences(3, 1)[0]}"
    source = write_texts(tmp_path / "text.jsonl", [*sentences(1, 100), tainted])
    benchmark = write_texts(tmp_path / "benchmark.jsonl", [BENCHMARK, "a question that nobody has written anything about " * 3])
    seed = next(seed for seed in range(20) if is_trained_on(tainted, source, tmp_path / f"seed-{seed}", seed))
    found = run("leaks", tmp_path / f"seed-{seed}", "--against", benchmark, "--json")
    assert (found.returncode, json.loads(found.stdout)["benchmarks"][0]["overlapping"]) == (0, 1)
    assert run("leaks", tmp_path / f"seed-{seed}", "--against", benchmark, "--strict").returncode == ExitCode.DATA

    prepare_small(tmp_path / "clean", {"text": source}, dedup={"benchmarks": (benchmark,)})
    assert rejected(tmp_path / "clean", "text") == {"benchmark-overlap": 1}
    assert "dedup.benchmark_alarm_fraction" not in caplog.text
    common = write_texts(tmp_path / "common.jsonl", source.read_text().splitlines()[:20])
    prepare_small(tmp_path / "few", {"text": source}, dedup={"benchmarks": (common,)})
    lost = report_of(tmp_path / "few")["duplicates"]["benchmark_share_by_source"]["text"]
    assert lost > 0.05
    assert f"source text: {100 * lost:.1f} % of its text is dropped because it shares text with dedup.benchmarks" in caplog.text
    assert report_of(tmp_path / "few")["duplicates"]["benchmark_alarms"] == ["text"]
    assert texts(tmp_path / "clean") == set(sentences(1, 100))
    assert run("leaks", tmp_path / "clean", "--against", benchmark, "--strict").returncode == 0


def is_trained_on(text: str, source: Path, output: Path, seed: int) -> bool:
    prepare_small(output, {"text": source}, split={"seed": seed, "val_fraction": 0.1})
    return text in texts(output, "train")


# user-supplied tokenizers


def huggingface(path: Path, vocab_size: int) -> Path:
    """Train a byte-level tokenizer and save it as `tokenizer.json`."""
    tokenizer = TokenizersTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences(5, 100), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def sentence_piece(path: Path, vocab_size: int) -> Path:
    """Write a SentencePiece model that another preparation has trained."""
    source = write_texts(path.parent / f"{vocab_size}.jsonl", sentences(5, 200))
    earlier = path.parent / f"prepared-{vocab_size}"
    prepare_small(earlier, {"text": source}, tokenizer={"kind": "unigram", "vocab_size": vocab_size})
    path.write_bytes((earlier / "tokenizer" / "unigram.model").read_bytes())
    return path


@pytest.mark.parametrize(
    ("make", "name", "roles"),
    [(huggingface, "tokenizer.json", {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}), (sentence_piece, "a.model", {})],
)
def test_a_supplied_tokenizer_is_used_as_it_is_wherever_it_lies(
    tmp_path: Path, make: Callable[[Path, int], Path], name: str, roles: dict[str, str]
) -> None:
    written = sentences(1, 80)
    source = write_texts(tmp_path / "text.jsonl", written)

    def prepare_with(path: Path, output: str) -> Manifest:
        tokenizer = {"path": path, **{f"{role}_token": token for role, token in roles.items()}}
        return prepare_small(tmp_path / output, {"text": source}, tokenizer=tokenizer)

    here = make(tmp_path / "here" / name, 400)
    first = prepare_with(here, "first")
    (tmp_path / "there").mkdir()
    moved = here.rename(tmp_path / "there" / name)
    assert prepare_with(moved, "second") == first
    assert content_of(tmp_path / "second") == content_of(tmp_path / "first")
    other = prepare_with(make(tmp_path / "here" / name, 420), "third")
    assert (first.vocab_size, other.vocab_size) == (400, 420)
    assert first.tokenizer_digest != other.tokenizer_digest
    assert first.fingerprint != other.fingerprint
    assert texts(tmp_path / "first") == texts(tmp_path / "third") == set(written)
    assert any(path.read_bytes() == moved.read_bytes() for path in (tmp_path / "first" / "tokenizer").iterdir())


@pytest.mark.parametrize("by", ["none", "source"])
def test_a_document_without_a_token_is_dropped_and_counted(tmp_path: Path, by: str) -> None:
    letters = {letter: number for number, letter in enumerate(["<pad>", *"abcdefghijklmnopqrstuvwxyz"])}
    TokenizersTokenizer(models.BPE(letters, [])).save(str(tmp_path / "tokenizer.json"))
    unknown = [text.upper() for text in sentences(2, 5)]
    source = write_texts(tmp_path / "text.jsonl", [*unknown, *sentences(1, 60)])
    tokenizer = {"path": tmp_path / "tokenizer.json", "pad_token": "<pad>", "add_bos": False, "add_eos": False}
    prepare_small(tmp_path / "out", {"text": source}, tokenizer=tokenizer, balance={"by": by}, keep_rejects=True)
    report = report_of(tmp_path / "out")
    assert report["rejected"]["quality"] == {"no-tokens": 5}
    assert report["documents"]["read"] == 65 == report["documents"]["kept"] + report["documents"]["rejected"]
    identities = {document.id for document in documents(tmp_path / "out")}
    assert (len(identities), min(identities)) == (60, 5)
    found = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [reject["sample"] for reject in found] == [text[:200] for text in unknown]
    assert repack(tmp_path / "out", tmp_path / "again", 64, 1).totals["documents"] == report["documents"]


# losses while reading


def test_a_source_and_a_file_that_are_lost_whole_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_texts(tmp_path / "good" / "a.jsonl", sentences(1, 120))
    rows = pa.table({"body": sentences(2, 1000)})
    for name in ("good/other.parquet", "lost/a.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(rows, tmp_path / name)
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("short")
    prepare_small(tmp_path / "out", {name: tmp_path / name for name in ("good", "lost", "short")})
    column = "no-text-field: no column 'text'; the columns are 'body'; see records.text_field; conversations need .*"
    warnings = [
        rf"source lost: none of its 1 documents is kept \(1 no-text-field; first: a\.parquet: {column}\)",
        r"source short: none of its 1 documents is kept \(1 too-short; first: a\.txt:1: too-short: .*\)",
        r"files that could not be read to the end, the rest of each is skipped: "
        rf"source good, other\.parquet: {column}; source lost, a\.parquet: {column}",
    ]
    for expected, found in zip(warnings, caplog.messages, strict=True):
        assert re.fullmatch(expected, found)


# filters that judge documents

GERMAN = "Der alte Mann ging langsam durch den stillen Wald und dachte an die Tage, die längst vergangen waren. "
ENGLISH = "The old man walked slowly through the silent wood and thought of the days that were long gone. "


def test_presets_and_languages_reject_with_their_reasons(tmp_path: Path) -> None:
    story = "He had counted {} trees before noon. Then the evening came, and the birds were quiet."
    english = [ENGLISH + story.format(number) for number in range(60)]
    unwanted = {
        "gopher-bullet-lines": "\n".join(f"- the {word} of the old and quiet house that we have seen" for word in "abcdefghij"),
        "gopher-stop-words": " ".join(["mountain river forest valley meadow stone"] * 10),
        "spam-upper-case": ENGLISH.upper() * 3,
        "c4-curly-bracket": f"{ENGLISH * 3} function() {{ return 1; }}",
        "language-unwanted": GERMAN * 3,
    }
    source = write_texts(tmp_path / "text.jsonl", [*english, *unwanted.values()])
    prepare_small(
        tmp_path / "out",
        {"text": source},
        heuristics={"presets": ("gopher-quality", "c4", "spam"), "gopher_min_words": 10},
        language={"keep": ("en",)},
        dedup={"near": False},
        keep_rejects=True,
    )
    assert rejected(tmp_path / "out", "text") == dict.fromkeys(unwanted, 1)
    lines = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    found = {reject["reason"]: reject for reject in map(json.loads, lines)}
    for number, (reason, text) in enumerate(unwanted.items(), 61):
        assert (found[reason]["line"], found[reason]["stage"]) == (number, "judge")
        assert found[reason]["sample"] in text


def test_a_source_overrides_cleaning_and_quality_for_itself_alone(tmp_path: Path) -> None:
    sources = {
        "strict": {
            "paths": (str(write_texts(tmp_path / "strict.jsonl", [*sentences(1, 60), "a short text of words", *noise(1, 5)])),),
            "clean": {"min_chars": 40},
            "quality": {"max_perplexity": 2000.0},
        },
        "lenient": write_texts(tmp_path / "lenient.jsonl", [*sentences(2, 60), "a short text of others", *noise(2, 5)]),
        "trusted": write_texts(tmp_path / "trusted.jsonl", sentences(3, 200)),
    }
    quality = {"trusted": "trusted", "max_perplexity": None}
    prepare_small(tmp_path / "out", sources, tokenizer=PIECES, quality=quality)
    assert rejected(tmp_path / "out", "strict") == {"too-short": 1, "perplexity-high": 5}
    assert rejected(tmp_path / "out", "lenient") == {}


# private information


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Address of a server for the folder `web`."""
    (tmp_path / "web").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path / "web")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_published_names_no_secret_of_an_address_and_no_local_folder(tmp_path: Path, served: str) -> None:
    write_texts(tmp_path / "web" / "remote.jsonl", sentences(1, 100))
    local = write_texts(tmp_path / "local.jsonl", [*sentences(2, 50), "short"])
    canary = "canary-7f3a"
    url = f"http://reader:{canary}@{served}/remote.jsonl?token={canary}"
    (tmp_path / "synonyms.tsv").write_text("bade\tbado\n")
    (tmp_path / "benchmark.txt").write_text(BENCHMARK)
    prepare_small(
        tmp_path / "out",
        {"remote": {"paths": (url,)}, "local": local},
        augment={"synonyms": tmp_path / "synonyms.tsv", "synonym_rate": 0.5},
        dedup={"benchmarks": (tmp_path / "benchmark.txt",)},
        keep_rejects=True,
    )
    assert len(texts(tmp_path / "out")) == 150
    published = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(published) > 10
    for path in published:
        assert canary.encode() not in path.read_bytes(), path
        assert str(tmp_path).encode() not in path.read_bytes(), path


# stops and failures

STAGES = [
    (read, "read_partition"),
    *((dedup_stages, name) for name in ("find_candidates", "verify_candidates", "resolve_pairs", "mark_partition")),
    (split, "split_partition"),
    (train_tokenizer, "sample_partition"),
    (train_tokenizer, "train"),
    (train_quality, "make_reference"),
    (train_quality, "train_content_classifier"),
    (tokenize, "tokenize_partition"),
    (select, "weigh_partition"),
    (select, "select_partition"),
    (rejects, "write_rejected_partition"),
    (pack, "pack_group"),
]


@pytest.fixture(scope="module")
def all_stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Settings with which a preparation runs all stages, and the files that it writes."""
    folder = tmp_path_factory.mktemp("stages")
    settings = {
        "sources": {
            "text": write_texts(folder / "text.jsonl", sentences(1, 120)),
            "more": write_texts(folder / "more.jsonl", [*sentences(2, 40), *map(reworded, sentences(1, 120))]),
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 400},
        "quality": {
            "trusted": "text",
            "max_perplexity": None,
            "good": (write_texts(folder / "good.jsonl", sentences(3, 20)),),
            "bad": (write_texts(folder / "bad.jsonl", noise(1, 20)),),
        },
        "balance": {"by": "source"},
        "keep_rejects": "all",
    }
    prepare_small(folder / "out", **settings)
    return settings, content_of(folder / "out")


@pytest.mark.parametrize(("module", "name"), STAGES, ids=[name for _, name in STAGES])
def test_stopped_in_any_stage_it_goes_on_from_there(
    all_stages: tuple[dict[str, Any], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    settings, expected = all_stages
    work = getattr(module, name)

    def stop(task: Any) -> Any:
        result = work(task)
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(module, name, stop)
        with pytest.raises(StoppedBySignal, match="SIGTERM received; finished work is kept") as stopped:
            prepare_small(tmp_path, **settings)
    assert exit_code_of(stopped.value) == ExitCode.STOPPED == 75
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob(".work/*/*/*.json")}
    assert before
    seen: dict[Path, int] = {}

    def look(*arguments: Any) -> Any:
        seen.update({path: path.stat().st_mtime_ns for path in before})
        return assemble(*arguments)

    assemble = module_of_prepare.assemble
    monkeypatch.setattr(module_of_prepare, "assemble", look)
    prepare_small(tmp_path, **settings)
    assert seen == before, "finished work was done again"
    assert content_of(tmp_path) == expected


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("setting", "file", "more", "exit_code", "message"),
    [
        ("dedup.benchmarks", "bad.jsonl", (), ExitCode.DATA, "bad.jsonl:1: not valid JSON"),
        (
            *("augment.synonyms", "bad.tsv", ("--augment.synonym_rate", "1"), ExitCode.CONFIG),
            "bad.tsv, line 1: 'not' needs at least one synonym",
        ),
    ],
)
def test_an_error_in_a_worker_ends_everything_with_that_error(
    tmp_path: Path, setting: str, file: str, more: tuple[str, ...], exit_code: ExitCode, message: str, workers: str
) -> None:
    write_texts(tmp_path / "text.jsonl", sentences(1, 300))
    (tmp_path / file).write_text("not")
    settings = ("--tokenizer.kind", "byte", "--partition_bytes", "4096", "--workers", workers, *more)
    folder = ("--sources", tmp_path / "text.jsonl", "--output", tmp_path / "out")
    done = run("prepare", *folder, f"--{setting}", tmp_path / file, *settings)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors), done.stderr.splitlines()[-1]) == (exit_code, 1, errors[0])
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_run_of_as_many_words_as_are_set_counts_as_benchmark_text(tmp_path: Path) -> None:
    nine = " ".join(BENCHMARK.split()[:9])
    source = write_texts(tmp_path / "text.jsonl", [*sentences(1, 40), f"{sentences(2, 1)[0]} {nine} {sentences(3, 1)[0]}"])
    benchmark = write_texts(tmp_path / "benchmark.jsonl", [BENCHMARK])
    for num_words, dropped in ((13, {}), (8, {"benchmark-overlap": 1})):
        output = tmp_path / f"words-{num_words}"
        prepare_small(output, {"text": source}, dedup={"benchmarks": (benchmark,), "benchmark_words": num_words})
        assert rejected(output, "text") == dropped


def test_a_document_takes_no_more_near_duplicates_with_it_than_are_set(tmp_path: Path) -> None:
    [original] = sentences(1, 1, 40)
    source = write_texts(tmp_path / "text.jsonl", [*sentences(2, 40), *(f"{original} End {number}." for number in range(5))])
    for most, dropped in ((100, 4), (1, 2)):
        output = tmp_path / f"most-{most}"
        prepare_small(output, {"text": source}, dedup={"max_cluster": most})
        assert rejected(output, "text") == {"near-duplicate": dropped}


def test_a_tokenizer_is_trained_on_as_much_text_as_is_set(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "text.jsonl", sentences(1, 300))
    digests = {
        prepare_small(
            tmp_path / name, {"text": source}, tokenizer=PIECES | {"vocab_size": 300, "sample_bytes": size}
        ).tokenizer_digest
        for name, size in (("few", 4096), ("some", 8192), ("all", 1 << 20), ("all-again", 1 << 24))
    }
    assert len(digests) == 3


def test_a_setting_without_effect_is_told_once_in_the_preparation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_texts(tmp_path / "text.jsonl", sentences(1, 40))
    prepare_small(tmp_path / "out", {"text": {"paths": (str(source),), "weight": 2.0}}, dedup={"benchmark_overlaps": 3})
    warnings = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert warnings == [
        "dedup.benchmark_overlaps has no effect: it needs dedup.benchmarks to be set",
        "source.text.weight has no effect: it needs balance.by = source",
    ]


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))


def test_the_splits_of_a_data_set_are_those_of_the_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "hub"
    for name, first, last in (("train", 0, 30), ("validation", 100, 107), ("test", 200, 210)):
        write_records(
            source / f"data/{name}-00000.jsonl", [{"text": f"{name} record {n} has words of its own."} for n in range(first, last)]
        )
    prepare_small(tmp_path / "data", {"hub": source}, dedup={"near": False})
    by_split = {split: " ".join(one.text for one in documents(tmp_path / "data", split)) for split in SPLITS}
    assert by_split["train"].count("train record") == 30
    assert by_split["val"].count("validation record") == 7
    assert "validation" not in by_split["train"]
    assert not any("test record" in text for text in by_split.values())
    assert "test split" in caplog.text
    assert report_of(tmp_path / "data")["ignored"] == {"test-split": {".jsonl": 1}}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_the_form_of_conversations_is_recognised_and_told(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    turns = [{"from": "human", "value": "Question?"}, {"from": "gpt", "value": "Answer."}]
    records = [{"conversations": [*turns, {"from": "human", "value": f"Number {n}?"}, turns[1]]} for n in range(40)]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(records), tmp_path / name)
    elif name.endswith("json"):
        (tmp_path / name).write_text(json.dumps(records, indent=1))
    else:
        write_records(tmp_path / name, records)
    prepare_small(tmp_path / "data", {"chats": tmp_path / name}, dedup={"near": False}, chat={"template": "chatml"})
    assert "conversations with from and value (ShareGPT)" in caplog.text
    assert "--records.messages_field conversations" in caplog.text
    found = documents(tmp_path / "data", *SPLITS)
    assert len(found) == 40
    assert all(one.text.count("Answer.") == 2 for one in found)


def test_sources_of_different_forms_are_prepared_together(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Say"}]
    write_records(tmp_path / "a.jsonl", [{"messages": [{"role": "system", "content": f"{n}"}, *turns]} for n in range(20)])
    write_records(tmp_path / "b.jsonl", [{"instruction": f"Ask {n}", "output": "Say"} for n in range(20)])
    sources = {name: tmp_path / f"{name}.jsonl" for name in "ab"}
    prepare_small(tmp_path / "data", sources, dedup={"near": False}, chat={"template": "chatml"})
    found = documents(tmp_path / "data", *SPLITS)
    assert len(found) == 40
    assert all(one.text.count("assistant\nSay") == 1 for one in found)


def test_a_template_that_leaves_a_field_out_is_told_with_the_number_of_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [
        {
            "messages": [{"role": "user", "content": f"Question {n}?", "mood": n}, {"role": "assistant", "content": "Answer."}],
            "title": f"Title {n}" if n < 30 else None,
            "date": n,
        }
        for n in range(40)
    ]
    write_records(tmp_path / "a.jsonl", records)
    prepare_small(tmp_path / "data", {"chats": tmp_path / "a.jsonl"}, dedup={"near": False}, chat={"template": "chatml"})
    assert "leaves out these fields, with the number of conversations: user.mood (40)" in caplog.text
    assert "no setting uses these fields, with the number of records: title (30)" in caplog.text
    assert report_of(tmp_path / "data")["unused_fields"] == {"record.date": 40, "record.title": 30, "user.mood": 40}


def test_the_examples_of_a_conversation_are_in_one_split_and_no_duplicates(tmp_path: Path) -> None:
    folder = write_hugging_face_tokenizer(
        tmp_path / "tokenizer",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{{ '<why>' + m.reasoning_content if m.reasoning_content and loop.last }}"
        "{{ m.content + '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}",
    )
    records = [
        {
            "messages": [
                turn
                for n in range(4)
                for turn in (
                    {"role": "user", "content": f"Question {n} about number {record} of many numbers, if you please?"},
                    {"role": "assistant", "content": f"Answer {n * record}.", "reasoning_content": "Because"},
                )
            ]
        }
        for record in range(40)
    ]
    write_records(tmp_path / "a.jsonl", records)
    settings = {"chat": {"template": "tokenizer"}, "tokenizer": {"path": folder}, "row_length": 1024}
    prepare_small(tmp_path / "data", {"chats": tmp_path / "a.jsonl"}, **settings)
    numbers = {
        split: {re.search(r"number (\d+) of many", one.text)[1] for one in documents(tmp_path / "data", split)}  # type: ignore[index]
        for split in SPLITS
    }
    assert numbers["val"]
    assert not numbers["val"] & numbers["train"]


def test_one_large_text_file_is_cut_into_chunks_by_the_recipe_auto(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Sentence {n} of a long book, which has {n * 31} others.\n" for n in range(20_000)))
    done = run("prepare", "--sources", book, "--output", tmp_path / "data", "--recipe", "auto")
    assert done.returncode == 0, done.stderr
    assert "text.documents = chunks, because the input is 1 text file" in done.stdout + done.stderr


def test_a_wrong_field_names_the_form_of_the_records(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", [{"instruction": f"Do {n}", "input": "", "output": "Done"} for n in range(9)])
    with pytest.raises(
        SourceError, match=r"instructions \(Alpaca\): --records.prompt_field instruction --records.text_field output"
    ):
        prepare_small(tmp_path / "data", {"a": tmp_path / "a.jsonl"})

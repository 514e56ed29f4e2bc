"""Preparation of text beside other tools: the same text, tokenizers and cores, whole processes with two workers.

tokens-…   text to shards: tokenize, pack and write, with all other stages turned off
chain      clean, rules, near-duplicates, tokenize, pack, write, for few megabytes, because datatrove takes seconds for each
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_pipeline.config import TokenizerConfig
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.tokenizer import save_tokenizer
from data_pipeline.tokenizer.training import train_tokenizer
from tests.benchmarks.bench import PEERS_COMMAND, Bench
from tests.benchmarks.harness import OWN, PEERS, Comparison, Contestant, Sample, Watched, run_program

VOCABULARY, ROW, WORKERS = 32_000, 2048, 2
OFF = ("--dedup.exact", "false", "--dedup.near", "false", "--language.identify", "false", "--clean.mojibake", "false")
ON = ("--heuristics.presets", "gopher-quality", "gopher-repetition", "c4", "fineweb", "--language.identify", "false")
PACK = ("--workers", WORKERS, "--row_length", ROW, "--partition_bytes", 4_194_304, "--packing.keep_tokens", "false")
TOOLS = {"litdata": "litdata's optimize", "streaming": "MDSWriter", "datatrove": "datatrove's DocumentTokenizer"}
MEGATRON = "builder like Megatron-LM's"
PROSE = "--text TEXT.jsonl with English prose; the filters drop the built-in corpus, which is code"
QUICK_BYTES, CHAIN_BYTES = 4_000_000, 3_000_000


def comparisons(bench: Bench) -> Iterator[Comparison]:
    texts = Texts(bench)
    rounds = 1 if bench.quick else 3
    megabytes = f"{size(texts.all) / 1e6:.1f} MB"
    tokenizers: tuple[tuple[str, str, dict[str, str]], ...] = (
        ("bpe.model", "SentencePiece", {"litdata": "litdata_optimize.py", "streaming": "mds_writer.py"}),
        ("tokenizer.json", "tokenizer.json", {"datatrove": "datatrove_tokens.py"}),
    )
    for name, words, peers in tokenizers:
        contestants: dict[str, Contestant] = {OWN: partial(own, texts, texts.all, name, OFF)}
        contestants[MEGATRON] = partial(peer, texts, texts.all, name, None, "megatron_style.py")
        for package, script in peers.items():
            python = bench.peer("datatrove" if package == "datatrove" else "streaming", package)
            text = texts.parts(texts.all) if script == "datatrove_tokens.py" else texts.all
            contestants[TOOLS[package]] = partial(peer, texts, text, name, python, script) if python else PEERS_COMMAND
        title = f"Text to shards, {megabytes}, {words}, {WORKERS} workers"
        yield Comparison(f"tokens-{name.split('.')[0]}", title, "s", contestants, MEGATRON, rounds=rounds)
    few = texts.first(CHAIN_BYTES // 2 if bench.quick else CHAIN_BYTES)
    whole: dict[str, Contestant] = {OWN: partial(own, texts, few, "tokenizer.json", ON) if bench.text else PROSE}
    python = bench.peer("datatrove", "datatrove")
    chain = partial(peer, texts, texts.parts(few), "tokenizer.json", python, "datatrove_chain.py")
    whole["datatrove"] = PEERS_COMMAND if python is None else chain if bench.text else PROSE
    yield Comparison("chain", f"All stages, {size(few) / 1e6:.1f} MB, {WORKERS} workers", "s", whole, "datatrove", rounds=rounds)


class Texts:
    """The text in the forms that the tools read, and two tokenizers that were trained on a part of it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.folder = bench.folder / "text"
        self.folder.mkdir(exist_ok=True)

    @cached_property
    def all(self) -> Path:
        given = self._bench.text
        if given is None:
            given = self.folder / "library.jsonl"
            with given.open("w") as file:
                for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")):
                    file.write(json.dumps({"text": path.read_text(errors="replace")}) + "\n")
        return self._cut(given.absolute(), QUICK_BYTES) if self._bench.quick else given.absolute()

    def first(self, num_bytes: int) -> Path:
        return self._cut(self.all, num_bytes)

    def _cut(self, text: Path, num_bytes: int) -> Path:
        path = self.folder / f"first-{num_bytes}.jsonl"
        if path == text:
            return path
        with path.open("wb") as file, text.open("rb") as lines:
            for line in lines:
                file.write(line)
                if file.tell() >= num_bytes:
                    break
        return path

    def parts(self, text: Path) -> Path:
        """Split the text into one file for each worker, because datatrove distributes work by file."""
        folder = self.folder / f"{text.stem}-parts"
        folder.mkdir(exist_ok=True)
        lines = text.read_bytes().splitlines(keepends=True)
        for number in range(WORKERS):
            (folder / f"{number}.jsonl").write_bytes(b"".join(lines[number::WORKERS]))
        return folder

    def tokenizer(self, name: str) -> Path:
        path = self.folder / name
        if path.exists():
            return path
        lines = self._cut(self.all, QUICK_BYTES).read_text().splitlines()
        sample = [json.loads(line)["text"] for line in lines]
        if name == "bpe.model":
            pieces = [document[start : start + 4096] for document in sample for start in range(0, len(document), 4096)]
            save_tokenizer(train_tokenizer(pieces, TokenizerConfig(vocab_size=VOCABULARY)), self.folder)
            return path
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<pad>", "<unk>", "<bos>", "<eos>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(sample, trainer)
        tokenizer.save(str(path))
        return path


def own(texts: Texts, text: Path, tokenizer: str, settings: tuple[object, ...], folder: Path) -> Sample:
    words: list[object] = ["--sources", text, "--output", folder / "out", "--tokenizer.path", texts.tokenizer(tokenizer), *PACK]
    if tokenizer == "tokenizer.json":
        words += ["--tokenizer.eos_token", "<eos>", "--tokenizer.bos_token", "<bos>"]
    watched = run_program("data_pipeline", "prepare", *words, *settings)
    return sample(watched, text, tokens=sum(shard.tokens for shard in read_manifest(folder / "out").shards))


def peer(texts: Texts, text: Path, tokenizer: str, python: Path | None, script: str, folder: Path) -> Sample:
    words = (text, texts.tokenizer(tokenizer), folder / "out", WORKERS)
    watched = run_program(PEERS / script, *words, **({"python": python} if python else {}))
    written = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    return sample(watched, text, MB_written=round(written / 1e6, 1))


def sample(watched: Watched, text: Path, **facts: Any) -> Sample:
    return Sample(watched.wall_s, watched.cpu_s, watched.load, {"MB/s": round(size(text) / 1e6 / watched.wall_s, 2)} | facts)


def size(text: Path) -> int:
    """Return the bytes of the text itself."""
    paths = sorted(text.glob("*.jsonl")) if text.is_dir() else [text]
    return sum(len(json.loads(line)["text"].encode()) for path in paths for line in path.read_bytes().splitlines())

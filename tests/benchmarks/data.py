"""Compares data preparation with other tools: the same text, tokenizer and cores, one tool after the other.

    python -m tests.benchmarks.data --text TEXT.jsonl [--datatrove PYTHON] [--streaming PYTHON] [--only tokens|chain|memory]

`--datatrove` names an interpreter with datatrove, `--streaming` one with litdata, mosaicml-streaming, torch and sentencepiece.
Tools without an interpreter are left out. The Megatron-style builder runs in this interpreter. Times are those of whole processes.

tokens  text to shards: tokenize, pack and write, with all other stages turned off
chain   clean, language, all heuristics, near-duplicates, tokenize, pack, write
memory  the chain on the text, and on ten times as much text without duplicates: the peak memory of all processes together
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import save_tokenizer
from data_pipeline.tokenizer.training import train_tokenizer
from tests.support.runs import ROOT

PEERS = Path(__file__).parent / "peers"
VOCABULARY = 32_000
ROW = 2048
OFF = (
    *("--dedup.exact", "false", "--dedup.near", "false", "--language.identify", "false", "--clean.mojibake", "false"),
    *("--packing.keep_tokens", "false"),
)
ON = ("--heuristics.presets", "gopher-quality", "gopher-repetition", "c4", "fineweb", "spam", "--language.keep", "en")
CHAIN_BYTES = 3_000_000  # datatrove takes ten seconds for this much


@dataclass(frozen=True)
class Tokenizers:
    """Two tokenizers trained on the same sample: a SentencePiece BPE model and a Hugging Face byte-level BPE."""

    sentencepiece: Path
    huggingface: Path


def train_both(text: Path, folder: Path) -> Tokenizers:
    sample = [orjson.loads(line)["text"] for number, line in enumerate(text.open("rb")) if number % 8 == 0]
    pieces = [document[start : start + 4096] for document in sample for start in range(0, len(document), 4096)]
    save_tokenizer(train_tokenizer(pieces, TokenizerConfig(vocab_size=VOCABULARY)), folder / "sentencepiece")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<unk>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizers(folder / "sentencepiece" / "bpe.model", folder / "tokenizer.json")


def prepare(text: Path, output: Path, workers: int, tokenizer: Path, *settings: str) -> list[str]:
    special = ("--tokenizer.eos_token", "<eos>", "--tokenizer.bos_token", "<bos>") if tokenizer.suffix == ".json" else ()
    return [
        *(sys.executable, "-m", "data_pipeline", "prepare", "--sources", str(text), "--output", str(output)),
        *("--workers", str(workers), "--row_length", str(ROW), "--partition_bytes", "4194304"),
        *("--tokenizer.path", str(tokenizer), *special, *settings),
    ]


def seconds(command: Sequence[str]) -> float:
    begin = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.monotonic() - begin


def split_lines(text: Path, folder: Path, parts: int) -> Path:
    """Split the text into one file for each worker, because datatrove distributes work by file."""
    folder.mkdir()
    lines = text.read_bytes().splitlines(keepends=True)
    for number in range(parts):
        (folder / f"{number}.jsonl").write_bytes(b"".join(lines[number::parts]))
    return folder


def compare_tokens(text: Path, folder: Path, tokenizers: Tokenizers, options: argparse.Namespace) -> None:
    workers, megabytes = options.workers, text_megabytes(text)
    sp, hf = tokenizers.sentencepiece, tokenizers.huggingface
    peer = [str(text), str(sp)]
    rows: list[tuple[str, str, list[str]]] = [
        ("this pipeline", "SentencePiece BPE", prepare(text, folder / "sp", workers, sp, *OFF)),
        (
            "Megatron-style builder",
            "SentencePiece BPE",
            [sys.executable, str(PEERS / "megatron_style.py"), *peer, str(folder / "m-sp")],
        ),
        ("this pipeline", "tokenizer.json", prepare(text, folder / "hf", workers, hf, *OFF)),
        (
            "Megatron-style builder",
            "tokenizer.json",
            [sys.executable, str(PEERS / "megatron_style.py"), str(text), str(hf), str(folder / "m-hf")],
        ),
    ]
    if options.streaming:
        rows += [
            (
                "litdata optimize",
                "SentencePiece BPE",
                [options.streaming, str(PEERS / "litdata_optimize.py"), *peer, str(folder / "lit")],
            ),
            ("MDSWriter", "SentencePiece BPE", [options.streaming, str(PEERS / "mds_writer.py"), *peer, str(folder / "mds")]),
        ]
    if options.datatrove:
        parts = split_lines(text, folder / "parts", workers)
        command = [options.datatrove, str(PEERS / "datatrove_tokens.py"), str(parts), str(hf), str(folder / "dt")]
        rows.append(("datatrove DocumentTokenizer", "tokenizer.json", command))
    print(f"tokens: {megabytes:.1f} MB of text, {workers} workers\n\n| tool | tokenizer | s | MB/s |\n|---|---|---|---|")
    for tool, tokenizer, command in rows:
        taken = seconds(command if tool == "this pipeline" else [*command, str(workers)])
        print(f"| {tool} | {tokenizer} | {taken:.1f} | {megabytes / taken:.1f} |", flush=True)


def compare_chain(text: Path, folder: Path, tokenizers: Tokenizers, options: argparse.Namespace) -> None:
    print("\nchain\n\n| tool | MB of text | s | MB/s |\n|---|---|---|---|")
    megabytes = text_megabytes(text)
    taken = seconds(prepare(text, folder / "chain", options.workers, tokenizers.sentencepiece, *ON))
    print(f"| this pipeline | {megabytes:.1f} | {taken:.1f} | {megabytes / taken:.2f} |", flush=True)
    if options.datatrove:
        few = folder / "few.jsonl"
        few.write_bytes(b"".join(first_lines(text, CHAIN_BYTES)))
        parts = split_lines(few, folder / "few", options.workers)
        peer = [str(parts), str(tokenizers.huggingface), str(folder / "dt-chain"), str(options.workers)]
        taken = seconds([options.datatrove, str(PEERS / "datatrove_chain.py"), *peer])
        megabytes = text_megabytes(few)
        print(f"| datatrove (no language filter) | {megabytes:.1f} | {taken:.1f} | {megabytes / taken:.2f} |")


def measure_memory(text: Path, folder: Path, tokenizers: Tokenizers, options: argparse.Namespace) -> None:
    tenfold = folder / "tenfold.jsonl"
    with tenfold.open("wb") as file:
        for copy in range(10):
            for line in text.open("rb"):
                words = orjson.loads(line)["text"].split(" ")
                words[::4] = [f"{word}{chr(ord('a') + copy)}" if copy else word for word in words[::4]]
                file.write(orjson.dumps({"text": " ".join(words)}) + b"\n")
    print("\nmemory\n\n| MB of text | s | peak memory, MB | of which mapped files, MB |\n|---|---|---|---|")
    for path in (text, tenfold):
        begin = time.monotonic()
        with peak_memory(prepare(path, folder / path.stem, options.workers, tokenizers.sentencepiece, *ON)) as peak:
            pass
        taken = time.monotonic() - begin
        print(f"| {text_megabytes(path):.0f} | {taken:.0f} | {peak['total'] / 1e6:.0f} | {peak['mapped'] / 1e6:.0f} |", flush=True)


@contextlib.contextmanager
def peak_memory(command: Sequence[str]) -> Iterator[dict[str, int]]:
    """Run a command to its end, and yield the peak memory in bytes of all its processes. Shared pages are divided among users."""
    peak = {"total": 0, "mapped": 0}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            total = mapped = 0
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, IndexError, ValueError):
                    if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[3]) == process.pid:  # of its session
                        fields = dict(line.split(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
                        total += int(fields["Pss"].split()[0]) * 1024
                        mapped += int(fields["Pss_File"].split()[0]) * 1024
            if total > peak["total"]:
                peak.update(total=total, mapped=mapped)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    ended.set()
    watcher.join()
    if code:
        raise subprocess.CalledProcessError(code, list(command))
    yield peak


def text_megabytes(path: Path) -> float:
    return sum(len(orjson.loads(line)["text"].encode()) for line in path.open("rb")) / 1e6


def first_lines(path: Path, num_bytes: int) -> Iterator[bytes]:
    for line in path.open("rb"):
        yield line
        num_bytes -= len(line)
        if num_bytes <= 0:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="JSON Lines with a field `text`")
    parser.add_argument("--datatrove", help="Python interpreter that has datatrove")
    parser.add_argument("--streaming", help="Python interpreter that has litdata and mosaicml-streaming")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=("tokens", "chain", "memory"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizers = train_both(options.text, folder)
        for name, compare in (("tokens", compare_tokens), ("chain", compare_chain), ("memory", measure_memory)):
            if options.only in (None, name):
                compare(options.text.resolve(), folder, tokenizers, options)


if __name__ == "__main__":
    main()

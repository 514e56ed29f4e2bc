"""Classifies chunks of source files of this machine by their language, with a decoder and with an encoder.

    python -m tests.benchmarks.classification [--encoder] [--folder FOLDER]

The files are those below /usr/include, /usr/lib, /usr/share and Python's own library. A chunk has about 400 characters. One file in
ten is held out: none of its chunks is in the data. The figures are the accuracy on the validation chunks, whose files may have
other chunks in training, and on the chunks of the held-out files, which `trainer classify` labels. `--encoder` builds a small
RoBERTa with random weights and a tokenizer that is trained on the texts, and needs the packages of env/requirements-models.lock.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.runs import ROOT, metrics

ENDINGS = {
    ".py": "python",
    ".c": "c",
    ".h": "c",
    ".js": "javascript",
    ".html": "html",
    ".css": "css",
    ".pl": "perl",
    ".pm": "perl",
    ".sh": "shell",
}
FOLDERS = ("/usr/include", "/usr/lib", "/usr/share", sysconfig.get_path("stdlib"))
CHUNK_CHARS = 400
MAX_FILE_BYTES = 400_000
CHUNKS_OF_A_FILE, CHUNKS_OF_A_LABEL = 12, 1500
FEWEST_CHUNKS = 100
"""A language with fewer chunks is left out."""


def source_files() -> Iterator[tuple[Path, str]]:
    """Yield files and their languages, in an order that mixes folders and depends on nothing but the paths."""
    found = {
        Path(folder, name): ENDINGS[ending]
        for top in FOLDERS
        for folder, _, names in os.walk(top)
        if "site-packages" not in folder
        for name in names
        if (ending := Path(name).suffix) in ENDINGS
    }
    yield from sorted(found.items(), key=lambda item: hashlib.sha256(str(item[0]).encode()).digest())


def chunks_of(path: Path) -> list[str]:
    """Return chunks of whole lines of a file, evenly spread; none for a file that is no text."""
    try:
        if path.is_symlink() or path.stat().st_size > MAX_FILE_BYTES:
            return []
        lines = path.read_text("utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return []
    chunks, chunk = [], ""
    for line in lines:
        chunk += line[:CHUNK_CHARS]
        if len(chunk) >= CHUNK_CHARS:
            chunks.append(chunk)
            chunk = ""
    return chunks[:: max(1, -(-len(chunks) // CHUNKS_OF_A_FILE))]


def collect(folder: Path) -> tuple[Path, Path, dict[str, int]]:
    """Write the chunks for the data, and those of the held-out files. Return both files, and the number of chunks by language."""
    texts: dict[str, list[tuple[str, bool]]] = {}
    for path, language in source_files():
        of_language = texts.setdefault(language, [])
        if len(of_language) < CHUNKS_OF_A_LABEL:
            held_out = hashlib.sha256(str(path).encode()).digest()[-1] < 26
            of_language += [(chunk, held_out) for chunk in chunks_of(path)]
    kept = {language: found for language, found in texts.items() if len(found) >= FEWEST_CHUNKS}
    files = folder / "chunks.jsonl", folder / "held-out.jsonl"
    for path, wanted in zip(files, (False, True), strict=True):
        lines = [
            json.dumps({"text": text, "label": language}) + "\n"
            for language, found in sorted(kept.items())
            for text, held_out in found
            if held_out is wanted
        ]
        path.write_text("".join(lines))
    return *files, {language: len(found) for language, found in sorted(kept.items())}


def make_encoder(folder: Path, texts: Sequence[str]) -> None:
    """Write a RoBERTa of two layers with random weights, and its tokenizer, as transformers saves them."""
    transformers = import_module("transformers")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=260,
    )
    transformers.RobertaModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def called(*words: str | Path, quiet: bool = False) -> tuple[str, float]:
    """Run a command of the project. Return its output and its seconds."""
    begin = time.monotonic()
    log = subprocess.DEVNULL if quiet else None
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, check=True
    )
    return done.stdout, time.monotonic() - begin


def accuracy_on(run: Path, held_out: Path) -> float:
    """Return the share of the held-out chunks whose label `trainer classify` predicts."""
    records = [json.loads(line) for line in held_out.read_text().splitlines()]
    output, _ = called("trainer", "classify", run, held_out, quiet=True)
    found = [json.loads(line)["label"] for line in output.splitlines()]
    return sum(label == record["label"] for label, record in zip(found, records, strict=True)) / len(records)


def measure(folder: Path, *, encoder: bool) -> None:
    """Prepare, train and measure, and print the figures."""
    chunks, held_out, counts = collect(folder)
    print(f"chunks by language: {counts}")
    data, run = folder / "data", folder / "run"
    to_prepare: list[str | Path] = ["--sources", chunks, "--output", data, "--recipe", "classify"]
    to_train: list[str | Path] = ["--data", data, "--run", run, "--recipe", "classify"]
    if encoder:
        (folder / "encoder").mkdir()
        make_encoder(folder / "encoder", [json.loads(line)["text"] for line in chunks.read_text().splitlines()])
        to_prepare += ["--tokenizer.path", folder / "encoder"]
        to_train += ["--encoder", folder / "encoder", "--optim.lr", "2e-3"]
    _, prepare_s = called("data_pipeline", "prepare", *to_prepare)
    _, train_s = called("trainer", "train", *to_train)
    last = metrics(run, "measures")[-1]["values"]
    print(f"prepare {prepare_s:.0f} s, train {train_s:.0f} s")
    print(f"validation chunks: accuracy {last['accuracy']:.4f}, macro F1 {last['f1_macro']:.4f}")
    print(f"held-out files:    accuracy {accuracy_on(run, held_out):.4f}")
    print(called("trainer", "evaluate", run, quiet=True)[0])


def main() -> None:
    """Measure in a temporary folder, or in the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", action="store_true", help="train a small encoder in place of the decoder")
    parser.add_argument("--folder", type=Path, help="an empty folder that keeps data and run")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        measure(options.folder, encoder=options.encoder)
        return
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), encoder=options.encoder)


if __name__ == "__main__":
    main()

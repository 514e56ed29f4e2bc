"""llama.cpp writes the same greedy text as the run, after its converter has read the exported directory.

LLAMA_CPP names the folder of its source, and LLAMA_SIMPLE its program `llama-simple`. docs/models.md says how to make it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare
from tests.support.exported import SAMPLE, tokenizer_of
from tests.support.runs import ROOT, tiny_config
from trainer.__main__ import main
from trainer.commands.saved_model import opened_text_model
from trainer.inference.sampling import Sampling
from trainer.loop import train

SHAPES: dict[str, dict[str, Any]] = {"qwen3": {}, "llama": {"qk_norm": False, "tie_embeddings": False}}
PROMPTS = ("def return", "  two  spaces\n\tand a tab", "na\u00efve, \u65e5\u672c I'm 1234 ===", "x > 111: 148 259 333")
TOKENS = 32


@pytest.fixture(scope="module")
def llama_cpp() -> tuple[Path, Path]:
    named = {name: os.environ.get(name) for name in ("LLAMA_CPP", "LLAMA_SIMPLE")}
    if missing := [name for name, value in named.items() if not value]:
        pytest.skip(f"{' and '.join(missing)} must name llama.cpp: its source folder, and its program llama-simple")
    return Path(str(named["LLAMA_CPP"])), Path(str(named["LLAMA_SIMPLE"]))


def write_data(folder: Path, kind: str) -> Path:
    (folder / "a.txt").write_text("\n\n".join(SAMPLE * 4), encoding="utf-8")
    tokenizer: dict[str, Any] = {"kind": kind, "vocab_size": 380}
    if kind == "byte-level":
        (folder / "tokenizer.json").write_bytes(tokenizer_of("huggingface").to_bytes())
        tokenizer = {"path": folder / "tokenizer.json"}
    settings: dict[str, Any] = {"text": {"documents": "paragraphs"}, "dedup": {"exact": False, "near": False}}
    sources, output = (str(folder / "a.txt"),), folder / "data"
    prepare(PrepareConfig(sources=sources, output=output, workers=1, row_length=64, tokenizer=tokenizer, **settings))
    return output


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bpe", "byte-level"])
def test_llama_cpp_writes_the_same_greedy_text(llama_cpp: tuple[Path, Path], tmp_path: Path, kind: str, shape: str) -> None:
    source, program = llama_cpp
    run, gguf = tmp_path / "run", tmp_path / "model.gguf"
    steps: dict[str, Any] = {"limits": {"steps": 60}, "schedule": {"decay_steps": 60}, "eval": {"sample_tokens": 0}}
    train(tiny_config(write_data(tmp_path, kind), run, model={"context": 256} | SHAPES[shape], **steps))
    main(["export", str(run), "--output", str(tmp_path / "hf")])
    script = str(ROOT / "examples/convert_to_gguf.py")
    converting = [sys.executable, script, str(source), str(tmp_path / "hf"), "--outtype", "f32", "--outfile", str(gguf)]
    converted = subprocess.run(converting, capture_output=True, text=True, check=False, timeout=300)
    assert converted.returncode == 0, converted.stderr
    with opened_text_model(run, "latest") as model:
        for prompt in PROMPTS:
            [written] = model.complete([prompt], Sampling(max_tokens=TOKENS, temperature=0.0))
            words = [str(program), "-m", str(gguf), "-n", str(TOKENS), "-ngl", "0", prompt]
            theirs = subprocess.run(words, capture_output=True, check=True, timeout=100).stdout
            first = "".join(token.name for token in model.tokenizer.named_tokens if token.id in model.tokenizer.first_ids)
            assert theirs.decode(errors="replace").rstrip("\n") == (first + prompt + written.text).rstrip("\n")

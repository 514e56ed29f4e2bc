"""Exports a trained run, and compares what other programs and the imported export compute with what the run computes.

    python -m tests.benchmarks.round_trip RUN [--prompts 100]

It needs the packages of env/requirements-models.lock. The prompts are cut from the validation rows of the run's data, and have 1 to
as many tokens as the model sees. The figures:

- the prompts whose 200 greedy tokens transformers continues in the same way, from the export
- the largest difference of a logit between the run and the run that was imported from the export (0 if all bits are equal)
- the largest difference of a logit between the run and ONNX Runtime
- the perplexity on the validation rows before and after compression
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows
from trainer.__main__ import main as trainer
from trainer.commands.saved_model import opened_text_model
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TextModel
from trainer.model.attention import make_layout
from trainer.runs.saved_run import SavedRun

GREEDY_TOKENS = 200


def prompts_of(run: Path, count: int, longest: int) -> list[list[int]]:
    """Return beginnings of validation rows, of 1 to `longest` tokens, evenly spread."""
    folder = SavedRun(run).data_folder(None)
    manifest = read_manifest(folder)
    rows = Rows(folder, manifest, "val")
    lengths = np.linspace(1, min(longest, manifest.row_length), count).round().astype(int)
    places = np.linspace(0, len(rows) - 1, count).astype(int)
    tokens_RL = rows.read(places).tokens_BL
    return [row_L[:length].tolist() for row_L, length in zip(tokens_RL, lengths, strict=True)]


@torch.no_grad()
def logits_of(model: TextModel, prompt: Sequence[int]) -> Tensor:
    """Return the logits of a run for each token of a prompt, fp32 (L, V)."""
    tokens_1L = torch.tensor([prompt])
    layout = make_layout(torch.zeros_like(tokens_1L), torch.arange(len(prompt))[None])
    logits_LV: Tensor = model.model(tokens_1L, layout)[0]
    return logits_LV


def logits_by_onnx(session: Any, prompt: Sequence[int]) -> Tensor:
    """Return the logits of ONNX Runtime for each token of a prompt, fp32 (L, V)."""
    tokens_1L = np.array([prompt])
    inputs = {"input_ids": tokens_1L, "attention_mask": np.ones_like(tokens_1L), "position_ids": np.arange(len(prompt))[None]}
    return torch.from_numpy(session.run(["logits"], inputs)[0][0])


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors."""
    return max(float((one - other).abs().max()) for one, other in zip(first, second, strict=True))


def same_greedy_tokens(model: TextModel, exported: Path, texts: Sequence[str], num_tokens: int = GREEDY_TOKENS) -> int:
    """Return how many texts transformers continues with the same greedy tokens as the run."""
    transformers = importlib.import_module("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    same = 0
    for text in texts:
        [written] = model.complete([text], Sampling(max_tokens=num_tokens, temperature=0.0))
        encoded = tokenizer(text, return_tensors="pt")
        new = theirs.generate(**encoded, max_new_tokens=num_tokens, do_sample=False)[0, encoded.input_ids.shape[1] :].tolist()
        ours = list(written.tokens)
        same += new[: len(ours)] == ours and new[len(ours) :] in ([], [tokenizer.eos_token_id])
    return same


def compressed_perplexity(run: Path, output: Path, method: str) -> tuple[float, float]:
    """Compress a run, and return the perplexity on its validation rows before and after."""
    found = json.loads(called("compress", run, "--method", method, "--output", output, "--json"))
    return found["before"]["perplexity"], found["after"]["perplexity"]


def called(*words: str | Path) -> str:
    """Run a command of the trainer in this process. Return what it wrote to stdout."""
    output = StringIO()
    with redirect_stdout(output):
        trainer([str(word) for word in words])
    return output.getvalue()


def measure(run: Path, folder: Path, count: int) -> None:
    """Export, import and compress a run, and print the figures."""
    called("export", run, "--output", folder / "hf")
    called("export", run, "--format", "onnx", "--output", folder / "onnx")
    called("import", folder / "hf", "--output", folder / "imported")
    session = importlib.import_module("onnxruntime").InferenceSession(str(folder / "onnx/model.onnx"))
    with opened_text_model(run, "latest") as ours, opened_text_model(folder / "imported", "latest") as imported:
        prompts = prompts_of(run, count, ours.context)
        texts = [ours.tokenizer.decode(prompt[:32]) for prompt in prompts[:: max(1, count // 10)]]
        logits, again = ([logits_of(model, prompt) for prompt in prompts] for model in (ours, imported))
        same = same_greedy_tokens(ours, folder / "hf", texts)
    by_onnx = [logits_by_onnx(session, prompt) for prompt in prompts]
    print(f"transformers   the same {GREEDY_TOKENS} greedy tokens for {same} of {len(texts)} prompts")
    equal = all(map(torch.equal, logits, again))
    print(f"imported back  logits {'bitwise equal' if equal else 'different'} for {count} prompts")
    largest = max(float(one.abs().max()) for one in logits)
    print(f"ONNX Runtime   logits differ by {largest_difference(logits, by_onnx):.1e} at most, at logits of up to {largest:.1f}")
    for method in ("int8", "int4"):
        before, after = compressed_perplexity(run, folder / method, method)
        print(f"{method}           perplexity {before:.3f} to {after:.3f} ({100 * (after / before - 1):+.2f} %)")


def main() -> None:
    """Measure a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a trained run whose data is there")
    parser.add_argument("--prompts", type=int, default=100, metavar="N", help="number of prompts for the logits [100]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(options.run, Path(name), options.prompts)


if __name__ == "__main__":
    main()

"""Labels of new texts, from a trained classifier.

B rows, one for each text   L tokens of the longest text   C labels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from data_pipeline.dataset.shards import RowBatch
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.config import TrainConfig
from trainer.data.batch import micro_batch
from trainer.finetuning.classification import LabelFacts, facts_in
from trainer.model.attention import Backend, choose_backend
from trainer.model.forward import CustomPass, LossModule, PassInputs, forward_pass

__all__ = ["TextClassifier"]


@dataclass(frozen=True)
class TextClassifier:
    """A trained classifier with everything that turns a text into its tokens as `prepare` did."""

    loss: LossModule
    config: TrainConfig
    device: torch.device
    backend: Backend
    facts: LabelFacts
    tokenizer: Tokenizer

    @staticmethod
    def of(run: Path, model: nn.Module, config: TrainConfig, device: torch.device, files: Mapping[str, bytes]) -> TextClassifier:
        """Return the classifier of a run.

        Args:
            run: directory of the run.
            model: its model, on `device`.
            config: its settings.
            device: of the computation.
            files: the files of its task.

        Raises:
            CheckpointError: `labels.json` is missing or damaged.
            PreparedDataError: the tokenizer of the run cannot be read.
        """
        backend = choose_backend(config.attention, device, config.number_format, config.model.head_size)
        loss = LossModule(model.eval(), config.loss)
        return TextClassifier(loss, config, device, backend, facts_in(files), load_tokenizer(run / "tokenizer"))

    @torch.no_grad()
    def probabilities(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """Return the probability of each label for each text. A text with more tokens than a row of the data is cut as there."""
        framed = self.tokenizer.frame(
            self.tokenizer.encode_flat(texts), add_bos=self.facts.add_bos, add_eos=self.facts.add_eos
        ).arrays()
        most = self.facts.row_length
        ids = [array if len(array) <= most else np.concatenate([array[: most - 1], array[-1:]]) for array in framed]
        length = max(2, *map(len, ids))
        tokens_BL = np.full((len(ids), length), self.tokenizer.pad_id, np.uint32)
        segments_BL = np.full(tokens_BL.shape, -1, np.int32)
        for row, array in enumerate(ids):
            tokens_BL[row, : len(array)] = array
            segments_BL[row, : len(array)] = 0
        rows = micro_batch(RowBatch(tokens_BL, segments_BL), with_bounds=self.backend == "varlen")
        logits_BLC = forward_pass(self.loss, rows, self.config, self.device, self.backend, custom=CustomPass(_logits))
        lasts = torch.tensor([max(len(array), 1) - 1 for array in ids], device=self.device)
        shares_BC = logits_BLC[torch.arange(len(ids), device=self.device), lasts].float().softmax(-1).cpu()
        return [dict(zip(self.facts.names, shares_C, strict=True)) for shares_C in shares_BC.tolist()]


def _logits(model: nn.Module, inputs: PassInputs) -> Tensor:
    logits_BLC: Tensor = model(inputs.tokens, inputs.layout)
    return logits_BLC

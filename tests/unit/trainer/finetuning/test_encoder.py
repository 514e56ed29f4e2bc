"""The documents of packed rows as a batch for an encoder, and the files that stand for an encoder."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from trainer.finetuning import encoder
from trainer.finetuning.encoder import Encoder, EncoderClassifier, by_length
from trainer.model.attention import make_layout

PAD = 9


class Counting(nn.Module):
    """Stands for an encoder: the state of a token is its embedding plus the sum of the ids of its document."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        total = (input_ids * attention_mask).sum(dim=1)[:, None, None]
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids) + total)


def classifier(pooling: Any = "mean") -> EncoderClassifier:
    torch.manual_seed(0)
    return EncoderClassifier(Counting(), 4, 3, pooling, PAD)


def logits_of(model: EncoderClassifier, rows: list[list[list[int]]], length: int) -> Tensor:
    """Return the logits of rows of documents, which are filled with padding."""
    tokens_BL = torch.full((len(rows), length), PAD)
    segments_BL = torch.full((len(rows), length), -1, dtype=torch.int32)
    positions_BL = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, documents in enumerate(rows):
        place = 0
        for number, document in enumerate(documents):
            end = place + len(document)
            tokens_BL[row, place:end] = torch.tensor(document)
            segments_BL[row, place:end] = number
            positions_BL[row, place:end] = torch.arange(len(document))
            place = end
        positions_BL[row, place:] = torch.arange(length - place)
    logits: Tensor = model(tokens_BL, make_layout(segments_BL, positions_BL))
    return logits


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_document_has_the_same_logits_alone_and_among_others(pooling: str) -> None:
    model = classifier(pooling)
    together = logits_of(model, [[[1, 2, 3], [4, 5]], [[6]]], 6)
    alone = logits_of(model, [[[4, 5]]], 2)
    torch.testing.assert_close(together[0, 4], alone[0, 1])
    torch.testing.assert_close(together[1, 0], logits_of(model, [[[6]]], 1)[0, 0])
    # documents of similar length share a batch, padded to its longest one, without the padding of the rows
    assert model.encoder.shapes[:2] == [(2, 3), (1, 1)]
    assert not together[0, [0, 1, 3, 5]].any()


def test_each_document_is_in_one_batch_with_documents_of_similar_length() -> None:
    lengths = [7, 100, 3, 60, 67, 99, 66, 100, 1]
    batches = by_length(lengths)
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    assert [[lengths[number] for number in batch] for batch in batches] == [[100, 100, 99, 67], [66, 60], [7], [3], [1]]
    assert batches[0][:2] == [1, 7]  # documents of equal length stay in their order


def test_a_micro_batch_of_padding_gives_every_weight_a_gradient_of_zero() -> None:
    model = classifier()
    (logits_of(model, [[], []], 4) * 0).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": None}, "no JSON object with model_type"),
        ({"is_decoder": True}, "an encoder is needed"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but -1 to"),
        ({"num_hidden_layers": 5000}, "1 to 512 layers"),
        ({"hidden_size": -5}, "hidden_size is -5, but -1 to"),
        ({"pad_token_id": -101}, "pad_token_id is -101, but -100 to"),
        ({"hidden_size": 10**400}, "hidden_size is"),
    ],
)
def test_a_configuration_that_no_encoder_has_is_refused(change: dict[str, Any], words: str) -> None:
    content = json.dumps({"model_type": "roberta", "num_hidden_layers": 2} | change).encode()
    with pytest.raises(CheckpointError, match=words):
        encoder._facts(content, CheckpointError)


@pytest.mark.parametrize(
    "fields",
    [
        {"sparse_pred_ignore_index": -100, "norm_eps": 1e-5},  # ModernBERT
        {"layer_norm_eps": 1e-12, "type_vocab_size": 2},  # BERT
        {"max_relative_positions": -1, "layer_norm_eps": 1e-7},  # DeBERTa-v2
        {"eos_token_id": -1, "ignore_index": -100},
    ],
)
def test_values_of_published_configurations_are_accepted(fields: dict[str, Any]) -> None:
    facts = {"model_type": "modernbert", "num_hidden_layers": 2} | fields
    assert encoder._facts(json.dumps(facts | {"model_max_length": 10**30}).encode(), ConfigError) == facts


def test_code_that_a_configuration_names_is_left_out() -> None:
    content = json.dumps({"model_type": "roberta", "auto_map": {"AutoModel": "code.Model"}}).encode()
    assert encoder._facts(content, CheckpointError) == {"model_type": "roberta"}


def test_names_of_tensors_lose_the_prefix_of_a_model_with_another_head() -> None:
    wanted = {"embeddings.LayerNorm.weight", "encoder.layer.0.output.dense.weight"}
    assert encoder._plain_name("bert.embeddings.LayerNorm.gamma", wanted) == "embeddings.LayerNorm.weight"
    assert encoder._plain_name("encoder.layer.0.output.dense.weight", wanted) == "encoder.layer.0.output.dense.weight"
    assert encoder._plain_name("lm_head.bias", wanted) == "lm_head.bias"


def test_a_missing_package_gives_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        if name == "transformers":
            raise ImportError
        return import_module(name)

    monkeypatch.setattr(encoder.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=r"pip install --no-deps --require-hashes -r env/requirements-models\.lock"):
        Encoder({"encoder.json": b'{"model_type": "roberta"}'}, 2, "mean", None).build(0)

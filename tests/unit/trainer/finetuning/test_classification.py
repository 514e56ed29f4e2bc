"""The loss, the measures and the files of a classification."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from common.errors import CheckpointError
from common.files import canonical_json
from tests.support.runs import tiny_config
from trainer.config import ClassificationConfig, LossConfig, ModelConfig, TrainConfig
from trainer.data.batch import IGNORE
from trainer.finetuning import classification
from trainer.finetuning.classification import LABELS_FILE, LabelFacts
from trainer.model.attention import make_layout
from trainer.model.parameters import parameters_by_name

FACTS = LabelFacts(names=["a", "b", "c"], documents=[6, 3, 0], add_bos=True, add_eos=True, row_length=8)
MODEL = ModelConfig(layers=2, width=32, heads=4, context=8)


def settings(**changes: Any) -> TrainConfig:
    return cast(TrainConfig, SimpleNamespace(classification=ClassificationConfig(**changes)))


def test_balanced_weights_have_the_mean_one_over_the_documents_and_leave_out_labels_without_documents() -> None:
    weights_C = classification.class_weights(settings(class_weights="balanced"), FACTS)
    assert weights_C is not None
    assert weights_C.tolist() == [0.5, 1.0, 0.0]
    assert classification.class_weights(settings(), FACTS) is None
    given = classification.class_weights(settings(class_weights="list", weights=(1, 2, 3)), FACTS)
    assert given is not None
    assert given.tolist() == [1, 2, 3]


def test_the_loss_of_a_document_counts_by_the_weight_of_its_label() -> None:
    logits_BLC = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets_BL = torch.tensor([[IGNORE, 0, 2], [1, IGNORE, IGNORE]])
    smooth = LossConfig(label_smoothing=0.1)
    loss_sum = classification.weighted_loss(torch.tensor([0.5, 2.0, 3.0]), smooth)(logits_BLC, targets_BL, None)
    each = [
        weight * torch.nn.functional.cross_entropy(logits_BLC[place], torch.tensor(label), label_smoothing=0.1)
        for place, label, weight in (((0, 1), 0, 0.5), ((0, 2), 2, 3.0), ((1, 0), 1, 2.0))
    ]
    torch.testing.assert_close(loss_sum, torch.stack(each).sum())


def test_measures_are_those_of_the_definitions() -> None:
    table = np.array([[3, 1, 0], [2, 4, 0], [0, 0, 0]])
    event = classification.measured(7, table, ["a", "b", "c"])
    assert event.values["accuracy"] == 0.7
    assert event.values["precision/a"] == 0.6
    assert event.values["recall/a"] == 0.75
    assert event.values["f1/a"] == pytest.approx(2 * 0.6 * 0.75 / (0.6 + 0.75))
    assert event.values["f1/c"] == 0
    assert event.values["f1_macro"] == pytest.approx((event.values["f1/a"] + event.values["f1/b"]) / 2)
    assert event.confusion == {"a": {"a": 3, "b": 1}, "b": {"a": 2, "b": 4}}
    text = classification.describe(event)
    assert text.startswith("accuracy 0.7000  macro F1 ")
    assert "b         0.8000  0.6667  0.7273          6  a 2" in text


def test_a_confusion_counts_true_by_predicted_labels() -> None:
    counts = classification.confusion(np.array([[0], [1], [1]], np.float32), np.array([0, 0, 2]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert classification.confusion(np.empty((0, 0), np.float32), np.empty(0, np.int64), 3).shape == (3, 3)


def test_the_number_of_weights_is_known_without_the_model() -> None:
    for tied in (True, False):
        config = MODEL.model_copy(update={"tie_embeddings": tied})
        model = classification.decoder_classifier(config, 300, 1, 3)
        counted = sum(parameter.numel() for parameter in model.parameters())
        assert counted == classification.num_classifier_weights(config, 300, 3)


def test_the_same_seed_gives_the_same_classifier_and_the_head_is_what_the_decoder_lacks() -> None:
    first, again, other = (classification.decoder_classifier(MODEL, 300, seed, 3) for seed in (1, 1, 2))
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)
    assert {name for name in parameters_by_name(first) if not name.startswith("model.")} == {"head.weight", "head.bias"}


def test_the_score_of_a_document_depends_on_its_own_tokens_alone() -> None:
    model = classification.decoder_classifier(MODEL, 300, 1, 3).eval()
    tokens_BL = torch.tensor([[5, 6, 7, 8, 9, 10]])
    together = model(tokens_BL, make_layout(torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1, 2]])))
    changed = model(
        torch.tensor([[1, 2, 3, 8, 9, 10]]), make_layout(torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1, 2]]))
    )
    torch.testing.assert_close(together[0, 5], changed[0, 5])
    assert not torch.allclose(together[0, 2], changed[0, 2])


@pytest.mark.parametrize(
    "change",
    [{"names": ["b", "a"]}, {"names": ["a"]}, {"documents": [1]}, {"row_length": 1}, {"names": ["a", "b", 3]}],
)
def test_labels_that_no_run_has_written_are_refused(change: dict[str, Any]) -> None:
    good = FACTS.model_dump()
    assert classification.facts_in({LABELS_FILE: canonical_json(good)}) == FACTS
    with pytest.raises(CheckpointError, match=r"labels\.json of the run was changed"):
        classification.facts_in({LABELS_FILE: canonical_json(good | change)})
    with pytest.raises(CheckpointError, match="is missing"):
        classification.facts_in({})


def test_plain_cross_entropy_can_be_compared_with_the_validation_loss_and_a_weighted_one_cannot(tmp_path: Any) -> None:
    files = {LABELS_FILE: canonical_json(FACTS.model_dump())}
    config = tiny_config(tmp_path / "d", tmp_path / "r", objective="classification")
    weighted = tiny_config(tmp_path / "d", tmp_path / "r", objective="classification", classification={"class_weights": "balanced"})
    assert classification.make(config, files).comparable
    assert not classification.make(weighted, files).comparable

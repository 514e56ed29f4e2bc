from __future__ import annotations

import pytest
import torch

from trainer.checkpoint.async_saver import Staging

GROUPS = {
    "model": {"matrix": torch.ones(3, 5), "empty": torch.ones(0, 4), "number": torch.ones(())},
    "optimizer": {"matrix/step": torch.ones((), dtype=torch.int64), "matrix/exp_avg": torch.ones(3, 5, dtype=torch.bfloat16)},
}


def test_each_tensor_has_memory_of_its_shape_and_type_that_no_other_one_uses() -> None:
    staging = Staging(GROUPS)
    places = {(group, name): place for group, tensors in GROUPS.items() for name in tensors for place in [staging.of(group)[name]]}
    for number, place in enumerate(places.values()):
        place.fill_(number)
    for number, ((group, name), place) in enumerate(places.items()):
        like = GROUPS[group][name]
        assert (place.shape, place.dtype, place.is_contiguous()) == (like.shape, like.dtype, True)
        assert (place == number).all()


def test_later_saves_use_the_memory_of_the_first() -> None:
    staging = Staging(GROUPS)
    assert staging.of("model")["matrix"].data_ptr() == staging.of("model")["matrix"].data_ptr()


def test_a_group_without_tensors_has_no_memory() -> None:
    assert Staging(GROUPS).of("average") == {}
    assert Staging({}).of("model") == {}


def test_a_save_reports_that_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "empty", exhausted)
    staging = Staging(GROUPS)
    with pytest.raises(MemoryError):
        staging.of("model")

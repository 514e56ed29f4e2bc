"""The rule of the recipe `auto`: always usable settings, larger models for more text and time, and given settings that win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import PreparedDataError
from common.settings.load import load_settings
from common.settings.options import help_parser
from tests.support.prepared import write_prepared
from trainer.config import TrainConfig
from trainer.runs.defaults import SHAPES, Facts, choose, chosen, tokens_per_weight

TEXTS = st.integers(0, 10**13)
FACTS = st.builds(
    Facts,
    num_tokens=TEXTS,
    row_length=st.sampled_from([8, 128, 256, 1000, 4096]),
    vocab_size=st.integers(260, 200_000),
    num_gpus=st.sampled_from([0, 1, 3, 8, 64]),
    num_cores=st.integers(1, 512),
    num_ranks=st.sampled_from([1, 2, 3, 4, 7, 8, 64]),
)
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "limits.minutes": st.floats(0.01, 1e5),
        "limits.epochs": st.floats(0.01, 100),
        "limits.steps": st.integers(1, 10**7),
        "limits.tokens": st.integers(1, 10**12),
        "model.layers": st.integers(1, 100),
        "model.width": st.sampled_from([64, 96, 768, 1000]),
        "batch.global_batch_size": st.sampled_from([64, 448, 1344]),
        "parallel": st.sampled_from(["ddp", "fsdp"]),
        "optim.kind": st.sampled_from(["adamw", "muon"]),
    },
)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, leaf = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[leaf] = value
    return values


@given(FACTS, GIVEN)
@example(Facts(10**6, 256, 1000, num_gpus=0, num_cores=3, num_ranks=3), {"batch.global_batch_size": 64})
def test_the_settings_are_always_valid_and_divide_over_the_ranks(facts: Facts, settings: dict[str, Any]) -> None:
    chosen = choose(facts, settings)
    assert not chosen.keys() & settings.keys()
    config = TrainConfig(data=Path("data"), run=Path("run"), **nested(chosen | settings))
    assert config.model.context == facts.row_length
    if "batch.global_batch_size" not in settings:
        assert config.batch.global_batch_size % facts.num_ranks == 0
        if config.batch.micro_batch_size != "auto":
            assert config.batch.global_batch_size % (facts.num_ranks * config.batch.micro_batch_size) == 0
    assert config.eval.every_steps == config.checkpoint.every_steps


@given(FACTS, TEXTS, st.floats(0.1, 1e4), st.floats(0.1, 1e4))
def test_more_text_or_more_time_never_gives_a_smaller_model(facts: Facts, text: int, minutes: float, other: float) -> None:
    def size(num_tokens: int, limit: float) -> int:
        known = Facts(num_tokens, facts.row_length, facts.vocab_size, facts.num_gpus, facts.num_cores, facts.num_ranks)
        chosen = choose(known, {"limits.minutes": limit})
        return SHAPES.index((chosen["model.layers"], chosen["model.width"], chosen["model.heads"]))

    low, high = sorted((minutes, other))
    assert size(facts.num_tokens, low) <= size(facts.num_tokens, high)
    less, more = sorted((facts.num_tokens, text))
    assert size(less, minutes) <= size(more, minutes)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, {"limits.minutes": 10.0, "limits.epochs": 8.0}),
        ({"limits.minutes": 3}, {"limits.epochs": 8.0}),
        ({"limits.steps": 3}, {}),
        ({"limits.tokens": 300, "limits.minutes": 3}, {}),
        ({"limits.minutes": None}, {"limits.epochs": 8.0}),
    ],
)
def test_a_run_without_a_limit_ends_after_ten_minutes_and_a_run_limited_in_time_after_eight_epochs(
    limits: dict[str, Any], expected: dict[str, Any]
) -> None:
    chosen = choose(Facts(10**6, 256, 4096, 0, 2, 1), limits)
    assert {name: value for name, value in chosen.items() if name.startswith("limits.")} == expected


def test_steps_that_are_given_decide_about_evaluations_saves_and_warm_up() -> None:
    chosen = choose(Facts(10**9, 256, 4096, 0, 2, 1), {"limits.steps": 400})
    assert (chosen["eval.every_steps"], chosen["checkpoint.every_steps"], chosen["schedule.warmup_steps"]) == (40, 40, 20)


def test_a_schedule_that_is_given_gets_no_settings_of_another() -> None:
    chosen = choose(Facts(10**9, 256, 4096, 0, 2, 1), {"schedule.kind": "cosine"})
    assert not {"schedule.decay_share", "schedule.min_lr_ratio"} & chosen.keys()


def test_muon_is_not_chosen_where_it_cannot_work() -> None:
    assert choose(Facts(10**9, 256, 4096, 8, 8, 8), {"lora.rank": 8})["optim.kind"] == "adamw"
    assert "optim.muon_lr" not in choose(Facts(10**9, 256, 4096, 8, 8, 8), {"optim.kind": "adamw"})


def test_small_models_need_fewer_tokens_for_each_weight() -> None:
    assert [tokens_per_weight(size) for size in (10**6, 10**7, 10**8)] == [1, 4, 20]


def load(*words: str) -> TrainConfig:
    return load_settings(TrainConfig, words, help_parser(TrainConfig, "train", ""), {})


def test_the_recipe_is_for_the_data_and_settings_on_the_command_line_win(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    config = load(
        "--recipe", "auto", "--data", str(data), "--run", str(tmp_path / "run"), "--model.width", "80", "--optim.lr", "1e-4"
    )
    assert (config.recipe, config.model.width, config.optim.lr) == ("auto", 80, 1e-4)
    assert config.model.context == 32
    assert config.limits.minutes == 10


def test_a_value_that_cannot_be_meant_is_refused_as_ever(tmp_path: Path) -> None:
    data = write_prepared(tmp_path / "data")
    for name, value in (("model.width", "wide"), ("limits.steps", "-3"), ("model.layers", "0"), ("batch.micro_batch_size", "0")):
        with pytest.raises(Exception, match=rf"{name} = '?{value}"):
            load("--recipe", "auto", "--data", str(data), "--run", str(tmp_path / "run"), f"--{name}", value)


def test_without_data_there_is_nothing_to_chosen_and_data_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="data is not set"):
        load("--recipe", "auto", "--run", str(tmp_path / "run"))
    with pytest.raises(PreparedDataError, match="holds no finished prepared data"):
        load("--recipe", "auto", "--data", str(tmp_path / "none"), "--run", str(tmp_path / "run"))


def test_a_run_that_exists_keeps_what_was_chosen_for_it(tmp_path: Path) -> None:
    data, run = write_prepared(tmp_path / "data"), tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(
        f'[train]\nrecipe = "auto"\ndata = "{data}"\n[train.model]\nwidth = 300\n[train.limits]\nsteps = 7\n'
    )
    config = load("--recipe", "auto", "--data", str(data), "--run", str(run), "--limits.steps", "9")
    assert (config.model.width, config.limits.steps, config.limits.minutes) == (300, 9, None)


@pytest.mark.parametrize(
    ("variables", "rows"),
    [
        ({}, 8),
        ({"CPU_RANKS": "3"}, 9),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "CPU_RANKS": "3"}, 16),
        ({"PET_NPROC_PER_NODE": "4", "PET_NNODES": "3"}, 12),
        ({"PET_NPROC_PER_NODE": "auto"}, 8),
    ],
)
def test_rows_divide_over_the_ranks_that_the_variables_announce(tmp_path: Path, variables: dict[str, str], rows: int) -> None:
    given = {"data": str(write_prepared(tmp_path / "data", row_length=256)), "limits.steps": "10", "device": "cpu"}
    assert chosen(given, variables)["batch.global_batch_size"] == rows

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.paths import RECIPES
from common.settings.dotted import parse_toml, to_toml
from common.settings.load import load_settings
from common.settings.options import help_parser
from trainer.config import BatchConfig, ModelConfig, PlanConfig, TrainConfig

PARSER = help_parser(TrainConfig, "train", "")


def load(arguments: str) -> TrainConfig:
    return load_settings(TrainConfig, f"--data d --run r {arguments}".split(), PARSER, {})


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_every_recipe_is_complete_and_valid(recipe: str) -> None:
    assert load(f"--recipe {recipe}").recipe == recipe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no limit is set; give limits.steps"),
        ("--limits.minutes 5", "schedule.kind = cosine needs a number of steps, and limits.minutes gives none"),
        (
            "--limits.minutes 5 --schedule.kind wsd --schedule.weight_decay linear",
            "schedule.weight_decay = linear needs a number of steps",
        ),
        ("--limits.steps 5 --schedule.decay_steps 0", "schedule.kind = cosine needs a length, but schedule.decay_steps = 0"),
        ("--limits.steps 5 --branch.step 3", "name the run with branch.run"),
        ("--limits.steps 5 --model.width 100 --model.heads 3", "model.width = 100 is not a multiple of model.heads = 3"),
        ("--limits.steps 5 --model.heads 6 --model.kv_heads 4", "model.kv_heads = 4 must divide model.heads = 6"),
        ("--limits.steps 5 --model.head_dim 5", "cannot be rotated in pairs"),
        (
            "--limits.steps 5 --batch.global_batch_size 30 --batch.micro_batch_size 8",
            "not a multiple of batch.micro_batch_size = 8; use 32, or change",
        ),
        ("--limits.steps 5 --lora.rank 8 --optim.kind muon", "lora.rank trains adapters, which need AdamW"),
        ("--limits.steps 5 --lora.rank 8 --precision float8", "lora.rank does not work with precision = float8"),
        (
            "--limits.steps 5 --lora.rank 8 --lora.targets lm_head",
            "^lora.targets = 'lm_head': input should be [^;]* or 'down_proj'$",
        ),
        ("--limits.steps 5 --reproducibility always", "input should be 'off', 'run' or 'elastic'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(arguments)


def test_sizes_that_are_not_set_follow_from_the_others() -> None:
    config = ModelConfig(width=384, heads=6)
    assert (config.head_size, config.num_kv_heads, config.mlp_size) == (64, 6, 1024)
    assert BatchConfig(global_batch_size=32, micro_batch_size=8).micro_batches == 4


def test_paths_are_kept_as_given() -> None:
    assert load("--limits.steps 1").run == Path("r")


@pytest.mark.parametrize(
    ("arguments", "micro"),
    [
        ("", 8),
        ("--batch.global_batch_size 4", 4),
        ("--batch.global_batch_size 12", 6),
        ("--batch.global_batch_size 7", 7),
        ("--batch.global_batch_size 11", 1),
        ("--batch.global_batch_size 64", 8),
        ("--recipe smoke --batch.global_batch_size 2", 2),
        ("--recipe smoke --batch.global_batch_size 6", 3),
        ("--recipe gpt2-124m --batch.global_batch_size 96", 48),
    ],
)
def test_a_micro_batch_that_nobody_has_set_shrinks_to_a_divisor_of_the_global_batch(arguments: str, micro: int) -> None:
    assert load(f"--limits.steps 5 {arguments}").batch.micro_batch_size == micro


def test_a_micro_batch_of_the_users_own_recipe_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[train.batch]\nmicro = 4\n[train.limits]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"batch.global_batch_size = 6 is not a multiple of batch.micro_batch_size = 4"):
        load(f"--recipe {recipe} --batch.global_batch_size 6")


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_the_micro_batch_of_a_recipe_is_the_one_in_its_file(recipe: str) -> None:
    written = parse_toml((RECIPES / f"{recipe}.toml").read_bytes())["train"]["batch"]
    assert {"global_batch_size": 32, "micro_batch_size": 8} | written == load(f"--recipe {recipe}").batch.model_dump()


def test_a_command_that_adds_only_the_data_to_a_run_continues_it_with_its_settings(tmp_path: Path) -> None:
    config = load("--limits.steps 7 --model.width 96")
    (tmp_path / "config.toml").write_text(to_toml("train", config.model_dump(mode="json")))
    words = ["--run", str(tmp_path), "--data", "elsewhere"]
    assert load_settings(TrainConfig, words, PARSER, {}) == config.model_copy(update={"run": tmp_path, "data": Path("elsewhere")})
    with pytest.raises(ConfigError, match="no limit is set"):
        load_settings(TrainConfig, [*words, "--model.width", "96"], PARSER, {})


def test_a_plan_needs_no_run() -> None:
    words = ["--data", "d", "--limits.steps", "5"]
    assert load_settings(PlanConfig, words, help_parser(PlanConfig, "plan", ""), {}).data == Path("d")

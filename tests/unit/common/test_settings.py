import argparse
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from common.command_line import Command
from common.errors import ConfigError
from common.settings.command import loaded, run_listed
from common.settings.dotted import to_toml
from common.settings.load import load_options, load_settings
from common.settings.model import (
    Options,
    Place,
    Section,
    Settings,
    environment_names,
    frequent_settings,
    is_list,
    place_of,
    set_names,
    setting_names,
    spelling,
)
from common.settings.options import help_parser
from data_pipeline.commands.table import COMMANDS as OF_DATA
from data_pipeline.config import PrepareConfig
from tests.support.terminals import terminal_as
from trainer.config import TrainConfig
from trainer.launch.command import COMMANDS as OF_TRAINER


class Optim(Section):
    lr: float = Field(1e-3, gt=0, le=1, description="peak learning rate")
    clip: float = Field(1.0, gt=0, description="longest gradient; 1e9: any")


class Group(Section):
    files: tuple[str, ...] = Field(min_length=1, description="files")
    most: int | None = Field(5, description="most")


class Config(Settings):
    environment_prefix: ClassVar[str] = "DEMO_"
    recipe_table: ClassVar[str] = "train"
    recipe: str | None = Field(None, description="recipe")
    data: Path = Field(description="data")
    sources: tuple[str, ...] = Field((), description="sources")
    saving: Literal["none", "full"] = Field("full", description="saving")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="precision")
    every: int | None = Field(None, ge=1, description="every")
    minutes: float | None = Field(None, gt=0, description="minutes")
    shares: tuple[Annotated[float, Field(le=1)], Annotated[float, Field(le=1)]] = Field((0.5, 0.25), description="shares")
    optim: Optim = Field(Optim(), description="optimizer")
    group: dict[str, Group] = Field(default_factory=dict, description="groups")
    weights: dict[str, float] = Field(default_factory=dict, description="weights")


ROOT = Path(__file__).resolve().parents[3]
PARSER = help_parser(Config, "demo", "A demonstration.")


def load(arguments: str = "--data x", **environment: str) -> Config:
    return load_settings(Config, arguments.split(), PARSER, environment)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nevery = 7\n[train.optim]\nlr = 0.5\n[prepare]\nrow_length = 3\n")
    return path


def test_each_layer_overrides_the_ones_below(recipe: Path) -> None:
    assert load().optim.lr == 1e-3
    assert load(f"--data x --recipe {recipe}").optim.lr == 0.5
    assert load(f"--data x --recipe {recipe}", DEMO_OPTIM__LR="0.25").optim.lr == 0.25
    assert load(f"--data x --recipe {recipe} --optim.lr 0.125", DEMO_OPTIM__LR="0.25").optim.lr == 0.125


def test_the_recipe_can_be_named_in_the_environment(recipe: Path) -> None:
    assert load(DEMO_RECIPE=str(recipe)).every == 7


def test_none_unsets_a_value(recipe: Path) -> None:
    assert load(f"--data x --recipe {recipe} --every none").every is None
    assert load(f"--data x --recipe {recipe}", DEMO_EVERY="none").every is None


def test_none_is_a_plain_word_where_it_is_among_the_choices() -> None:
    assert load("--data x --saving none").saving == "none"
    assert load(DEMO_SAVING="none").saving == "none"


def test_a_recipe_says_none_with_the_word(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    path.write_text('[train]\nevery = "none"\nsaving = "none"\ngroup.a = { files = ["none"], most = "none" }\nweights.none = 1\n')
    loaded = load(f"--data x --recipe {path}", DEMO_OPTIM__LR="0.5")
    assert (loaded.every, loaded.saving, loaded.weights) == (None, "none", {"none": 1})
    assert loaded.group == {"a": Group(files=("none",), most=None)}
    path.write_text('[train.optim]\nlr = "none"\n')
    with pytest.raises(ConfigError, match=r"optim\.lr = 'none': input should be a valid number"):
        load(f"--data x --recipe {path}")


def test_an_empty_variable_is_as_good_as_none() -> None:
    """Compose passes `NAME=` for a variable that the host does not set."""
    assert load(DEMO_OPTIM__LR="").optim.lr == 1e-3


def test_lists_are_several_words_or_a_json_list() -> None:
    assert load("--data x --sources a b,c").sources == ("a", "b,c")
    assert load(DEMO_SOURCES='["a", "b c"]').sources == ("a", "b c")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ("--data x --optm.lr 1", {}, "--optm.lr 1; did you mean --optim.lr"),
        ("--data x --optim.lr three", {}, r"optim.lr = 'three': input should be a valid number$"),
        ("--data x --optim.lr 3", {}, r"optim.lr = '3': input should be less than or equal to 1"),
        ("--data x", {"DEMO_OPTIM__RL": "1"}, "DEMO_OPTIM__RL is not a setting; did you mean DEMO_OPTIM__LR"),
        ("--data x", {"DEMO_SOURCES": "a b"}, "is not a JSON list; write for example"),
        ("--data x", {"DEMO_PRECISION": "fp8"}, "precision = 'fp8': input should be 'fp32' or 'bf16'"),
        ("", {}, "data is not set; give --data or DEMO_DATA"),
        ("--data x --recipe nowhere", {}, "recipe 'nowhere': no file .* the recipes are .*smoke"),
        ("--data", {}, "expected one argument"),
        ("--data x --optim.clip inf", {}, r"optim.clip = 'inf': .* a finite number \(longest gradient; 1e9: any\)$"),
        ("--data x", {"DEMO_MINUTES": "-inf"}, r"minutes = '-inf': .* a finite number or none \(minutes\)$"),
        ("--data x --optim.lr nan", {}, "optim.lr = 'nan': input should be a finite number"),
        ("--data caf\udce9", {}, r"command line: 'caf\\udce9' is no UTF-8 text"),
        ("", {"DEMO_DATA": "caf\udce9"}, r"environment: 'caf\\udce9' is no UTF-8 text"),
        ("--weights.a 1", {}, r"--weights.a: only a recipe can hold it: \[train.weights\]$"),
        ("--group.a.files=x", {}, r"only a recipe can hold it: \[train.group\]$"),
        ("--data x", {"DEMO_WEIGHTS__A": "1"}, r"DEMO_WEIGHTS__A: only a recipe can hold it: \[train.weights\]$"),
    ],
)
def test_a_mistake_is_answered_with_its_name_and_the_remedy(arguments: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(arguments, **environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train.optim]\nlearning = 1", "train.optim.learning is not a setting"),
        ("optim = 1", "unknown table"),
        ("[train]\noptim = 1", "train.optim is not a setting"),
        ("[train]\nevry = 1", "train.evry is not a setting; did you mean every"),
        ("[trian]\nevery = 1", r"unknown table \[trian\]; did you mean train"),
        ("every = ", "not valid TOML"),
        ("train = 5", r"train = 5 is not a table; write \[train\] and its settings below"),
        ("prepare = []", r"prepare = \[\] is not a table"),
    ],
)
def test_a_mistake_in_a_recipe_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(f"--data x --recipe {path}")
    assert str(path) in str(caught.value)


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"recipe '{tmp_path}/': {tmp_path} is a directory; .*name a .toml file"):
        load(f"--data x --recipe {tmp_path}/")


def test_a_recipe_is_utf8_whatever_the_locale_says(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes('[train]\ndata = "Ä中"\n'.encode())
    program = f"from tests.unit.common.test_settings import load\nprint(ascii(load('--recipe {tmp_path}/mine.toml').data.name))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | locale, capture_output=True, text=True, check=False
    )
    assert done.stdout == "'\\xc4\\u4e2d'\n", done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("group.a = { mist = 3 }", r"group.a.mist is not a setting; did you mean group.a.most\?"),
        ("group.a = { most = 3 }", "group.a.files is not set; give it in the recipe$"),
        ("group.a = 3", "group.a: input should be a valid dictionary"),
        ("shares = [0.5]", r"^shares = \[0.5\]: too few values$"),
        ("shares = []", r"^shares = \[\]: too few values$"),
        ("weights.a = inf", r"^weights.a = inf: input should be a finite number$"),
        ("weights.a = nan", r"^weights.a = nan: input should be a finite number$"),
    ],
)
def test_a_mistake_in_a_table_of_the_users_or_in_a_list_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f"[train]\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        load(f"--data x --recipe {path}")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
TABLES = st.recursive(
    st.dictionaries(TEXTS, st.integers(-9, 9) | st.booleans() | TEXTS | st.lists(TEXTS)),
    lambda inner: st.dictionaries(TEXTS, inner | TEXTS),
    max_leaves=5,
)


@given(TABLES)
def test_any_name_and_text_is_read_back_from_toml(values: dict[str, object]) -> None:
    assert tomllib.loads(to_toml("train", values)) == {"train": values}


@pytest.mark.parametrize(
    ("value", "toml"), [("Ä 中 😀", '"Ä 中 😀"'), ("\x7f\u202e", r'"\u007f\u202e"'), ("\U000e0041", r'"\U000e0041"')]
)
def test_toml_shows_what_can_be_seen_and_escapes_the_rest(value: str, toml: str) -> None:
    assert to_toml("a", {value: 1, "bare_Key-1": value}) == f"[a]\n{toml} = 1\nbare_Key-1 = {toml}\n"
    assert to_toml("a", {value: {}}) == f"[a]\n\n[a.{toml}]\n"


def test_settings_written_as_toml_are_read_back_as_the_same_settings(tmp_path: Path) -> None:
    config = load('--data x/"y" --sources a b --every 3 --optim.lr 3e-4')
    text = to_toml("train", config.model_dump(mode="json"))
    assert Config(**tomllib.loads(text)["train"]) == config


def test_help_shows_every_setting_with_bounds_and_default() -> None:
    text = PARSER.format_help()
    assert isinstance(PARSER, argparse.ArgumentParser)
    assert "[> 0, <= 1; default: 0.001]" in text
    assert all(f"--{name}" in text for name in ("data", "sources", "precision", "every", "optim.lr"))
    assert text.startswith("usage: ")
    assert "[--SETTING VALUE ...]\n" in text.partition("\n\n")[0] + "\n"


def test_help_writes_defaults_as_a_user_would() -> None:
    text = help_parser(PrepareConfig, "prepare", "").format_help()
    assert "None" not in text
    assert "True" not in text
    assert "[default: true]" in text


def test_a_full_help_fits_the_columns_of_the_terminal() -> None:
    with terminal_as("stdout"):
        narrow = help_parser(Small, "demo", "").format_help().splitlines()
    assert max(map(len, narrow)) <= 80
    assert max(map(len, help_parser(Small, "demo", "").format_help().splitlines())) > 80


def test_help_names_the_type_of_each_value_of_a_list() -> None:
    assert "--shares float [float ...]" in PARSER.format_help()


def test_environment_names_are_the_settings_in_capitals() -> None:
    assert environment_names(Config)[-2:] == ["DEMO_OPTIM__LR", "DEMO_OPTIM__CLIP"]


# Options of small commands


class Small(Options):
    """Shows a demonstration
    on two lines.

    A second paragraph for readers of the code.
    """

    run: Annotated[Path, Place(metavar="RUN", positional=True, variable="DEMO_RUN")] = Field(description="Directory.")
    trust_code: Annotated[bool, Place("--trust-code")] = Field(False, description="Trust the code.")
    raw: bool = Field(False, description="Raw text.")
    start: Annotated[int | None, Place("--from", metavar="STEP")] = Field(None, ge=0, description="First step.")
    temperature: float = Field(0.8, ge=0, description="Randomness.")
    top_k: int | None = Field(None, description="Choice.")
    level: Literal["low", "high", "none"] = Field("low", description="Level.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="Ends.")
    checkpoint: str = Field("latest", description="Checkpoint.")

    @model_validator(mode="after")
    def _check_raw(self) -> Self:
        if self.raw and self.trust_code:
            raise ValueError("--raw and --trust-code exclude each other")
        return self


class Several(Options):
    runs: Annotated[tuple[Path, ...], Place(metavar="RUN", positional=True)] = Field(description="Directories.")
    output: Path = Field(description="Result.")


SMALL, SEVERAL = help_parser(Small, "demo show", "Shows."), help_parser(Several, "demo several", "Compares.")


def load_small(arguments: str, **environment: str) -> Small:
    return load_options(Small, arguments.split(), SMALL, environment)


def test_options_are_flags_values_lists_and_words_without_a_name() -> None:
    assert load_small("r") == Small(run=Path("r"))
    given = load_small("r --trust-code --from 3 --temperature=1e-1 --level high --stop a b --checkpoint 7 --stop c")
    assert given == Small(
        run=Path("r"), trust_code=True, start=3, temperature=0.1, level="high", stop=("a", "b", "c"), checkpoint="7"
    )
    assert load_options(Several, ["a", "b", "--output", "c"], SEVERAL, {}).runs == (Path("a"), Path("b"))


def test_a_variable_is_used_only_where_the_command_line_has_no_value() -> None:
    assert load_small("", DEMO_RUN="other").run == Path("other")
    assert load_small("r", DEMO_RUN="other").run == Path("r")


def test_other_variables_of_the_same_prefix_are_no_options() -> None:
    assert load_small("r", DEMO_TEMPERATURE="3", DEMO_DATA="d").temperature == 0.8


def test_none_is_a_plain_word_for_an_option() -> None:
    assert load_small("none --checkpoint none") == Small(run=Path("none"), checkpoint="none")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ("r --from -1", {}, r"^--from = '-1': input should be greater than or equal to 0$"),
        ("r --temperature nan", {}, r"^--temperature = 'nan': input should be a finite number \(Randomness\.\)$"),
        ("r --temperature hot --level mid", {}, r"^--temperature = 'hot': .* valid number.*; --level = 'mid': .*'high' or 'none'$"),
        ("r --stop=", {}, r"^--stop = '': string should have at least 1 character$"),
        ("r --raw --trust-code", {}, "^--raw and --trust-code exclude each other$"),
        ("r --raw=yes", {}, "--raw: ignored explicit argument 'yes'"),
        ("r --tempreature 1", {}, r"--tempreature 1; did you mean --temperature\? \(all options: demo show --help\)$"),
        ("r --temp 1", {}, "unrecognized arguments: --temp 1"),
        ("r other", {}, "unrecognized arguments: other"),
        ("", {"DEMO_RUN": ""}, "^RUN is not set; give it on the command line or as DEMO_RUN$"),
    ],
)
def test_a_mistake_in_an_option_is_answered_as_the_user_spells_it(
    arguments: str, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_small(arguments, **environment)


def test_missing_options_are_named() -> None:
    with pytest.raises(ConfigError, match="the following arguments are required: RUN"):
        load_options(Several, ["--output", "c"], SEVERAL, {})
    with pytest.raises(ConfigError, match=r"^--output is not set; give it on the command line$"):
        load_options(Several, ["a"], SEVERAL, {})


def test_the_help_of_options_shows_bounds_and_defaults_that_say_something() -> None:
    lines = {line.split()[0]: line for line in SMALL.format_help().splitlines() if line.strip()}
    assert lines["RUN"].endswith("Directory. [default: $DEMO_RUN]")
    assert lines["--from"].split(None, 2)[1:] == ["STEP", "First step. [>= 0]"]
    assert lines["--temperature"].endswith("Randomness. [>= 0; default: 0.8]")
    assert lines["--top_k"].split(None, 1)[1].split() == ["int", "Choice."], "the word none unsets no option"
    assert lines["--level"].split()[1] == "low|high|none", "the word none is a choice"
    assert lines["--raw"].split(None, 1)[1] == "Raw text."
    assert "Result. [required]" in SEVERAL.format_help()


COMMAND = """
from __future__ import annotations
from tests.unit.common.test_settings import Small

def run(options: Small) -> None:
    if options.start == 3:
        raise OSError(2, "of the work")
    from commands_of_test import library
    library.show(options)
"""


def test_a_command_of_a_table_is_checked_before_its_work_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "commands_of_test"
    folder.mkdir()
    (folder / "shown.py").write_text(COMMAND.replace("tests.unit.common.test_settings", __name__))
    (folder / "library.py").write_text("raise OSError('a library of it is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Small.__module__])
    command = Command("show", "shows", "commands_of_test.shown")
    with pytest.raises(SystemExit):
        run_listed(command, "demo", ["--help"])
    assert "\nShows a demonstration on two lines.\n\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--from"):
        run_listed(command, "demo", ["r", "--from", "-2"])
    with pytest.raises(ConfigError, match=r"cannot be loaded: OSError: a library of it is missing \(.*library.py, line 1\)"):
        run_listed(command, "demo", ["r", "--from", "2"])
    with pytest.raises(OSError, match="of the work"):
        run_listed(command, "demo", ["r", "--from", "3"])
    (folder / "library.py").write_text("def show(options):\n    print(f'{options.run} from {options.start}')")
    run_listed(command, "demo", ["r", "--from", "2"])
    assert capsys.readouterr().out == "r from 2\n"


@pytest.mark.parametrize("model", [TrainConfig, PrepareConfig])
def test_the_short_help_has_ten_settings_in_sixty_lines_and_its_examples_can_be_used(
    model: type[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    name = model.recipe_table
    with pytest.raises(SystemExit):
        help_parser(model, f"trainer {name}", "A description.").parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    frequent = frequent_settings(model)
    assert len(frequent) == 10
    for setting, value in frequent.items():
        assert f"  --{setting} {value}" in lines
    required = [] if model is PrepareConfig else ["--data", "d", "--run", "r", "--limits.steps", "1"]
    words = [word for setting, value in frequent.items() for word in (f"--{setting}", value)]
    load_settings(model, [*required, *words], help_parser(model, "t", ""), {})
    for example in model.examples:
        if "--data" in example or model is PrepareConfig:
            load_settings(model, shlex.split(example), help_parser(model, "t", ""), {})


@pytest.mark.parametrize("model", [TrainConfig, PrepareConfig])
def test_the_line_of_a_recipe_in_the_short_help_is_toml(model: type[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        help_parser(model, "trainer t", "").parse_args(["--help"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("In a recipe:")]
    section, _, assignment = line.removeprefix("In a recipe:").strip().partition("] ")
    assert tomllib.loads(f"{section}]\n{assignment}")[model.recipe_table]


@pytest.mark.parametrize("model", [TrainConfig, PrepareConfig])
def test_help_all_shows_every_setting(model: type[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        help_parser(model, "trainer t", "").parse_args(["--help", "all"])
    shown = capsys.readouterr().out
    assert all(f"--{name} " in shown for name in setting_names(model))


def test_help_for_anything_else_than_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="the only value is all"):
        help_parser(TrainConfig, "trainer train", "").parse_args(["--help", "optim"])


WITH_WORDS = {
    command.name: model
    for command in (*OF_TRAINER.values(), *OF_DATA.values())
    if issubclass(model := loaded(command)[0], Options)
    and any(place_of(field).positional for field in setting_names(model).values())
}


@pytest.mark.parametrize("name", WITH_WORDS)
def test_an_option_may_stand_before_between_and_after_the_words_without_a_name(name: str) -> None:
    model = WITH_WORDS[name]
    fields = setting_names(model)
    values = [one for one, field in fields.items() if place_of(field).positional]
    words = [*values, *(["more"] if is_list(fields[values[-1]]) else [])]
    options = {
        one: field for one, field in fields.items() if one not in values and not is_list(field)
    }  # a list takes all that follows
    refused = set()
    for one, field in options.items():
        option = [spelling(one, field)] if field.annotation is bool else [spelling(one, field), "1"]
        for cut in range(len(words) + 1):
            try:
                load_options(model, [*words[:cut], *option, *words[cut:]], help_parser(model, name, ""), {})
            except ConfigError as error:
                refused.add(str(error))
    assert not [message for message in refused if "unrecognized" in message or f"required: {words[0]}" in message]


def test_a_word_after_two_hyphens_is_no_option() -> None:
    assert load_small("--raw -- --name") == Small(run=Path("--name"), raw=True)


def test_only_what_a_person_has_set_counts_as_set(recipe: Path) -> None:
    assert set(set_names(load())) == {"data"}
    assert set(set_names(load("--data x --optim.clip 2", DEMO_SAVING="none"))) == {"data", "optim.clip", "saving"}
    assert set(set_names(load(f"--data x --recipe {recipe}"))) == {"data", "recipe", "every", "optim.lr"}


def test_the_settings_of_a_recipe_of_the_program_are_not_those_of_a_person(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    monkeypatch.setattr("common.settings.load.RECIPES", recipe.parent)
    found = load("--data x --recipe mine --every 3")
    assert (found.every, found.optim.lr) == (3, 0.5)
    assert set(set_names(found)) == {"data", "recipe", "every"}

"""Prepares a search: its settings, its space, and the check that an existing folder belongs to the same search."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import ConfigError
from common.files import UnusableFileError, is_unfinished, own_folder, read_input, sealed, unsealed, write_atomic
from common.hardware import num_cores
from common.redaction import redacted_settings
from common.settings.dotted import flatten, merge, nest
from common.settings.load import MAX_SETTINGS_BYTES, load_settings
from common.settings.markers import MOVEABLE, Effect, NotSearched
from common.settings.messages import explain
from common.settings.model import current_names, is_among, markers_of, setting_names, settings_with, with_current_names
from common.settings.options import help_parser
from data_pipeline.dataset.manifest import Manifest, read_manifest
from trainer.config import TrainConfig
from trainer.extensions.files import digests_of, read_extension
from trainer.launch.environment import check_variables, openmp_threads
from trainer.launch.supervisor import RESTART_VARIABLES
from trainer.runs.defaults import visible_gpus
from trainer.search.options import TuneOptions
from trainer.search.space import Range, Space, Value, read_space

SETUP = "search.json"
FOLDERS = ("runs", "recipes", "logs")  # of the trials' runs, their recipes, and their output
_FORMAT = 2
_OPTIONS = ("sampler", "seed", "pruner", "prune_from")  # stay the same at each start
_SHOWN, _MOST_THREADS = 4, 1024


@dataclass(frozen=True)
class SearchSetup:
    options: TuneOptions
    space: Space
    config: TrainConfig  # the settings that all trials share. `run` is the folder of the runs, and `threads` is set.
    manifest: Manifest
    facts: Mapping[str, Any]  # what must be the same at each start of the search, as the file of the search holds it

    @property
    def directory(self) -> Path:
        return self.options.output

    @property
    def runs(self) -> Path:
        return self.directory / "runs"

    @property
    def warmup_steps(self) -> int:
        varied = self.space.dimensions.get("schedule.warmup_steps")
        if isinstance(varied, Range):
            return int(varied.high)
        return max(int(value or 0) for value in (varied.values if varied else (self.config.schedule.warmup_steps,)))

    @property
    def prune_from(self) -> int:
        """The first step at which a trial may end early: by default the first evaluation after the longest warm-up."""
        every = self.config.eval.every_steps
        return self.options.prune_from or every * (self.warmup_steps // every + 1)

    @property
    def warning(self) -> str:
        """A line about a pruner that compares losses of the warm-up; empty if it does not."""
        if self.options.pruner == "none" or self.prune_from > self.warmup_steps:
            return ""
        return (
            f"--prune_from {self.prune_from} is within the warm-up of {self.warmup_steps} steps, in which short warm-ups and other "
            "learning rates lead: the best trials may end early. Leave the option out: a trial then ends early after the warm-up"
        )


def open_setup(options: TuneOptions, variables: Mapping[str, str] = os.environ) -> SearchSetup:
    check_variables(variables)
    if (variables.get("PET_NNODES") or "1") != "1":
        raise ConfigError(f"PET_NNODES = {variables['PET_NNODES']}, but a search runs on one node; start it without this variable")
    space, config = read_space(options.space), _shared_settings(options, variables)
    if options.sampler == "grid":
        space.combinations(options.seed)
    manifest = read_manifest(config.data)
    path = options.output / SETUP
    recorded = _recorded(path) if path.exists() else None
    if config.threads is None:
        if recorded is not None:  # --parallel may have been another one
            threads = recorded["settings"]["threads"]
        else:
            ranks = variables.get("PET_NPROC_PER_NODE") or variables.get("CPU_RANKS") or "1"
            each = max(1, options.parallel * (int(ranks) if ranks.isdecimal() else 1))
            threads = openmp_threads(variables) or max(1, num_cores() // each)
        config = config.model_copy(update={"threads": threads})
    facts = _facts(options, space, config, manifest, variables)
    if recorded is not None:
        _check_same(options.output, recorded, facts)
    elif options.output.exists() and (
        not options.output.is_dir()
        or any(
            path.name != ".lock" and not (is_unfinished(path) and path.name.startswith(f".{SETUP}."))  # left by a kill
            for path in options.output.iterdir()
        )
    ):
        raise ConfigError(f"{options.output}: it holds other files and no search; name a new folder with --output")
    return SearchSetup(options, space, config, manifest, facts)


def claim(setup: SearchSetup) -> None:
    """Write the facts of a new search into its folder, and create the folders of its trials. Removes unfinished files of a kill."""
    if not (setup.directory / SETUP).exists():
        write_atomic(setup.directory / SETUP, sealed(dict(setup.facts)))
    for name in FOLDERS:
        own_folder(setup.directory / name)
    for run in setup.runs.glob("trial-*"):
        own_folder(run)
    for path in (setup.directory / "recipes").glob(".*.tmp"):
        if is_unfinished(path):
            path.unlink()


def trial_config(setup: SearchSetup, values: Mapping[str, Value], run: Path) -> TrainConfig:
    """Return the settings of a trial. ConfigError: the values do not go together."""
    settings = setup.config.model_dump(mode="json") | {"run": str(run), "recipe": None}
    try:
        return TrainConfig.model_validate(merge(settings, nest(values)))
    except ValidationError as error:
        raise ConfigError(explain(TrainConfig, error)) from None


def gpus_of_slot(slot: int, parallel: int, variables: Mapping[str, str]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of a trial, None if it stays. GPUs are divided evenly, or shared if there are too few."""
    count = visible_gpus(variables)
    if parallel == 1 or count == 0:
        return None
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if visible is None else [name.strip() for name in visible.split(",")][:count]
    each = count // parallel
    return ",".join(names[slot * each : (slot + 1) * each]) if each else names[slot % count]


def _shared_settings(options: TuneOptions, variables: Mapping[str, str]) -> TrainConfig:
    words = ["--recipe", options.recipe, "--run", str(options.output / "runs")]
    words += [] if options.data is None else ["--data", str(options.data)]
    for name in sorted(options.limits.model_fields_set):
        value = getattr(options.limits, name)
        words += [f"--limits.{name}", "none" if value is None else str(value)]
    own = {name: value for name, value in variables.items() if name not in RESTART_VARIABLES}
    config = load_settings(TrainConfig, words, help_parser(TrainConfig, "trainer tune", ""), own)
    places = {name: path.absolute() for name in ("data", "extension") if (path := getattr(config, name)) is not None}
    if config.branch.run is not None:
        places["branch"] = config.branch.model_copy(update={"run": config.branch.run.absolute()})
    return config.model_copy(update=places)


def _facts(
    options: TuneOptions, space: Space, config: TrainConfig, manifest: Manifest, variables: Mapping[str, str]
) -> dict[str, Any]:
    # Sections and settings that no trial varies may differ if they change no result, or if their content is compared.
    free, fixed = settings_with(TrainConfig, Effect.NONE, MOVEABLE), markers_of(TrainConfig, NotSearched)
    left_out = {name for name in fixed if all(one in free for one in setting_names(TrainConfig) if is_among(one, (name,)))}
    settings = {name: value for name, value in config.model_dump(mode="json").items() if name not in left_out}
    if config.extension is not None:
        settings["extension"] = digests_of(read_extension(config.extension))
    gpus = 0 if config.device == "cpu" else visible_gpus(variables)
    each = max(1, gpus // options.parallel) if gpus else 0
    ranks = str(variables.get("PET_NPROC_PER_NODE") or each or variables.get("CPU_RANKS") or 1)
    return {
        "format": _FORMAT,
        **{name: getattr(options, name) for name in _OPTIONS},
        "ranks": int(ranks) if ranks.isdecimal() else ranks,
        "data": manifest.root_digest,
        "space": space.to_json(),
        "settings": redacted_settings(settings),
    }


def _recorded(path: Path) -> dict[str, Any]:
    names = current_names(TrainConfig)
    try:
        found = unsealed(read_input(path, MAX_SETTINGS_BYTES, below=path.parent))
        if found.get("format") == _FORMAT and isinstance(found.get("settings"), dict):
            found["settings"] = with_current_names(TrainConfig, found["settings"])
            found["space"] = {names.get(name, name): entry for name, entry in found["space"].items()}
    except (ValueError, KeyError, AttributeError, UnusableFileError) as error:
        raise ConfigError(f"{path}: not the facts of a search ({error}); restore it from a copy, or use another --output") from None
    if found.get("format") != _FORMAT or not isinstance(found.get("settings"), dict):
        raise ConfigError(
            f"{path}: format {_word(found.get('format'))}, but this version continues searches of format {_FORMAT}; finish the "
            "search with the version that began it, or use another --output"
        )
    threads = found["settings"].get("threads")
    if type(threads) is not int or not 1 <= threads <= _MOST_THREADS:
        raise ConfigError(
            f"{path}: threads = {_word(threads)}, but a number from 1 to {_MOST_THREADS} was expected; restore the file"
        )
    return found


def _check_same(directory: Path, recorded: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    before, now = flatten(recorded), flatten(facts)
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if not names:
        return
    labels = {name: f"--{name}" if name in _OPTIONS else name.removeprefix("settings.")[:80] for name in names[:_SHOWN]}
    shown = ", ".join(f"{label} = {_word(now.get(name))} instead of {_word(before.get(name))}" for name, label in labels.items())
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise ConfigError(
        f"{directory}: it holds another search, which differs: {shown}{more}; use the same recipe, space, data and options, "
        "or another --output"
    )


def _word(value: object) -> str:
    return "none" if value is None else str(value)[:80]

"""The sections about what a run was made from and how to check it: checkpoints, settings, record, commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from common.html.chart import measured as decimal
from common.text import size
from trainer.report.differences import Recipe, differences, flat, recipe_of, worded
from trainer.report.parts import NOTHING, UNKNOWN, Html, code, definitions, element, folded, join, note, table
from trainer.report.recorded_run import RecordedRun, number, part
from trainer.report.wording import count

__all__ = ["checkpoints", "commands", "record", "settings"]


def checkpoints(run: RecordedRun) -> Html:
    """Those that are kept, with the validation loss at their step."""
    if not run.checkpoints:
        return note("None yet.")
    losses = {event["step"]: number(event.get("val_loss")) for event in run.of("eval")}
    best = run.best["step"] if run.best else None
    rows = [
        (
            code(saved.digest) if saved.digest else "its manifest is damaged; run verify",
            count(saved.step) + (" (best)" if saved.step == best else ""),
            decimal(loss) if (loss := losses.get(saved.step)) is not None else UNKNOWN,
            size(saved.num_bytes) if saved.num_bytes is not None else UNKNOWN,
        )
        for saved in run.checkpoints
    ]
    marked = frozenset(place for place, saved in enumerate(run.checkpoints) if saved.step == best)
    told = note("A tensor that did not change is stored once, so together they may take less than the sum.")
    return join((table(("digest of the manifest", "step", "validation loss", "tensors"), rows, marked=marked), told))


def settings(run: RecordedRun) -> Html:
    """What differs from the recipe, and all settings, folded."""
    recipe = recipe_of(run.config)
    found = differences(run.config, recipe)
    rows = ((code(one.name), code(one.before), "recipe" if one.from_recipe else "default", code(one.used)) for one in found)
    base = "the recipe as it is now and the defaults" if recipe.name and not recipe.missing else "the defaults"
    shown = table(("setting", "was", "by", "used"), rows, num_names=4) if found else NOTHING
    told = (
        f"{len(found)} setting{'s' * (len(found) != 1)} differ{'s' * (len(found) == 1)} from {base}."
        if found
        else f"All are those of {base}."
    )
    pairs = sorted(flat(run.config).items())
    whole = table(("setting", "value"), ((code(name), code(worded(value))) for name, value in pairs), num_names=2)
    return join((_recipe_note(recipe), note(told), shown, folded(f"all {len(pairs)} settings", whole)))


def record(run: RecordedRun) -> Html:
    """Digests, code, machine: what the bits of the run depend on."""
    data, environment, identity = (part(run.record, name) for name in ("data", "environment", "identity"))
    gpus = ", ".join(map(str, environment.get("gpus") or ())) or "none"
    pairs = {
        "data": code(data.get("root_digest", UNKNOWN)),
        "tokenizer": code(data.get("tokenizer_digest", UNKNOWN)),
        "weights": code(run.record["weights"]) if run.record.get("weights") else "not on record: the run has not ended, or failed",
        "extension": code(identity["extension"]) if identity.get("extension") else "none",
        "code": code(environment.get("code") or "not known"),
        "image": code(environment.get("image") or "none: not run from an image that names its revision"),
        "machine": f"{environment.get('processor', UNKNOWN)}; GPUs: {gpus}; {environment.get('platform', UNKNOWN)}",
        "versions": ", ".join(f"{name} {environment.get(name) or 'none'}" for name in ("python", "torch", "cuda")),
    }
    return join(
        (
            definitions(pairs),
            _digests("digests of the run's files", part(run.record, "files")),
            _digests("digests of the locks", part(environment, "locks")),
            _values("identity: all that the bits depend on", identity),
            _values("versions of all packages", part(environment, "packages")),
        )
    )


def commands(run: RecordedRun) -> Html:
    """How to check the run, and how to make it again."""
    path, data = shlex.quote(str(run.path)), shlex.quote(str(run.config.get("data", "DATA")))
    ranks = int(part(run.record, "environment").get("world_size", 1))
    launch = "python -m trainer train" if ranks == 1 else f"PET_NPROC_PER_NODE={ranks} entrypoints/train"
    lines = {
        "every digest: record, checkpoints, metrics, ledger, data": f"python -m trainer verify {path} --level integrity",
        "train ten steps again and compare all bits": f"python -m trainer verify {path} --replay 10",
        "what every step was trained on": f"python -m trainer audit {path}",
        "the same run from its first step on, into a directory of its own": (
            f"{launch} --recipe {path}/config.toml --data {data} --run {path}-again"
        ),
    }
    return join(
        (
            element("pre", "\n\n".join(f"# {what}\n{command}" for what, command in lines.items()), class_="commands"),
            note("The last one has to end with the weights above: the same digest means the same bits."),
        )
    )


def _recipe_note(recipe: Recipe) -> Html:
    if recipe.name is None:
        return note("No recipe was named.")
    if recipe.missing:
        return note("Recipe ", code(recipe.name), f": {recipe.missing}, so what follows is compared with the defaults.", alarm=True)
    return note("Recipe ", code(recipe.name), ".")


def _digests(title: str, digests: Mapping[str, Any]) -> Html:
    if not digests:
        return NOTHING
    return folded(title, table(("file", "digest"), ((code(name), code(digest)) for name, digest in digests.items()), num_names=2))


def _values(title: str, values: Mapping[str, Any]) -> Html:
    if not values:
        return NOTHING
    return folded(
        title, table(("name", "value"), ((code(name), code(worded(value))) for name, value in values.items()), num_names=2)
    )

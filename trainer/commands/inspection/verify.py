"""`verify`: checks a run, level by level, or an exported directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import ProjectError
from trainer.commands.inspection.options.verify import VerifyOptions
from trainer.interop.export import EXPORT_RECORD, describe_export, verify_export
from trainer.loop import train
from trainer.verification.outcome import Outcome
from trainer.verification.verify import verify_run

__all__ = ["run"]


def run(options: VerifyOptions) -> None:
    """Print each level whose checks pass.

    Raises:
        ProjectError: a check failed; see `verify_run` and `verify_export`.
    """
    held: list[dict[str, Any]] = []
    try:
        for outcome in _outcomes(options):
            held.append({"level": outcome.level, **outcome.facts})
            if not options.as_json:
                print(outcome.text, flush=True)
    except ProjectError as error:
        if options.as_json:
            print(json.dumps({"ok": False, "held": held, "error": str(error)}, ensure_ascii=False))
        raise
    if options.as_json:
        print(json.dumps({"ok": True, "held": held}, ensure_ascii=False))


def _outcomes(options: VerifyOptions) -> Iterator[Outcome]:
    if options.export is not None:
        return iter([_of_export(options.export, options.run)])
    if (options.run / EXPORT_RECORD).exists() and not (options.run / "record.json").exists():
        return iter([_of_export(options.run, None)])
    return verify_run(
        options.run,
        train=partial(train, trust_extension=False),  # a replay does not count as a training with the extension
        level=options.level,
        num_steps=options.replay,
        start=options.start,
        data=options.data,
        sources=options.sources,
        trust_code=options.trust_code,
    )


def _of_export(directory: Path, run: Path | None) -> Outcome:
    facts = verify_export(directory, run)
    return Outcome("export", describe_export(facts), facts)

"""`verify`: checks a run, level by level."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from common.errors import ProjectError
from trainer.commands.options.verify import VerifyOptions
from trainer.loop import train
from trainer.verification.verify import verify_run

__all__ = ["run"]


def run(options: VerifyOptions) -> None:
    """Print each level whose checks pass.

    Raises:
        ProjectError: a check failed; see `verify_run`.
    """
    held: list[dict[str, Any]] = []
    try:
        for outcome in verify_run(
            options.run,
            train=partial(train, trust_extension=False),  # a replay does not count as a training with the extension
            level=options.level,
            num_steps=options.replay,
            start=options.start,
            data=options.data,
            sources=options.sources,
            trust_code=options.trust_code,
        ):
            held.append({"level": outcome.level, **outcome.facts})
            if not options.as_json:
                print(outcome.text, flush=True)
    except ProjectError as error:
        if options.as_json:
            print(json.dumps({"ok": False, "held": held, "error": str(error)}, ensure_ascii=False))
        raise
    if options.as_json:
        print(json.dumps({"ok": True, "held": held}, ensure_ascii=False))

"""`audit`: proves which rows every step was trained on, or shows the text of one step."""

from __future__ import annotations

import json

from common.errors import ProjectError
from trainer.commands.inspection.options.audit import AuditOptions
from trainer.verification.audit import audit_run
from trainer.verification.step_text import show_step

__all__ = ["run"]


def run(options: AuditOptions) -> None:
    """Print the result.

    Raises:
        ProjectError: the data or the run is wrong; see `audit_run` and `show_step`.
    """
    if options.step is not None:
        print(show_step(options.run, options.step, data=options.data, full=options.full, as_json=options.as_json))
        return
    try:
        report = audit_run(options.run, options.data)
    except ProjectError as error:
        if options.as_json:
            print(json.dumps({"ok": False, "error": str(error)}, ensure_ascii=False))
        raise
    print(json.dumps({"ok": True, **report.to_json()}, ensure_ascii=False) if options.as_json else report.describe())

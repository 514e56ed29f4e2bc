"""The commands of `python -m trainer`: one row for each command. The launcher reads the table too, so it must load quickly.

The options of a command are in the module of its name in `trainer/commands/options/`, its work in the module of its name in
`trainer/commands/`.
"""

from __future__ import annotations

from common.command_line import Command

__all__ = ["COMMANDS"]


def _command(name: str, options: str, summary: str) -> Command:
    return Command(name, summary, f"trainer.commands.options.{name}:{options}", f"trainer.commands.{name}:run")


_TRAIN = Command(
    "train",
    "train a model, or go on with a run that was stopped",
    "trainer.config:TrainConfig",
    "trainer.commands.train:run",
    "Trains a model on prepared data. Under torchrun, every rank runs this command.",
)
_SCHEMA = Command(
    "schema",
    "JSON Schema of the settings of `train`, for editors; --env lists their environment variables",
    "common.settings.options:SchemaOptions",
    "trainer.commands.schema:run",
)
_ROWS = (
    _TRAIN,
    _command("evaluate", "EvaluateOptions", "validation loss and perplexity of a run's checkpoint"),
    _command("generate", "GenerateOptions", "text from a run's checkpoint"),
    _command(
        "verify",
        "VerifyOptions",
        "whether a run's files are what was written, the environment is the same, and steps give the same bits again",
    ),
    _command(
        "audit",
        "AuditOptions",
        "what every step of a run was trained on: proof of no repeat and no omission, and the text behind a step",
    ),
    _command(
        "report", "ReportOptions", "report.html and training_metrics.png of a run: curves, evaluations, samples, settings, digests"
    ),
    _command("compare", "CompareOptions", "one page that lays several runs over each other"),
    _command("stacks", "StacksOptions", "what the ranks of a running training do at this moment: the stacks of all their threads"),
    _SCHEMA,
)
COMMANDS = {command.name: command for command in _ROWS}
"""By name, in the order of the help."""

"""The commands of the trainer: one row for each command. The launcher reads the table too, so it must load quickly.

The work of a command is in the module of its name in `trainer/commands/`. If it shows or checks existing runs, it is in
`trainer/commands/inspection/`. Its options are in the module of its name in the folder `options` beside this module.
"""

from __future__ import annotations

from common.command_line import Command

__all__ = ["COMMANDS"]


def _command(name: str, options: str, summary: str, folder: str = "trainer.commands") -> Command:
    return Command(name, summary, f"{folder}.options.{name}:{options}", f"{folder}.{name}:run")


def _inspection(name: str, options: str, summary: str) -> Command:
    return _command(name, options, summary, "trainer.commands.inspection")


_TRAIN = Command(
    "train",
    "train a model, or continue a run that was stopped",
    "trainer.config:TrainConfig",
    "trainer.commands.train:run",
    "Trains a model on prepared data. Under torchrun, every rank runs this command.",
    shortcut="trainer.launch.finished:report_finished",
)
_PLAN = Command(
    "plan",
    "show the length, memory, disk space and time of a training",
    "trainer.config:PlanConfig",
    "trainer.commands.plan:run",
    "Shows what a training with these settings will do. It measures five steps and writes nothing.",
)
_IMPORT = Command(
    "import",
    "make a run of a Qwen3 or Llama model of Hugging Face",
    "trainer.commands.options.import_model:ImportOptions",
    "trainer.commands.import_model:run",
)
_SCHEMA = Command(
    "schema",
    "print the JSON Schema of the settings of `train`; --env prints their environment variables",
    "common.settings.options:SchemaOptions",
    "trainer.commands.schema:run",
)
_ROWS = (
    _TRAIN,
    _PLAN,
    _command("evaluate", "EvaluateOptions", "compute validation loss and other measures of a checkpoint"),
    _command("generate", "GenerateOptions", "write text with the model of a checkpoint"),
    _command("classify", "ClassifyOptions", "print the label of each text, with a classification model"),
    _command("compress", "CompressOptions", "write a smaller copy of a model: int8, int4 or pruned"),
    _command("export", "ExportOptions", "write a model for transformers, vLLM, llama.cpp or ONNX"),
    _inspection(
        "verify",
        "VerifyOptions",
        "check that a run's files are intact, that the environment is the same, and that steps give the same bits again",
    ),
    _inspection(
        "audit",
        "AuditOptions",
        "prove that no row was trained twice or left out, or show the text of one step",
    ),
    _inspection(
        "report", "ReportOptions", "write report.html and training_metrics.png: curves, evaluations, samples, settings, digests"
    ),
    _inspection("compare", "CompareOptions", "write one page that compares several runs"),
    _command("tune", "TuneOptions", "search for the settings with the lowest validation loss"),
    _inspection("runs", "RunsOptions", "list the runs in a folder: state, steps, validation loss"),
    _IMPORT,
    _command("doctor", "DoctorOptions", "check GPUs, driver, disks, network and versions of this machine"),
    _inspection("stacks", "StacksOptions", "print the stacks of all threads of a running training"),
    _SCHEMA,
)
COMMANDS = {command.name: command for command in _ROWS}
"""By name, in the order of the help."""

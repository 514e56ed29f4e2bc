"""`schema`: prints the settings of `train`, for editors and scripts."""

from __future__ import annotations

from common.settings.options import SchemaOptions, schema_text
from trainer.config import TrainConfig


def run(options: SchemaOptions) -> None:
    print(schema_text(TrainConfig, env=options.env))

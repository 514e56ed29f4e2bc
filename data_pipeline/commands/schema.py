from __future__ import annotations

from common.settings.options import SchemaOptions, schema_text
from data_pipeline.config import PrepareConfig


def run(options: SchemaOptions) -> None:
    print(schema_text(PrepareConfig, env=options.env))

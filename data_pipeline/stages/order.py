"""The names of the stages in order, for progress and timings."""

from __future__ import annotations

from data_pipeline.config import PrepareConfig
from data_pipeline.dedup.duplicates import STAGES as DUPLICATES
from data_pipeline.stages.job import is_trained

__all__ = ["stage_names"]


def stage_names(config: PrepareConfig) -> list[str]:
    return [
        "read",
        *DUPLICATES,
        "split",
        *(["sample"] if is_trained(config.tokenizer) else []),
        "train",
        *(["reference"] if config.quality.measures_perplexity else []),
        *(["classifier"] if config.quality.good else []),
        "tokenize",
        *(["weigh"] if config.balance.by != "none" else []),
        "select",
        *(["rejects"] if config.keep_rejects == "all" else []),
        "pack",
    ]

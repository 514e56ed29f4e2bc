from __future__ import annotations

from collections.abc import Sequence

from data_pipeline.dedup.duplicates import Duplicates, PartitionKeys, find_duplicates
from data_pipeline.stages.job import Job
from data_pipeline.stages.read import ReadResult


def drop_duplicates(job: Job, read: Sequence[ReadResult]) -> Duplicates:
    keys = [PartitionKeys(number, result.source, result.kept) for number, result in enumerate(read)]
    return find_duplicates(job.run, keys, job.config.dedup, job.work)

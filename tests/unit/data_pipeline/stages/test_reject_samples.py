from pathlib import Path

import pyarrow as pa

from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.tables import TableWriter
from data_pipeline.documents import Reason
from data_pipeline.stages.job import PartitionTask
from data_pipeline.stages.reject_samples import SAMPLES_PER_REASON, LaterRejection, first_samples


def test_the_first_documents_of_each_reason_are_samples_over_all_batches(tmp_path: Path) -> None:
    num_documents = 2 * SAMPLES_PER_REASON + 4
    schema = pa.schema([("id", pa.uint64()), ("path", pa.string()), ("line", pa.uint32()), ("text", pa.large_string())])
    task = PartitionTask(PrepareConfig(sources=("a",)), "a", 0, tmp_path)
    with TableWriter(task.place("text"), schema) as table:
        for first in range(0, num_documents, 3):
            rows = [{"id": n, "path": "a.jsonl", "line": n + 1, "text": f"text {n}"} for n in range(first, first + 3)]
            table.write(pa.RecordBatch.from_pylist(rows, schema))
    reasons = (Reason.NEAR_DUPLICATE, Reason.OVER_SHARE)
    rejected = (LaterRejection(n, reasons[n % 2], "why", n - 2 if n == 4 else n) for n in range(num_documents))
    samples = list(first_samples(task, rejected))
    assert [sample["sample"] for sample in samples] == [f"text {n}" for n in range(2 * SAMPLES_PER_REASON)]
    assert [sample.get("kept") for sample in samples] == [[2, "a.jsonl", 3] if n == 4 else None for n in range(len(samples))]

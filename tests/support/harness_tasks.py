"""Tasks of lm-evaluation-harness that need no network."""

from __future__ import annotations

import json
from pathlib import Path


def write_tasks(folder: Path) -> Path:
    """Write a multiple-choice task and a perplexity task, each with a data file."""
    folder.mkdir()
    questions = [
        {"text": f"{start} ", "choices": choices, "label": 0}
        for start, choices in (("the cat sat on a", ["mat", "zzz"]), ("birds", ["sang", "qqq"]), ("old", ["ships", "xxx"]))
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "pages.jsonl").write_text("".join(json.dumps({"page": f"the dog ran to it {n} times " * 3}) + "\n" for n in range(2)))
    for name, lines in {
        "questions": [
            "output_type: multiple_choice",
            "doc_to_text: '{{text}}'",
            "doc_to_choice: choices",
            "doc_to_target: label",
            "target_delimiter: ''",
            "metric_list:",
            "  - metric: acc",
        ],
        "pages": [
            "output_type: loglikelihood_rolling",
            "doc_to_text: ''",
            "doc_to_target: '{{page}}'",
            "metric_list:",
            "  - metric: word_perplexity",
            "  - metric: bits_per_byte",
        ],
    }.items():
        head = [f"task: tiny_{name}", "dataset_path: json", "dataset_kwargs:", "  data_files:", f"    test: {folder / name}.jsonl"]
        (folder / f"{name}.yaml").write_text("\n".join([*head, "test_split: test", *lines]) + "\n")
    return folder

"""Fault 34: a preparation that is killed at any time and started again ends with the same bytes and repeats no finished task."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.claims import noted
from tests.support.corpora import sentences, write_recipe, write_texts
from tests.support.faults import seeds
from tests.support.prepare_runs import FinishedWork, bytes_done_before, content_of, kill_at_random, run, timed_run

RECIPE = """
[prepare]
sources = ["{folder}/text.jsonl"]
row_length = 64
partition_bytes = 4096

[prepare.tokenizer]
vocab_size = 400

[prepare.packing]
window_tokens = 4096
shard_bytes = 8192
"""


@pytest.mark.claim("34", "preparation killed -9 at a random time, twice in a row, then run to the end", unit="runs")
def test_34_killed_at_any_time_it_ends_with_the_same_bytes_and_does_nothing_twice(tmp_path: Path) -> None:
    write_texts(tmp_path / "text.jsonl", sentences(0, 600))
    output, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    command = ("prepare", "--recipe", write_recipe(tmp_path, RECIPE), "--workers", "2", "--output")
    whole_run_s = timed_run((*command, undisturbed), undisturbed)
    expected = content_of(undisturbed)
    num_killed = num_resumed = 0
    for seed in seeds(3, 200):
        delays, finished, num_finished = random.Random(seed), FinishedWork(), 0
        # Two kills: the second run can be compared with what the first one left, and at least one kill happens after a finished
        # task.
        for at_work, share in ((False, 0.9), (True, 0.3)):
            num_killed += kill_at_random((*command, output), output, delays, share * whole_run_s, at_work=at_work)
            num_finished = finished.check(output)
        done = run(*command, output)
        assert done.returncode == 0, done.stderr
        assert content_of(output) == expected
        assert not (output / ".work").exists()
        if num_finished:
            assert bytes_done_before(output)["read"][1] > 0, "finished work was not reused"
            num_resumed += 1
    noted(f"{num_killed} kills at work, {num_resumed} runs took up finished work")
    assert num_killed > 0
    assert num_resumed > 0

"""Row 31: a shard is truncated or changed while a separate process reads it. The process must not die."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults import seeds
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT

READER = """
import os, random, sys
from pathlib import Path
import numpy as np
from common.errors import PreparedDataError
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows

folder, draw = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
rows = Rows(folder, read_manifest(folder), "train")
everything = np.arange(len(rows))
before = rows.read(everything).tokens_BL.copy()
path = folder / draw.choice([shard.path for shard in read_manifest(folder).shards if shard.split == "train"])
content = bytearray(path.read_bytes())
if draw.random() < 0.5:
    os.truncate(path, draw.randrange(len(content)))
else:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    os.utime(path)
try:
    rows.read(everything)
except PreparedDataError as error:
    sys.exit(0 if path.name in str(error) else f"the message names no file: {error}")
sys.exit("nothing was noticed")
"""


@pytest.mark.claim("31", "shard truncated or changed under the reader", unit="shards")
def test_a_shard_that_changes_under_a_reader_is_an_error_that_names_it(tmp_path: Path) -> None:
    for seed in seeds(6, 100):
        folder = write_prepared(tmp_path / str(seed), train_rows=random.Random(seed).randrange(2, 2000))
        command = [sys.executable, "-c", READER, str(folder), str(seed)]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr

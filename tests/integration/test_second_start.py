"""A second start with `torch.compile` compiles nothing again."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.prepared import write_prepared
from tests.support.runs import arguments, run_command, tiny_config

COUNTS = """
import json
from pathlib import Path

def on_train_end(run):
    from torch._dynamo.utils import counters
    Path({path!r}).write_text(json.dumps(counters["inductor"] | counters["aot_autograd"]))
"""


@pytest.mark.parametrize("compiled", ["on", "layers"])
def test_a_second_start_finds_code_and_graphs_of_the_first_in_the_cache(compiled: str, tmp_path: Path) -> None:
    def started(steps: int) -> dict[str, Any]:
        extension = tmp_path / "extension.py"
        extension.write_text(COUNTS.format(path=str(tmp_path / "counts.json")))
        config = tiny_config(
            data,
            tmp_path / "run",
            compile=compiled,
            extension=extension,
            model={"layers": 1, "width": 8, "heads": 2},
            limits={"steps": steps},
            schedule={"warmup_steps": 0, "decay_steps": 2},
            eval={"every_steps": 1, "sample_tokens": 0},
        )
        done = run_command("trainer", "train", *arguments(config), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        return {name: number for name, number in json.loads((tmp_path / "counts.json").read_text()).items() if "cache" in name}

    data = write_prepared(tmp_path / "data", row_length=32)
    first, second = started(1), started(2)
    assert first.keys() == {"fxgraph_cache_miss", "autograd_cache_miss", "autograd_cache_saved"}
    assert second == {name.replace("miss", "hit"): number for name, number in first.items() if "miss" in name}

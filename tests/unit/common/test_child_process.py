"""Programs in separate processes under limits that the shell or a batch system has set."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHILDREN = sorted(path for package in ("common", "data_pipeline", "trainer") for path in (ROOT / package).rglob("*_child.py"))

USE_ALL = """
import io, json, resource, sys
from pathlib import Path

for name, soft, hard in json.loads(sys.argv[1]):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard))

import pyarrow as pa, pyarrow.parquet as pq
from data_pipeline.config import ChatConfig, HtmlConfig, LimitConfig, PrepareConfig, TokenizerConfig
from data_pipeline.conversations.chat_template import chosen_template
from data_pipeline.conversations.rendering import ChatRenderer
from data_pipeline.filters.html import PageReader
from data_pipeline.sources.parsers.columnar import PARQUET
from data_pipeline.sources.parsers.source_format import Origin
from data_pipeline.sources.parsers.source_format import Content
from data_pipeline.sources.streams import Budget
from data_pipeline.tokenizer.loading import try_out

limits, done = LimitConfig(), {}
with PageReader(limits) as pages:
    for _ in range(2):
        done["html"] = pages.text_of("<main><p>one page</p></main>", HtmlConfig()).rule
with ChatRenderer(chosen_template(ChatConfig(template="chatml"), TokenizerConfig(kind="byte"))) as renderer:
    for _ in range(2):
        rendered = renderer.conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    done["template"] = list(rendered.parts)
file = io.BytesIO(Path(sys.argv[2]).read_bytes())
size = len(file.getvalue())
rows = PARQUET.read(Content(Origin("a"), PrepareConfig(sources=("builtin",)), iter(()), Budget(limits, lambda: size), file, size))
done["columnar"] = [row.text for row in rows]
try_out("huggingface", b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
done["trial"] = True
print(json.dumps(done))
"""
"""Uses every program of the product that has limits, each of the lasting ones twice."""

GIB = 1 << 30
EXISTING = {
    "none": [],
    "processor time": [("CPU", 3600, 3600)],
    "processor time, the soft limit alone": [("CPU", 3600, -1)],
    "little processor time": [("CPU", 100, 101)],
    "memory": [("AS", 30_000_000 * 1024, 30_000_000 * 1024)],
    "memory, the soft limit alone": [("AS", 30 * GIB, -1)],
    "less memory than the reader of columns may use": [("AS", 2 * GIB, 2 * GIB)],
    "size of files": [("FSIZE", 1 << 20, 1 << 20)],
    "core dumps and open files": [("CORE", 0, 0), ("NOFILE", 64, 64)],
    "all that a batch system sets": [("CPU", 7200, 7200), ("AS", 16 * GIB, 16 * GIB), ("DATA", 16 * GIB, 16 * GIB), ("CORE", 0, 0)],
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as pa  # noqa: PLC0415 - only here
    import pyarrow.parquet as pq  # noqa: PLC0415

    path = tmp_path_factory.mktemp("columns") / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"]}), path)
    return path


@pytest.mark.parametrize("existing", EXISTING.values(), ids=EXISTING)
def test_every_program_works_under_existing_limits(existing: list[tuple[str, int, int]], table: Path) -> None:
    command = [sys.executable, "-c", USE_ALL, json.dumps(existing), str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"html": "html-main", "template": [51, 11, 1], "columnar": ["one", "two"], "trial": True}


def test_every_program_is_used_in_this_test_and_leaves_its_limits_to_one_module() -> None:
    assert [path.name.removesuffix("_child.py") for path in CHILDREN] == ["template", "html", "columnar", "trial"]
    for path in CHILDREN:
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"setrlimit", "prlimit"}, (
            f"{path} sets a limit itself, but only functions of common.child_process never raise one"
        )


SHORT_OF_MEMORY = """
import resource
from common.errors import WorkerError
from data_pipeline.config import HtmlConfig, LimitConfig
from data_pipeline.filters.html import PageReader

resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
with PageReader(LimitConfig()) as pages:
    try:
        print(pages.text_of("<p>x" * (3 << 20), HtmlConfig()).rule)
    except WorkerError as error:
        print(error)
"""


def test_data_does_not_depend_on_an_existing_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert "under an existing limit of this process, ulimit -v 716800; it may need 512 MiB more" in done.stdout, done

"""B rows of a micro-batch   L tokens of a row   V vocabulary"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import ConfigError, ExitCode, GuardError, ProjectError
from common.files import digest_bytes
from tests.support.runs import ROOT, tiny_config
from trainer.config import ModelConfig
from trainer.data.batch import IGNORE
from trainer.extensions.files import read_extension
from trainer.extensions.hooks import Extension, RunView, seeded_model
from trainer.extensions.trust import execute_extension, load_extension
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model
from trainer.runs.events import ScalarsEvent
from trainer.runs.state import Progress

MODEL = ModelConfig(layers=1, width=16, heads=2, context=8, vocab_multiple=1)
NO_LOSS = "def loss(logits_BLV, targets_BL, weights_BL):\n    "
NO_MODEL = "import torch\nfrom torch import nn\n\n\ndef build_model(model_config, vocab_size):\n    "

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an extension and return its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return write_text


@pytest.fixture
def run(tmp_path: Path) -> RunView:
    return RunView(rank=0, world_size=2, config=tiny_config(tmp_path, tmp_path), model=nn.Linear(1, 1), progress=Progress(step=3))


def test_without_a_file_there_are_no_hooks_and_calling_them_does_nothing(run: RunView) -> None:
    extension = load_extension(None)
    assert (extension.path, extension.digests, extension.custom_loss, extension.build_model) == (None,) * 4
    call_all(extension, run)


def call_all(extension: Extension, run: RunView) -> None:
    extension.notify("on_train_start", run)
    extension.notify("on_step_end", run, "metrics")
    extension.notify("on_evaluate", run, "evaluation")
    extension.notify("on_save", run, 7, Path("path"))
    extension.notify("on_train_end", run)


def test_each_hook_gets_its_arguments(write: Write, run: RunView) -> None:
    extension = load_extension(
        write(
            "calls = []\n"
            "def on_train_start(run): calls.append(('start', run))\n"
            "def on_step_end(run, metrics): calls.append(('step', run, metrics))\n"
            "def on_evaluate(run, evaluation): calls.append(('evaluate', run, evaluation))\n"
            "def on_save(run, step, path): calls.append(('save', run, step, path))\n"
            "def on_train_end(run): calls.append(('end', run))\n"
        )
    )
    call_all(extension, run)
    assert extension.hooks["on_save"].__globals__["calls"] == [
        ("start", run),
        ("step", run, "metrics"),
        ("evaluate", run, "evaluation"),
        ("save", run, 7, Path("path")),
        ("end", run),
    ]


def test_what_a_hook_sees_of_the_run_cannot_be_replaced(run: RunView) -> None:
    assert run.is_main
    with pytest.raises(AttributeError):
        run.progress = Progress()  # type: ignore[misc]


def test_the_file_is_run_once_from_the_bytes_that_the_digest_is_of(write: Write) -> None:
    source = "from dataclasses import dataclass\n@dataclass\nclass State:\n    x: 'int' = 1\ndef on_train_end(run: int): State()\n"
    path, searched = write(source), list(sys.path)
    extension = load_extension(path)
    path.write_text("1 / 0")
    assert extension.files == {"": source.encode()}
    assert extension.digests == f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"
    assert extension.path == path
    assert extension.hooks["on_train_end"].__annotations__ == {"run": int}  # the loader's __future__ imports have no effect
    assert sys.path == searched
    assert list(path.parent.iterdir()) == [path]  # no __pycache__ was written


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "x = 1",
            "defines none of on_train_start, on_step_end, on_evaluate, on_save, on_train_end, build_model, loss, training_step;",
        ),
        ("\nimport nothing_of_this_name", r"line 2: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def on_save(run, step, path):\n    pass\n\nx = (", r"line 4: SyntaxError: '\(' was never closed; correct"),
        ("raise SystemExit(0)", "line 1: SystemExit: 0"),
        ("\n\ndef on_step_ended(run, metrics): pass", "line 3: nothing calls on_step_ended; did you mean on_step_end?"),
        ("def on_begin(run): pass\ndef loss(a, b, c): pass", "nothing calls on_begin; did you mean on_"),
        ("on_Save = 3", r"mine\.py: nothing calls on_Save; did you mean on_save?"),
        ("def losses(a, b, c): pass", "nothing calls losses; did you mean loss?"),
        ("def Build_Model(a, b): pass", "nothing calls Build_Model; did you mean build_model?"),
        ("def on_save(run): pass", r"line 1: on_save\(run\) is called with other arguments; use def on_save\(run, step, path\)"),
        ("def loss(a, b, c, d): pass", r"loss\(a, b, c, d\) is called with other arguments; use def loss\(logits_BLV, targets_BL"),
        ("def on_train_end(*, run): pass", r"use def on_train_end\(run\)"),
        ("loss = 0.5", "loss is a float; it must be a function"),
        ("async def on_train_end(run): pass", "on_train_end is async or has a yield"),
        ("def on_train_end(run): yield", "on_train_end is async or has a yield"),
    ],
)
def test_a_file_that_would_not_do_what_it_seems_to_is_refused(write: Write, source: str, message: str) -> None:
    path = write(source)
    with pytest.raises(ConfigError, match=message) as refused:
        load_extension(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine.py: cannot be read \(No such file or directory\); name a Python file or a folder"):
        load_extension(tmp_path / "mine.py")


PACKAGE = {
    "__init__.py": "from .parts.loss import loss\nfrom . import on_save\n",
    "on_save.py": "x = 1\n",
    "parts/__init__.py": "",
    "parts/loss.py": "import pkgutil\nfrom .. import on_save\nGAMMA = float(pkgutil.get_data(__package__, 'gamma.txt'))\n\n\n"
    "def loss(logits_BLV, targets_BL, weights_BL):\n    return logits_BLV.sum() * GAMMA * on_save.x / len(targets_BL[:, 0])\n",
    "parts/gamma.txt": "3",
}


def write_package(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_package_is_run_from_the_bytes_that_its_digests_are_of(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "mine", PACKAGE | {".git/x": "", "parts/__pycache__/a.pyc": "", ".hidden": ""})
    files = read_extension(folder)
    for name in PACKAGE:
        (folder / name).write_text("1 / 0")
    extension = execute_extension(folder, files)
    assert extension.digests == {name: digest_bytes(text.encode()) for name, text in PACKAGE.items()}
    assert list(extension.hooks) == ["loss"], "modules are not functions"
    logits_BLV, targets_BL = example_batch()
    assert torch.equal(extension.loss_sum(logits_BLV, targets_BL, None), logits_BLV.sum() * 3 / 2)
    assert not list(folder.glob("__pycache__"))
    with pytest.raises(ConfigError, match=r"mine/__init__.py, line 1: ZeroDivisionError"):
        load_extension(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"__init__.py": ""}, "defines none of on_train_start"),
        ({"loss.py": "def loss(a, b, c): pass"}, r"the folder has no __init__.py; add one that defines or imports the functions"),
        ({"__init__.py": "from . import lost"}, "__init__.py, line 1: ImportError: cannot import name 'lost' from"),
        ({"__init__.py": "import os, os.path\nfrom .lost import x"}, r"line 2: ModuleNotFoundError: No module named 'mine.lost'"),
        ({"__init__.py": "from .a import loss", "a.py": "\n\nloss = = 3"}, r"mine/a.py, line 3: SyntaxError: invalid syntax"),
        ({"__init__.py": "from .a import loss", "a.py": "\ndef loss(a): 3"}, r"mine/a.py, line 2: loss\(a\) is called with other"),
        ({"__init__.py": "", "LICENSE": ""}, "'LICENSE' cannot be the name of a file of an extension; use letters"),
        ({"__init__.py": "", "v1.0/a.txt": ""}, "'v1.0/a.txt' cannot be"),
        ({"__init__.py": "", "a\nb.py": ""}, r"'a\\nb.py' cannot be"),
        ({"__init__.py": ""} | {f"a{number}.py": "" for number in range(256)}, "257 files, and the limit is 256"),
        ({"__init__.py": "# 9 MB" * 1_500_000, "b.py": "# 9 MB" * 1_500_000}, "b.py is larger than 7777216 bytes"),
    ],
)
def test_a_package_that_cannot_be_an_extension_is_refused_with_the_file(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_extension(write_package(tmp_path / "mine", files))


def test_an_error_in_a_hook_of_a_package_names_its_file_and_line(tmp_path: Path, run: RunView) -> None:
    files = {"__init__.py": "from .a import on_train_end", "a.py": "import json\n\ndef on_train_end(run):\n    json.loads('x')\n"}
    with pytest.raises(ConfigError, match=r"mine/a.py, line 4, in on_train_end: JSONDecodeError: Expecting value"):
        load_extension(write_package(tmp_path / "mine", files)).notify("on_train_end", run)


@pytest.mark.parametrize(
    "source",
    [
        "def _on_step_ended(run): pass\ndef on_train_end(run): pass",
        "from difflib import get_close_matches as lose\ndef on_train_end(run): pass",
        "def on_step_end(run, metrics, every=10): pass",
        "def on_step_end(*all): pass",
        "class Losses: pass\nimport torch\nloss = torch.nn.functional.cross_entropy",
        "loss = max",
        "from functools import partial\ndef _note(name, run): pass\non_train_end = partial(_note, 'x')",
    ],
)
def test_helpers_and_further_ways_to_define_a_function_are_accepted(write: Write, source: str) -> None:
    assert load_extension(write(source)).hooks


def test_an_error_in_a_hook_says_file_line_and_hook(write: Write, run: RunView) -> None:
    path = write("import json\n\ndef on_train_end(run):\n    _helper()\n\ndef _helper():\n    json.loads('x')\n")
    with pytest.raises(ConfigError, match=r"mine.py, line 7, in on_train_end: JSONDecodeError: Expecting value") as raised:
        load_extension(path).notify("on_train_end", run)
    assert str(path) in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)


def test_leaving_the_process_from_a_hook_is_an_error(write: Write, run: RunView) -> None:
    with pytest.raises(ConfigError, match="line 1, in on_train_start: SystemExit: 0"):
        load_extension(write("def on_train_start(run): raise SystemExit(0)")).notify("on_train_start", run)


def test_an_error_that_a_hook_chose_for_the_user_keeps_its_kind(write: Write, run: RunView) -> None:
    source = "from common.errors import GuardError\ndef on_train_end(run):\n    raise GuardError('no progress')"
    with pytest.raises(GuardError, match=r"mine.py, line 3, in on_train_end: no progress") as raised:
        load_extension(write(source)).notify("on_train_end", run)
    assert raised.value.exit_code == ExitCode.GUARD


def test_running_out_of_memory_in_a_loss_is_left_to_the_trainer(write: Write) -> None:
    extension = load_extension(write(NO_LOSS + "import torch\n    raise torch.OutOfMemoryError('full')"))
    with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
        extension.loss_sum(*example_batch(), None)


def test_a_hook_leaves_gradient_and_training_mode_as_they_were(write: Write, run: RunView) -> None:
    source = (
        "import torch\ndef on_train_end(run):\n    assert not run.model(torch.ones(1)).requires_grad\n"
        "    run.model.eval()\n    torch.set_grad_enabled(True)"
    )
    extension = load_extension(write(source))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            extension.notify("on_train_end", run)
            assert torch.is_grad_enabled() is enabled
    assert run.model.training


def example_batch() -> tuple[Tensor, Tensor]:
    """Return logits with a gradient for 2 rows of 3 tokens and 5 pieces, and targets with two ignored positions."""
    logits_BLV = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return logits_BLV, torch.tensor([[1, 2, IGNORE], [4, 0, IGNORE]])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return logits_BLV", r"line 1: loss returned a tensor of shape \(2, 3, 5\), torch.float32; it must return the sum"),
        ("return 1.0", "loss returned a float; it must return the sum of its losses over all targets, a scalar tensor"),
        ("return targets_BL.sum()", r"loss returned a tensor of shape \(\), torch.int64"),
        ("return logits_BLV.sum().detach()", "loss returned a sum without a gradient"),
        ("return logits_BLV @ targets_BL", "line 2, in loss: RuntimeError"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(write: Write, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_extension(write(NO_LOSS + body)).loss_sum(*example_batch(), None)


def test_a_loss_gets_what_it_needs_and_its_sum_becomes_fp32(write: Write) -> None:
    extension = load_extension(write(NO_LOSS + "return (logits_BLV[..., 0] * weights_BL).sum().bfloat16()"))
    logits_BLV, targets_BL = example_batch()
    result = extension.loss_sum(logits_BLV, targets_BL, torch.ones(2, 3))
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(logits_BLV[..., 0].sum().item(), abs=0.05)


def test_a_loss_can_be_computed_where_no_gradient_is_wanted(write: Write) -> None:
    extension = load_extension(write(NO_LOSS + "return logits_BLV.sum()"))
    logits_BLV, targets_BL = example_batch()
    assert not extension.loss_sum(logits_BLV.detach(), targets_BL, None).requires_grad


def test_a_loss_can_be_compiled(write: Write) -> None:
    extension = load_extension(write(NO_LOSS + "return (logits_BLV.exp() * 2).sum()"))
    logits_BLV, targets_BL = example_batch()
    compiled = torch.compile(extension.loss_sum, backend="eager", fullgraph=True)
    assert torch.equal(compiled(logits_BLV, targets_BL, None), extension.loss_sum(logits_BLV, targets_BL, None))


def test_without_build_model_the_model_is_the_decoder() -> None:
    own, plain = seeded_model(Extension(), MODEL, 20, 5), build_model(MODEL, 20, 5)
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), plain.parameters(), strict=True))


def test_a_model_depends_on_the_seed_alone_and_building_it_disturbs_no_other_random_numbers() -> None:
    extension = load_extension(ROOT / "examples" / "model.py")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, other = (seeded_model(extension, MODEL, 20, seed).state_dict() for seed in (1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    again = seeded_model(extension, MODEL, 20, 1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "build_model returned a int; it must return a torch.nn.Module"),
        ("return nn.Linear(2, 2).double()", "whose weight is torch.float64 on cpu; build it in float32 on the CPU"),
        ("return nn.Linear(2, 2, device='meta')", "whose weight is torch.float32 on meta"),
        ("return nn.BatchNorm1d(2)", "whose buffer running_mean is part of its state, and checkpoints hold parameters only"),
        ("return nn.Linear(2, 2)", r"line 5, in build_model: TypeError: .*forward"),
        ("raise KeyError('x')", "line 6, in build_model: KeyError: 'x'"),
        (
            "class M(nn.Embedding):\n        def forward(self, t, layout): return super().forward(t)\n    return M(20, 19)",
            r"computes a tensor of shape \(1, 2, 19\), torch.float32 from 1 row of 2 tokens; .* logits of shape \(1, 2, 20\)",
        ),
        (
            "class M(nn.Embedding):\n        def forward(self, t, layout): return super().forward(t)[0]\n    return M(20, 20)",
            r"computes a tensor of shape \(2, 20\)",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_training(write: Write, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        seeded_model(load_extension(write(NO_MODEL + body)), MODEL, 20, 1)


def test_constant_buffers_are_no_part_of_a_models_state(write: Write) -> None:
    body = (
        "class M(nn.Embedding):\n        def forward(self, t, layout): return super().forward(t)\n"
        "    m = M(20, 20)\n    m.register_buffer('table', torch.ones(3), persistent=False)\n    return m"
    )
    model = seeded_model(load_extension(write(NO_MODEL + body)), MODEL, 20, 1)
    assert model.training


def test_the_example_loss_is_cross_entropy_at_gamma_0_and_less_for_sure_targets_otherwise() -> None:
    extension = load_extension(ROOT / "examples" / "loss.py")
    logits_BLV, targets_BL = example_batch()
    weights_BL = torch.tensor([[1.0, 0.5, 9.0], [0.0, 2.0, 9.0]])
    entropy_BL = functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="none").view(2, 3)
    p_BL = torch.where(targets_BL == IGNORE, 1.0, (-entropy_BL).exp())
    expected = (weights_BL * (1 - p_BL) * entropy_BL).sum()
    torch.testing.assert_close(extension.loss_sum(logits_BLV, targets_BL, weights_BL), expected)
    nothing_BL = torch.full_like(targets_BL, IGNORE)
    empty = extension.loss_sum(logits_BLV, nothing_BL, None)
    assert empty.item() == 0
    assert not torch.autograd.grad(empty, logits_BLV)[0].any()


def test_the_example_model_keeps_documents_apart() -> None:
    model = seeded_model(load_extension(ROOT / "examples" / "model.py"), MODEL, 20, 1)
    layout = make_layout(torch.tensor([[0, 0, 1, 1]], dtype=torch.int32), torch.tensor([[0, 1, 0, 1]]))
    before, after = (model(torch.tensor([[first, 2, 3, 4]]), layout) for first in (1, 5))
    assert torch.equal(before[:, 2:], after[:, 2:])
    assert not torch.equal(before[:, :2], after[:, :2])


def test_the_example_callbacks_end_a_run_that_gets_no_better(tmp_path: Path) -> None:
    extension = load_extension(ROOT / "examples" / "callbacks.py")

    def evaluate_at(step: int, best_step: int, rank: int = 0) -> None:
        progress = Progress(step=step, best_step=best_step)
        view: Any = RunView(rank, 2, tiny_config(tmp_path, tmp_path), nn.Linear(1, 1), progress)
        extension.notify("on_evaluate", view, SimpleNamespace(loss=1.5))

    evaluate_at(2999, 1000)
    for rank in (0, 1):  # all ranks must end
        with pytest.raises(ProjectError, match="has not fallen since step 1000"):
            evaluate_at(3000, 1000, rank)
    assert (tmp_path / "diary.jsonl").read_text().splitlines() == [
        '{"event": "evaluation", "step": 2999, "loss": 1.5}',
        '{"event": "evaluation", "step": 3000, "loss": 1.5}',
    ]


def test_what_a_hook_logs_is_returned_with_its_step(write: Write, run: RunView) -> None:
    lines = "def on_step_end(run, metrics):\n    run.log_scalar('a/b', torch.tensor([2.5]))\n    run.log_scalar('c', 3)\n"
    extension = load_extension(write(f"import torch\n{lines}def on_evaluate(run, evaluation): pass\n"))
    assert extension.notify("on_step_end", run, "metrics") == ScalarsEvent(3, "on_step_end", {"a/b": 2.5, "c": 3.0})
    assert extension.notify("on_evaluate", run, "evaluation") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("'', 1", r"'' cannot be a name; use 1 to 100 letters, digits and _ - . /"),
        ("'a b', 1", r"'a b' cannot be a name"),
        ("'a//b', 1", r"'a//b' cannot be a name"),
        ("'x' * 101, 1", r"'x{100}' cannot be a name"),
        ("3, 1", r"'3' cannot be a name"),
        ("'a', 'much'", r"'a' is .*; a number or a tensor with one element is needed"),
        ("'a', torch.zeros(2)", r"'a' is .*; a number or a tensor with one element is needed"),
        ("'a', None", r"'a' is .*; a number or a tensor with one element is needed"),
        ("'a', 1) or run.log_scalar('a', 2", r"'a' is logged twice in one call of a hook"),
    ],
)
def test_what_cannot_be_logged_is_refused_with_the_place(write: Write, run: RunView, words: str, message: str) -> None:
    extension = load_extension(write(f"import torch\ndef on_step_end(run, metrics):\n    run.log_scalar({words})\n"))
    with pytest.raises(ConfigError, match=rf"mine\.py, line 3, in on_step_end: log_scalar: {message}"):
        extension.notify("on_step_end", run, "metrics")


@pytest.mark.parametrize("name", ["on_train_start", "on_train_end"])
def test_a_hook_that_belongs_to_no_step_cannot_log(write: Write, run: RunView, name: str) -> None:
    extension = load_extension(write(f"def {name}(run): run.log_scalar('a', 1)\n"))
    with pytest.raises(ConfigError, match=rf"{name} calls run.log_scalar; only on_step_end, on_evaluate, on_save can"):
        extension.notify(name, run)

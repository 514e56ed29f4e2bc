"""A user's own Python file: called at named places of the training, or in place of the model or the loss.

The file defines plain functions by fixed names, all of them optional:

    on_train_start(run)                        before the first step, also of a run that goes on
    on_step_end(run, metrics)                  after each step; metrics: `trainer.metrics.StepMetrics`
    on_evaluate(run, evaluation)               after each validation; evaluation: `trainer.evaluate.Evaluation`
    on_save(run, step, path)                   once the checkpoint of a step is complete; its files: `checkpoint_files(path)`
    on_train_end(run)                          after the last save, also when a signal ended the training
    build_model(model_config, vocab_size)      returns the model: see `seeded_model`
    loss(logits_BLV, targets_BL, weights_BL)   returns the sum that is minimised: see `Extension.loss_sum`

`run` is a `RunView`. B rows of a micro-batch   L tokens of a row   V vocabulary
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from common.errors import ConfigError, ProjectError
from common.files import UnusableFileError, read_input
from common.untrusted import MAX_EXTENSION_BYTES
from trainer.config import ModelConfig, TrainConfig
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model
from trainer.state import Progress

__all__ = ["Extension", "RunView", "execute_extension", "load_extension", "seeded_model"]

_HOOKS = {
    "on_train_start": ("run",),
    "on_step_end": ("run", "metrics"),
    "on_evaluate": ("run", "evaluation"),
    "on_save": ("run", "step", "path"),
    "on_train_end": ("run",),
    "build_model": ("model_config", "vocab_size"),
    "loss": ("logits_BLV", "targets_BL", "weights_BL"),
}
_LIKENESS = 0.8


@dataclass(frozen=True)
class RunView:
    """What a hook sees of a run, at the moment it is called. Its parts cannot be replaced."""

    rank: int
    world_size: int
    config: TrainConfig
    model: nn.Module
    """The weights that are trained. They are the run's own, not a copy: whoever changes them changes the run. Under
    `parallel = fsdp` each rank has a part of them."""
    progress: Progress
    """How far the run has come."""

    @property
    def is_main(self) -> bool:
        """True on rank 0. Hooks are called on every rank; what writes files or sends messages asks this first."""
        return self.rank == 0


@dataclass(frozen=True)
class Extension:
    """The functions of a user's file, by name; none of them where there is no file."""

    path: Path | None = None
    source: bytes | None = field(default=None, repr=False)
    """The file's content when it was run."""
    hooks: Mapping[str, Callable[..., Any]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def digest(self) -> str | None:
        """sha256 of the file. It belongs to a run's identity, because model and loss change the bits."""
        return None if self.source is None else f"sha256:{hashlib.sha256(self.source).hexdigest()}"

    @property
    def loss(self) -> Callable[..., Any] | None:
        """The user's loss as it stands in the file; training calls it through `loss_sum`."""
        return self.hooks.get("loss")

    @property
    def own_loss(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
        """`loss_sum` where the file has a loss, else None."""
        return None if self.loss is None else self.loss_sum

    @property
    def build_model(self) -> Callable[..., Any] | None:
        """The user's model as it stands in the file; it is called through `seeded_model`."""
        return self.hooks.get("build_model")

    def train_start(self, run: RunView) -> None:
        """Before the first step of this process. Raises as `loss_sum` does, as all that follow."""
        self._notify("on_train_start", run)

    def step_end(self, run: RunView, metrics: object) -> None:
        """After each step."""
        self._notify("on_step_end", run, metrics)

    def evaluated(self, run: RunView, evaluation: object) -> None:
        """After each validation."""
        self._notify("on_evaluate", run, evaluation)

    def saved(self, run: RunView, step: int, path: Path) -> None:
        """Once a checkpoint is complete."""
        self._notify("on_save", run, step, path)

    def train_end(self, run: RunView) -> None:
        """After the last save of this process."""
        self._notify("on_train_end", run)

    def loss_sum(self, logits_BLV: Tensor, targets_BL: Tensor, weights_BL: Tensor | None) -> Tensor:
        """The user's loss, summed over all targets, as a fp32 scalar.

        Args:
            logits_BLV: in the type of the computation, bf16 for example; `.float()` before any exponential.
            targets_BL: int64 ids, `trainer.data.batch.IGNORE` where there is no target; there may be none at all.
            weights_BL: fp32 weight of each target, or None where all count alike.

        Raises:
            ConfigError: the function failed, or returned something else; the message names file, line and function.
            ProjectError: the function raised one itself, which keeps its kind and exit code.
        """
        try:
            result = self.hooks["loss"](logits_BLV, targets_BL, weights_BL)
        except Exception as error:
            self._fail("loss", error)
        if not isinstance(result, Tensor) or result.ndim or not result.is_floating_point():
            raise self._wrong("loss", f"returned {_described(result)}; it must return the sum over all targets, a scalar tensor")
        if logits_BLV.requires_grad and not result.requires_grad:
            raise self._wrong("loss", "returned a sum without a gradient; compute it from logits_BLV, without .detach() or .item()")
        return result.float()

    def _notify(self, name: str, run: RunView, *arguments: object) -> None:
        hook = self.hooks.get(name)
        if hook is None:
            return
        training = run.model.training
        try:
            with torch.no_grad():  # and whatever the hook does to the gradient mode ends here
                hook(run, *arguments)
        except (Exception, SystemExit) as error:
            self._fail(name, error)
        finally:
            if run.model.training != training:
                run.model.train(training)

    def _fail(self, name: str, error: BaseException) -> NoReturn:
        place = f"{_place(self.path, _line_in(self.path, error) or _line_of(self.hooks[name]))}, in {name}"
        if isinstance(error, torch.OutOfMemoryError):  # the trainer answers with smaller micro-batches
            raise error
        if isinstance(error, ProjectError):
            error.args = (f"{place}: {error}",)
            raise error
        raise ConfigError(f"{place}: {type(error).__name__}: {error}; correct the file, or train without --extension") from error

    def _wrong(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{_place(self.path, _line_of(self.hooks[name]))}: {name} {what}")


def load_extension(path: Path | None) -> Extension:
    """Reads a user's file and executes it: see `execute_extension`. None gives an empty extension.

    Raises:
        ConfigError: as `execute_extension`, or the file cannot be read.
    """
    if path is None:
        return Extension()
    try:
        source = read_input(path, MAX_EXTENSION_BYTES)
    except (OSError, UnusableFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"extension = {path}: cannot be read ({reason}); name a Python file") from None
    return execute_extension(path, source)


def execute_extension(path: Path, source: bytes) -> Extension:
    """Runs a user's file once, as a separate module, and takes the functions that it defines.

    The file can import what is installed; its own directory is not searched.

    Args:
        path: of the file, for messages; it is not read again.
        source: its content.

    Raises:
        ConfigError: the file cannot be run, defines none of the functions, one with other arguments, or one whose name is nearly
            that of another.
    """
    module = _run_file(path, source)
    _refuse_near_misses(path, module)
    hooks = {name: getattr(module, name) for name in _HOOKS if hasattr(module, name)}
    if not hooks:
        raise ConfigError(f"{path}: defines none of {', '.join(_HOOKS)}; define at least one, or train without --extension")
    for name, hook in hooks.items():
        _check_signature(path, name, hook)
    return Extension(path, source, MappingProxyType(hooks))


def seeded_model(extension: Extension, config: ModelConfig, vocab_size: int, seed: int) -> nn.Module:
    """The user's model with fresh weights, or the decoder where there is none: the same for the same seed (CPU, fp32).

    A user's `build_model(model_config, vocab_size)` returns a module with `forward(tokens_BL, layout)`, which gives the logits
    (B, L, V or more) of the next token; `layout` is a `trainer.model.attention.Layout`. It takes random numbers from torch's global
    generator, which is seeded here and afterwards as it was before. One pass over two tokens tries the model.

    Raises:
        ConfigError: the function or that pass failed, or the model is not what is described here; the message names the file.
    """
    if extension.build_model is None:
        return build_model(config, vocab_size, seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = extension.build_model(config, vocab_size)
        except Exception as error:
            extension._fail("build_model", error)
        fault = _fault_of_model(model)
        if fault:
            raise extension._wrong("build_model", fault)
        try:
            logits_BLV = _try_model(model)
        except Exception as error:
            extension._fail("build_model", error)
    if not isinstance(logits_BLV, Tensor) or logits_BLV.shape[:2] != (1, 2) or logits_BLV.shape[2:] < (vocab_size,):
        raise extension._wrong(
            "build_model",
            f"returned a model that makes {_described(logits_BLV)} of 1 row of 2 tokens; its forward(tokens_BL, layout) must "
            f"return logits of shape (1, 2, {vocab_size}), or more in the last place",
        )
    return cast(nn.Module, model)


def _run_file(path: Path, source: bytes) -> ModuleType:
    name = f"trainer_extension_{hashlib.sha256(source).hexdigest()[:16]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        # Compiled here and not by the import system: what runs is what the digest was made of, never a stale .pyc.
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        line = error.lineno if isinstance(error, SyntaxError) else _line_in(path, error)
        raise ConfigError(
            f"{_place(path, line)}: {type(error).__name__}: {error}; correct the file, or train without --extension"
        ) from error
    return module


def _refuse_near_misses(path: Path, module: ModuleType) -> None:
    """A function that was meant as a hook and never called would be missed too late."""
    for name, value in vars(module).items():
        own = inspect.isfunction(value) and value.__module__ == module.__name__
        if name in _HOOKS or name.startswith("_") or not (own or name.startswith("on_")):
            continue
        nearest = difflib.get_close_matches(name.lower(), _HOOKS, n=1, cutoff=0 if name.startswith("on_") else _LIKENESS)
        if nearest:
            raise ConfigError(
                f"{_place(path, _line_of(value))}: nothing calls {name}; did you mean {nearest[0]}? "
                f"If it is a function for the file's own use, begin its name with an underscore"
            )


def _check_signature(path: Path, name: str, hook: object) -> None:
    wanted = f"def {name}({', '.join(_HOOKS[name])})"
    if not callable(hook):
        raise ConfigError(f"{path}: {name} is {_described(hook)}; it must be a function, {wanted}")
    if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
        raise ConfigError(
            f"{_place(path, _line_of(hook))}: {name} is async or has a yield, and would not run when called; use {wanted}"
        )
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some built-in functions tell nothing about their arguments
        return
    try:
        signature.bind(*_HOOKS[name])
    except TypeError:
        raise ConfigError(
            f"{_place(path, _line_of(hook))}: {name}{signature} is called with other arguments; use {wanted}"
        ) from None


def _fault_of_model(model: object) -> str | None:
    if not isinstance(model, nn.Module):
        return f"returned {_described(model)}; it must return a torch.nn.Module"
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            return (
                f"returned a model whose {name} is {parameter.dtype} on {parameter.device}; build it in float32 on the CPU, "
                "the trainer moves it and computes in the run's precision"
            )
    saved = model.state_dict()
    for name, _ in model.named_buffers():
        if name in saved:
            return (
                f"returned a model whose buffer {name} is part of its state, and checkpoints hold parameters only; "
                "register it with persistent=False if it never changes, or make it a parameter"
            )
    return None


@torch.no_grad()
def _try_model(model: nn.Module) -> object:
    """What the model returns for two tokens of one document."""
    training = model.training
    segments_BL = torch.zeros(1, 2, dtype=torch.int32)
    try:
        return model.eval()(torch.zeros(1, 2, dtype=torch.int64), make_layout(segments_BL, torch.arange(2)[None]))
    finally:
        model.train(training)


def _place(path: Path | None, line: int | None) -> str:
    return f"{path}" if line is None else f"{path}, line {line}"


def _line_in(path: Path | None, error: BaseException) -> int | None:
    """The line of the file in which an error was raised, or through which it passed last."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None


def _line_of(function: object) -> int | None:
    """The line in which a function begins."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return None if code is None else cast(int, code.co_firstlineno)


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

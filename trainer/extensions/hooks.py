"""The functions that an extension may define, their calls and the checks of their results, and the view of a run that hooks get."""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from common.errors import ConfigError, ProjectError
from trainer.config import ModelConfig, TrainConfig
from trainer.extensions.files import Digests, digests_of
from trainer.machine.memory import is_out_of_memory
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model
from trainer.runs.events import ScalarsEvent
from trainer.runs.state import Evaluated, Progress


def place_of(path: Path | None, cause: object) -> str:
    """Return the file and line of an error in the files at `path`, or of a function; `path` if there is none."""
    if isinstance(cause, BaseException):
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(cause.__traceback__)]
        if isinstance(cause, SyntaxError):
            places.append((cause.filename or "", cause.lineno))
    else:
        code = getattr(inspect.unwrap(cause) if callable(cause) else cause, "__code__", None)
        places = [] if code is None else [(code.co_filename, code.co_firstlineno)]
    own = [f"{file}, line {line}" for file, line in places if path is not None and Path(file).is_relative_to(path)]
    return own[-1] if own else f"{path}"


def described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


HOOKS = {  # the functions and their arguments; `run` is a `RunView`
    "on_train_start": ("run",),  # before the first step, also of a resumed run
    "on_step_end": ("run", "metrics"),  # after each step; metrics: `trainer.api.StepMetrics`
    "on_evaluate": ("run", "evaluation"),  # after each evaluation; evaluation: `trainer.api.Evaluation`
    "on_save": ("run", "step", "path"),  # once the checkpoint of a step is complete; `path` holds it whole
    "on_train_end": ("run",),  # after the last save, also if a signal stopped the training
    "build_model": ("model_config", "vocab_size"),  # returns the model: see `seeded_model`
    "loss": ("logits_BLV", "targets_BL", "weights_BL"),  # returns the sum to minimise: see `Extension.loss_sum`
    "training_step": ("micro",),  # makes the passes of a micro-batch: see `MicroStep` and `Extension.step_loss`
}
LIKENESS = 0.8
_CURVE = re.compile(r"[\w.-]+(?:/[\w.-]+)*", re.ASCII)
_LONGEST_NAME = 100
_FACTOR = 3.0  # to which the first loss of an extension may differ from cross-entropy
_LOGGING = ("on_step_end", "on_evaluate", "on_save")


@dataclass(frozen=True)
class RunView:
    """The state of a run at the moment of a hook call. Its fields cannot be replaced."""

    rank: int
    world_size: int
    config: TrainConfig
    model: nn.Module
    """The trained model, not a copy: changes to its weights change the run. Under `parallel = fsdp` each rank has a part."""
    progress: Progress
    """The counters of the run."""
    _scalars: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0. Hooks are called on every rank, so check this before you write files or send messages."""
        return self.rank == 0

    def log_scalar(self, name: str, value: float | Tensor) -> None:
        """Add a point to your own curve, at the step `progress.step`.

        The curve is in `metrics.jsonl`, in TensorBoard as `extension/NAME`, and in the other services. Call it on every rank or on
        some: only the values of rank 0 are kept. It works in `on_step_end`, `on_evaluate` and `on_save`.

        Args:
            name: up to 100 letters, digits and `_ - . /`.
            value: a number, or a tensor with one element. It need not be finite.

        Raises:
            ConfigError: the name or the value cannot be used, or the name was used in this call of the hook already.
        """
        if not (isinstance(name, str) and len(name) <= _LONGEST_NAME and _CURVE.fullmatch(name)):
            raise ConfigError(
                f"log_scalar: {str(name)[:_LONGEST_NAME]!r} cannot be a name; use 1 to {_LONGEST_NAME} letters, digits and _ - . /"
            )
        if name in self._scalars:
            raise ConfigError(f"log_scalar: {name!r} is logged twice in one call of a hook; use two names")
        try:
            self._scalars[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            found = described(value)
            raise ConfigError(f"log_scalar: {name!r} is {found}; a number or a tensor with one element is needed") from None


@dataclass(frozen=True)
class Extension:
    """The functions of a user's file or package by name; empty if there is none."""

    path: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}), repr=False)  # those that were executed
    hooks: Mapping[str, Callable[..., Any]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def digests(self) -> Digests | None:
        # they belong to the identity of a run, because model and loss change the bits
        return digests_of(self.files) if self.files else None

    @property
    def custom_loss(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
        return self.loss_sum if "loss" in self.hooks else None

    @property
    def has_step(self) -> bool:
        return "training_step" in self.hooks

    @property
    def build_model(self) -> Callable[..., Any] | None:
        return self.hooks.get("build_model")

    def loss_sum(self, logits_BLV: Tensor, targets_BL: Tensor, weights_BL: Tensor | None) -> Tensor:
        """Return the user's loss, summed over all targets. A ProjectError keeps its class; other failures become ConfigErrors."""
        result = self._scalar("loss", logits_BLV, targets_BL, weights_BL)
        if logits_BLV.requires_grad and not result.requires_grad:
            raise self._wrong("loss", "returned a sum without a gradient; compute it from logits_BLV, without .detach() or .item()")
        return result.float()

    def step_loss(self, micro: Any) -> Tensor:
        """Let the user's training step make all passes of a `MicroStep`. Return the sum of its losses, without a gradient."""
        result = self._scalar("training_step", micro)
        if not micro.num_backward:
            raise self._wrong("training_step", "made no backward pass; call micro.backward with a sum of losses")
        return result.detach().float()

    def _scalar(self, name: str, *arguments: object) -> Tensor:
        try:
            result = self.hooks[name](*arguments)
        except Exception as error:
            self._fail(name, error)
        if not isinstance(result, Tensor) or result.ndim or not result.is_floating_point():
            wanted = "the sum of its losses over all targets, a scalar tensor"
            raise self._wrong(name, f"returned {described(result)}; it must return {wanted}")
        return result

    def notify(self, name: str, run: RunView, *arguments: object) -> ScalarsEvent | None:
        """Call a hook if the file has it. Return what it logged. Errors are those of `loss_sum`."""
        hook = self.hooks.get(name)
        if hook is None:
            return None
        training = run.model.training
        try:
            with torch.no_grad():  # also restores a gradient mode that the hook changes
                hook(run, *arguments)
        except (Exception, SystemExit) as error:
            self._fail(name, error)
        finally:
            if run.model.training != training:
                run.model.train(training)
        values = dict(run._scalars)
        run._scalars.clear()
        if not values:
            return None
        if name not in _LOGGING:
            raise self._wrong(name, f"calls run.log_scalar; only {', '.join(_LOGGING)} can, because other hooks belong to no step")
        return ScalarsEvent(run.progress.step, name, values)

    def _fail(self, name: str, error: BaseException) -> NoReturn:
        place = place_of(self.path, error)
        place = f"{place_of(self.path, self.hooks[name]) if place == str(self.path) else place}, in {name}"
        if is_out_of_memory(error):  # the trainer continues with smaller micro-batches
            raise error
        if isinstance(error, ProjectError):
            error.args = (f"{place}: {error}",)
            raise error
        raise ConfigError(f"{place}: {type(error).__name__}: {error}; correct the file, or train without --extension") from error

    def _wrong(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{place_of(self.path, self.hooks[name])}: {name} {what}")


def initial_loss_warning(loss: float, evaluations: Sequence[Evaluated], vocab_size: int) -> str | None:
    """Return a warning if the loss of the first step differs from the cross-entropy of the same weights by a factor of 3 or more.

    A loss that returns a mean, or a sum over something other than the targets, is wrong by a factor of 4 or more in any real batch.
    Without an evaluation, the cross-entropy is that of equal probabilities, `ln(vocab_size)`.
    """
    measured = evaluations[0].val_loss if evaluations else math.log(vocab_size)
    if not measured or not math.isfinite(loss) or 1 / _FACTOR <= loss / measured <= _FACTOR:
        return None
    return (
        f"the loss of the extension is {loss:.4g} for each target in the first step, and the cross-entropy of the same weights is "
        f"about {measured:.4g}; a loss must be the sum over all targets of a micro-batch, not their mean, because the trainer "
        "divides it by their number. If this is intended, the learning rate and optim.clip_norm may need other values"
    )


def seeded_model(extension: Extension, config: ModelConfig, vocab_size: int, seed: int) -> nn.Module:
    """Return the user's model, or the decoder if the extension has none, with new weights that depend only on the seed (CPU, fp32).

    A user's `build_model(model_config, vocab_size)` takes random numbers from torch's global generator, which is seeded here and
    restored afterwards. A pass over two tokens tests that `forward(tokens_BL, layout)` returns logits (B, L, V or more).
    """
    if extension.build_model is None:
        return build_model(config, vocab_size, seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = extension.build_model(config, vocab_size)
        except Exception as error:
            extension._fail("build_model", error)
        if fault := _fault_of_model(model):
            raise extension._wrong("build_model", fault)
        layout = make_layout(torch.zeros(1, 2, dtype=torch.int32), torch.arange(2)[None])
        training = model.training
        try:
            with torch.no_grad():
                logits_BLV = model.eval()(torch.zeros(1, 2, dtype=torch.int64), layout)
        except Exception as error:
            extension._fail("build_model", error)
        finally:
            model.train(training)
    if not isinstance(logits_BLV, Tensor) or logits_BLV.shape[:2] != (1, 2) or logits_BLV.shape[2:] < (vocab_size,):
        raise extension._wrong(
            "build_model",
            f"returned a model that computes {described(logits_BLV)} from 1 row of 2 tokens; its forward(tokens_BL, layout) must "
            f"return logits of shape (1, 2, {vocab_size}) or with a larger last axis",
        )
    return cast(nn.Module, model)


def _fault_of_model(model: object) -> str | None:
    if not isinstance(model, nn.Module):
        return f"returned {described(model)}; it must return a torch.nn.Module"
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

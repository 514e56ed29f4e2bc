"""The hooks that an extension may have, and what they see of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from common.errors import ConfigError, ProjectError
from trainer.config import TrainConfig
from trainer.extensions.places import described, line_in, line_of, place_of
from trainer.run.progress import Progress

__all__ = ["HOOKS", "LIKENESS", "Extension", "RunView"]

HOOKS = {
    "on_train_start": ("run",),
    "on_step_end": ("run", "metrics"),
    "on_evaluate": ("run", "evaluation"),
    "on_save": ("run", "step", "path"),
    "on_train_end": ("run",),
    "build_model": ("model_config", "vocab_size"),
    "loss": ("logits_BLV", "targets_BL", "weights_BL"),
}
LIKENESS = 0.8


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
    def own_loss(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
        """`loss_sum` where the file has a loss, else None."""
        return self.loss_sum if "loss" in self.hooks else None

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
            targets_BL: int64 ids, `trainer.api.IGNORE` where there is no target; there may be none at all.
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
            raise self._wrong("loss", f"returned {described(result)}; it must return the sum over all targets, a scalar tensor")
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
        place = f"{place_of(self.path, line_in(self.path, error) or line_of(self.hooks[name]))}, in {name}"
        if isinstance(error, torch.OutOfMemoryError):  # the trainer answers with smaller micro-batches
            raise error
        if isinstance(error, ProjectError):
            error.args = (f"{place}: {error}",)
            raise error
        raise ConfigError(f"{place}: {type(error).__name__}: {error}; correct the file, or train without --extension") from error

    def _wrong(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{place_of(self.path, line_of(self.hooks[name]))}: {name} {what}")

"""`verify_run` and `replay_run` with the training loop of this program."""

from __future__ import annotations

from functools import partial

from trainer.loop import train
from trainer.verification import replay, verify

_TRAIN = partial(train, trust_extension=False)
replay_run = partial(replay.replay_run, train=_TRAIN)
verify_run = partial(verify.verify_run, train=_TRAIN)

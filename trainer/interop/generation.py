"""The `generation_config.json` of a published model: the tokens that end its texts, and advice for sampling."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import ConfigError
from common.files import parse_json, read_input
from common.settings.messages import explain
from common.untrusted import Schema
from data_pipeline.tokenizer import Tokenizer
from trainer.inference.sampling_options import SamplingOptions
from trainer.runs.saved_run import SavedRun

GENERATION = "generation_config.json"
_MAX_BYTES = 1 << 20


class _Ends(Schema):
    eos_token_id: int | list[int] | None = None


_ADVICE = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_log = logging.getLogger(__name__)


def read_generation(directory: Path, config: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the advice that the file gives, and tell the tokenizer which ids end a text.

    As in transformers, `config`, the file of the model's shape, names the ends if there is no `generation_config.json`.
    """
    values = _content(directory / GENERATION)
    source = directory / (config if values is None else GENERATION)
    try:
        found = _Ends.model_validate(values if values is not None else _content(source) or {}).eos_token_id
        ends = [] if found is None else found if isinstance(found, list) else [found]
        known = [one for one in ends if 0 <= one < tokenizer.vocab_size]
        if len(known) < len(ends):  # such ids are never drawn, so they end no text in transformers either
            _log.warning("%s: ids of ends that no token has are left out: %s", source, sorted(set(ends) - set(known)))
        tokenizer.use_as(tokenizer.usage | {"eos_token_ids": known})
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(_Ends, error)}; correct the file") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}; correct the file") from None
    advice = {name: values[name] for name in _ADVICE if values and values.get(name) is not None}
    for name, value in list(advice.items()):
        try:
            sampling_of({name: value})
        except ValueError:
            _log.warning("%s: %s = %s is no value of the sampling here, and is left out", source, name, str(value)[:40])
            del advice[name]
    return advice


def advised_sampling(run: Path) -> SamplingOptions:
    """Return the sampling of `generate` for a run, unless options say otherwise."""
    return sampling_of(SavedRun(run).record.generation or {})


def sampling_of(advice: Mapping[str, Any]) -> SamplingOptions:
    """Return what the advice means for `generate`. ValueError: a value that no sampling can have."""
    known = {name: value for name, value in advice.items() if name in SamplingOptions.model_fields}
    if advice.get("do_sample") is False:
        known = {name: value for name, value in known.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    if known.get("top_k") in (0, -1):  # all tokens
        del known["top_k"]
    return SamplingOptions(**known)


def _content(path: Path) -> dict[str, Any] | None:
    try:
        values = parse_json(read_input(path, _MAX_BYTES, below=path.parent))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; correct the file") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: it is not a JSON object; correct the file")
    return values

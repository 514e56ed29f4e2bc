"""Settings that the first look at the input decides: the form of records, and documents from a few large text files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from common.errors import ConfigError
from common.settings.load import AUTO
from common.settings.model import keep_set
from data_pipeline.config import PrepareConfig, SourceConfig
from data_pipeline.documents import Rejection
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.inputs import InputFile, Part
from data_pipeline.sources.parsers.fields import Form, form_of
from data_pipeline.sources.parsers.text_files import TEXT
from data_pipeline.sources.readers import read_part

_FEW_FILES = 10
_NO_FIELD = "\0"
"""The name of a text field that no record has: the parser then says which fields there are."""

logger = logging.getLogger(__name__)


def adapted(config: PrepareConfig, inputs: Sequence[InputFile]) -> PrepareConfig:
    """Return the settings, with those changed that the input decides and the user has not set. Each change is logged."""
    is_text = all(file.format == TEXT.name and file.kind != "code" for file in inputs)
    if config.recipe == AUTO and is_text and len(inputs) < _FEW_FILES and "documents" not in config.text.model_fields_set:
        logger.info("text.documents = chunks, because the input is %d text file%s", len(inputs), "s" * (len(inputs) > 1))
        config = _with(config, "text", {"documents": "chunks"})
    own = (config.by_place[place].records for place in config.by_place)
    if not config.chat.is_on or any(one.prompt_field or one.chat_fields or "text_field" in one.model_fields_set for one in own):
        return config
    forms = _forms(config, inputs)
    settings = [{} if form is None else form.settings for form in forms.values()]
    if all(one == settings[0] for one in settings):
        return _with(config, "records", settings[0]) if any(settings) else config
    if len({"chosen_field" in one for one in settings}) > 1:
        named = "; ".join(f"{source}: {'texts' if form is None else form.name}" for source, form in forms.items())
        raise ConfigError(f"some sources have preference pairs and others do not ({named}); prepare them into two folders")
    sources = dict(config.source)
    for source, own_settings in zip(forms, settings, strict=True):
        before = sources.get(source) or SourceConfig(paths=(source,))
        sources[source] = before.model_copy(update={"records": before.records | dict(own_settings)})
    return config.model_copy(update={"source": sources})


def _forms(config: PrepareConfig, inputs: Sequence[InputFile]) -> dict[str, Form | None]:
    """Return the form of the records of each source, by its first one; None for texts. Each form is logged."""
    forms: dict[str, Form | None] = {}
    texts = []
    for file in inputs:
        if file.source in forms or (file.format in FORMATS and FORMATS[file.format].markup != "records"):
            continue
        own = config.for_source(file.source)
        first = next(read_part(Part(file, 0, file.bytes), _with(own, "records", {"text_field": _NO_FIELD})), None)
        fields = first.fields if isinstance(first, Rejection) else ()
        forms[file.source] = form = form_of(fields)
        if form is not None:
            logger.info("the records are %s, by the first one of %s: %s", form.name, file.path, form.words)
        elif config.records.text_field in fields:
            texts.append(file.path)
    if texts and not any(forms.values()):
        logger.warning(
            "the records are texts, by the first one of %s, so chat.template has no effect; if they are conversations, name their "
            "fields in records",
            texts[0],
        )
    return forms


def _with(config: PrepareConfig, section: str, values: Any) -> PrepareConfig:
    before = getattr(config, section)
    after = type(before)(**before.model_dump() | dict(values))
    keep_set(after, before.model_fields_set | values.keys())
    return config.model_copy(update={section: after})

"""What a setting is, declared in its type: `min_chars: ShapesData[int] = Field(20, ge=1)`.

Every setting has exactly one effect, or its module cannot be imported. Code that treats settings by what they are asks
`settings_with`, so that no other list names them.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeVar

__all__ = ["Effect", "NoEffectOnResults", "ShapesData", "ShapesDataByContent", "ShapesDataIfChanged", "SharedBySources"]

T = TypeVar("T")


class Effect(Enum):
    """What a setting changes."""

    SHAPES_DATA = "the prepared bytes; a manifest holds the value"
    SHAPES_DATA_IF_CHANGED = "the prepared bytes; a manifest holds a value other than the default, as older ones lack the setting"
    SHAPES_DATA_BY_CONTENT = "the prepared bytes, by the content of the file; a manifest holds its digest, and no path"
    NONE = "no result: where and how the work is done"


class SharedBySources:
    """Marks a setting that a source cannot override, because all sources share the model that it configures."""


ShapesData = Annotated[T, Effect.SHAPES_DATA]
ShapesDataIfChanged = Annotated[T, Effect.SHAPES_DATA_IF_CHANGED]
ShapesDataByContent = Annotated[T, Effect.SHAPES_DATA_BY_CONTENT]
NoEffectOnResults = Annotated[T, Effect.NONE]

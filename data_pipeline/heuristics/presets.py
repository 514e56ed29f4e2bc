from __future__ import annotations

from data_pipeline.heuristics.code import CODE
from data_pipeline.heuristics.gopher import QUALITY, REPETITION
from data_pipeline.heuristics.spam import SPAM
from data_pipeline.heuristics.web import C4, FINEWEB

PRESETS = {preset.name: preset for preset in (QUALITY, REPETITION, C4, FINEWEB, SPAM, CODE)}

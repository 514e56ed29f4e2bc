"""The settings of `prepare`."""

from data_pipeline.config.effects import settings_without_effect
from data_pipeline.config.filters import HeuristicSettings, LanguageSettings, QualitySettings
from data_pipeline.config.limits import LimitSettings
from data_pipeline.config.prepare import PrepareConfig, SourceSettings
from data_pipeline.config.selection import FIM_TOKENS, AugmentSettings, BalanceSettings, DedupSettings, SplitSettings
from data_pipeline.config.shaping import named_files, portable_settings, shaping_settings
from data_pipeline.config.text import BUILTIN, KINDS, CleanSettings, HtmlSettings, Kind, RecordSettings, TextSettings
from data_pipeline.config.tokens import CHAT_TOKENS, ChatSettings, PackingSettings, TokenizerSettings

__all__ = [
    "BUILTIN",
    "CHAT_TOKENS",
    "FIM_TOKENS",
    "KINDS",
    "AugmentSettings",
    "BalanceSettings",
    "ChatSettings",
    "CleanSettings",
    "DedupSettings",
    "HeuristicSettings",
    "HtmlSettings",
    "Kind",
    "LanguageSettings",
    "LimitSettings",
    "PackingSettings",
    "PrepareConfig",
    "QualitySettings",
    "RecordSettings",
    "SourceSettings",
    "SplitSettings",
    "TextSettings",
    "TokenizerSettings",
    "named_files",
    "portable_settings",
    "settings_without_effect",
    "shaping_settings",
]

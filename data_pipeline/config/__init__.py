"""The settings of `prepare`."""

from data_pipeline.config.filters import HeuristicConfig, LanguageConfig, QualityConfig
from data_pipeline.config.prepare import PrepareConfig, SourceConfig, settings_without_effect
from data_pipeline.config.selection import FIM_TOKENS, AugmentConfig, BalanceConfig, DedupConfig, SplitConfig
from data_pipeline.config.shaping import cleaning_of, content_settings, named_files, portable_settings, shaping_settings
from data_pipeline.config.text import BUILTIN, KINDS, CleanConfig, HtmlConfig, Kind, LimitConfig, RecordConfig, TextConfig
from data_pipeline.config.tokens import CHAT_TOKENS, ChatConfig, PackingConfig, TokenizerConfig

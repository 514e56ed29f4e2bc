"""All settings of `prepare`, with units, bounds and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from common.settings.messages import explain
from common.settings.model import Section, Settings, with_nones
from data_pipeline.config.filters import HeuristicSettings, LanguageSettings, QualitySettings
from data_pipeline.config.limits import LimitSettings
from data_pipeline.config.selection import AugmentSettings, BalanceSettings, DedupSettings, SplitSettings
from data_pipeline.config.shaping import portable_settings
from data_pipeline.config.text import BUILTIN, CleanSettings, HtmlSettings, Kind, RecordSettings, TextSettings
from data_pipeline.config.tokens import PackingSettings, TokenizerSettings

__all__ = ["PrepareConfig", "SourceSettings"]

_MIB = 1 << 20
OVERRIDABLE = ("text", "records", "html", "clean", "heuristics", "language", "quality")
"""The sections that a source may set for itself."""
FOR_ALL_SOURCES = {
    "language": {"fasttext_model"},
    "quality": {"trusted", "good", "bad", "reference_tokens", "reference_bits", "classifier_bits"},
}
"""Settings in these sections that belong to models, of which there is one for all sources."""


class SourceSettings(Section):
    """One source of a recipe, `[prepare.source.NAME]`. Its tables `clean`, `quality`, … hold what differs from the rest."""

    paths: tuple[str, ...] = Field(min_length=1, description="folders, files, globs or URLs")
    kind: Kind | None = Field(None, description="what sort of text it is; none tells it from each file's extension")
    weight: float = Field(1.0, gt=0, description="share of the training tokens, relative to the other sources; see balance")
    max_bytes: int | None = Field(None, ge=1, description="input taken, in bytes, files in name order, the last one whole")
    text: dict[str, Any] = Field(default_factory=dict, description="what differs from [prepare.text]")
    records: dict[str, Any] = Field(default_factory=dict, description="what differs from [prepare.records]")
    html: dict[str, Any] = Field(default_factory=dict, description="what differs from [prepare.html]")
    clean: dict[str, Any] = Field(default_factory=dict, description="what differs from [prepare.clean]")
    heuristics: dict[str, Any] = Field(default_factory=dict, description="what differs from [prepare.heuristics]")
    language: dict[str, Any] = Field(default_factory=dict, description="what differs from [prepare.language]")
    quality: dict[str, Any] = Field(default_factory=dict, description="what differs from [prepare.quality]")


class PrepareConfig(Settings):
    """Everything `prepare` can be told."""

    environment_prefix: ClassVar[str] = "PREP_"
    recipe_table: ClassVar[str] = "prepare"

    recipe: str | None = Field(None, description="name of a recipe in env/recipes, or a .toml file")
    sources: tuple[str, ...] = Field(
        (), description="folders, files or globs with text; the word builtin is the text of Python's own standard library"
    )
    source: dict[str, SourceSettings] = Field(default_factory=dict, description="sources with their own settings; in recipes only")
    output: Path = Field(Path("workspace/data"), description="folder that receives the prepared data")
    workers: int | None = Field(
        None, ge=1, le=4096, description="worker processes; none means one per core. Never changes the result"
    )
    engine: Literal["local", "ray"] = Field("local", description="where work is done: processes of this machine, or a Ray cluster")
    ray_address: str | None = Field(
        None, description="address of the Ray cluster; none joins the one that RAY_ADDRESS names, or starts one on this machine"
    )
    if_empty: Literal["error", "builtin"] = Field("error", description="what to do when the sources hold no text")
    keep_rejects: bool = Field(False, description="write a sample of the rejected documents to rejects.jsonl")
    replace: bool = Field(
        False,
        description="replace finished data in the output folder, although it was made with other settings or from other text; "
        "false refuses it",
    )
    row_length: int = Field(1024, ge=8, le=1 << 20, description="tokens in a row; a row of L tokens has up to L-1 targets")
    partition_bytes: int = Field(16 * _MIB, ge=1024, description="input bytes in one unit of work; small files are put together")
    text: TextSettings = Field(default_factory=TextSettings, description="plain text files (.txt, .md, …)")
    records: RecordSettings = Field(default_factory=RecordSettings, description="JSON Lines, CSV, TSV and Parquet")
    html: HtmlSettings = Field(default_factory=HtmlSettings, description="HTML to text")
    clean: CleanSettings = Field(default_factory=CleanSettings, description="normalisation and length")
    heuristics: HeuristicSettings = Field(default_factory=HeuristicSettings, description="rules of thumb about the form of a text")
    language: LanguageSettings = Field(default_factory=LanguageSettings, description="language identification")
    dedup: DedupSettings = Field(default_factory=DedupSettings, description="exact and near duplicates")
    quality: QualitySettings = Field(default_factory=QualitySettings, description="perplexity and content classifier")
    balance: BalanceSettings = Field(default_factory=BalanceSettings, description="shares of sources or classes")
    augment: AugmentSettings = Field(default_factory=AugmentSettings, description="changes to training documents")
    split: SplitSettings = Field(default_factory=SplitSettings, description="training and validation")
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings, description="text to tokens")
    packing: PackingSettings = Field(default_factory=PackingSettings, description="tokens to rows and shards")
    limits: LimitSettings = Field(default_factory=LimitSettings, description="budgets for broken or hostile input")

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if not self.sources and not self.source and self.if_empty == "error":
            raise ValueError(f"sources is not set; give --sources PATH, or the word {BUILTIN} for the built-in corpus")
        own = {f"source.{name}.": self.for_source(name) for name in self.source}
        of_sources = own if own and not self.sources else {"": self} | own
        for place, config in of_sources.items():
            if self.split.by == "tail" and config.text.documents != "chunks":
                raise ValueError(
                    f"split.by = tail cuts files by position, but {place}text.documents = {config.text.documents}; "
                    f"set {place}text.documents to chunks, or split.by to content"
                )
        if self.balance.field is not None and all(self.balance.field not in one.records.metadata for one in of_sources.values()):
            raise ValueError(
                f"balance.field = {self.balance.field}, but no source keeps a field of this name; add it to records.metadata"
            )
        return self

    def for_source(self, name: str) -> PrepareConfig:
        """These settings with what the source `name` sets for itself.

        Raises:
            ValueError: a setting of the source is unknown or out of range.
        """
        own = self.source.get(name)
        if own is None:
            return self
        update = {}
        for section in OVERRIDABLE:
            if changes := getattr(own, section):
                before = getattr(self, section)
                if shared := sorted(FOR_ALL_SOURCES.get(section, set()) & set(changes)):
                    raise ValueError(f"source.{name}.{section}.{shared[0]} is one for all sources; set {section}.{shared[0]}")
                try:
                    update[section] = type(before)(**before.model_dump() | with_nones(type(before), changes))
                except ValidationError as error:
                    raise ValueError(explain(type(before), error, "source", name, section)) from None
        return self.model_copy(update=update)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each group that is balanced, where one was given."""
        of_sources = {name: source.weight for name, source in self.source.items()} if self.balance.by == "source" else {}
        return of_sources | self.balance.weights

    @property
    def portable(self) -> dict[str, Any]:
        """The settings that decide the prepared bytes, and nothing that names this machine: no paths, no worker count."""
        values = self.model_dump(mode="json")
        for source in values["source"].values():
            source.update({section: with_nones(type(getattr(self, section)), source[section]) for section in OVERRIDABLE})
        return portable_settings(values)

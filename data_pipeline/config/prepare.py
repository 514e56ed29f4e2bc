from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from common.settings.markers import DIVIDES_WORK, SHARED_BY_SOURCES, AlsoCalled, Frequent, NoEffectOnResults, OnlyIf, ShapesData
from common.settings.messages import explain
from common.settings.model import (
    Place,
    Section,
    Settings,
    is_table,
    keep_set,
    needed_text,
    unmet_conditions,
    unmet_in,
    with_nones,
)
from data_pipeline.config.filters import HeuristicConfig, LanguageConfig, QualityConfig
from data_pipeline.config.selection import AugmentConfig, BalanceConfig, DedupConfig, SplitConfig
from data_pipeline.config.text import BUILTIN, CleanConfig, HtmlConfig, Kind, LimitConfig, RecordConfig, TextConfig
from data_pipeline.config.tokens import ChatConfig, PackingConfig, TokenizerConfig

_MIB = 1 << 20
KeptRejects = Literal["none", "samples", "all"]


def _replaced(section: str) -> Any:
    return Field(default_factory=dict, description=f"Settings of this source that replace those of [prepare.{section}].")


class SourceConfig(Section):
    """One source of a recipe, `[prepare.source.NAME]`. Its tables, such as `clean`, override the sections of the same name."""

    paths: NoEffectOnResults[tuple[str, ...]] = Field(min_length=1, description="Folders, files, glob patterns or URLs.")
    kind: ShapesData[Kind | None] = Field(None, description="Kind of the text; none: the extension of each file decides.")
    weight: Annotated[ShapesData[float], OnlyIf("balance.by = source")] = Field(
        1.0, gt=0, description="Share of the training tokens, relative to the other sources. See `balance`."
    )
    max_bytes: ShapesData[int | None] = Field(
        None, ge=1, description="Bytes read, in the order of file names. The last file is read whole. none: all."
    )
    text: ShapesData[dict[str, Any]] = _replaced("text")
    records: ShapesData[dict[str, Any]] = _replaced("records")
    html: ShapesData[dict[str, Any]] = _replaced("html")
    clean: ShapesData[dict[str, Any]] = _replaced("clean")
    heuristics: ShapesData[dict[str, Any]] = _replaced("heuristics")
    language: ShapesData[dict[str, Any]] = _replaced("language")
    quality: ShapesData[dict[str, Any]] = _replaced("quality")


OVERRIDABLE = tuple(name for name, field in SourceConfig.model_fields.items() if is_table(field))


def _name_of_flag(value: object) -> object:
    return {"false": "none", "true": "samples"}.get(str(value).lower(), value)


class PrepareConfig(Settings):
    """The settings of `prepare`."""

    environment_prefix: ClassVar[str] = "PREP_"
    recipe_table: ClassVar[str] = "prepare"
    examples: ClassVar[tuple[str, ...]] = (
        "--sources my-text",
        "--sources books notes.jsonl --output workspace/books",
        "--sources my-text --recipe demo",
    )

    recipe: Annotated[NoEffectOnResults[str | None], Frequent("demo", 3)] = Field(
        None, description="Name of a recipe in env/recipes, a .toml file, or auto: settings for the amount of text."
    )
    sources: Annotated[
        NoEffectOnResults[tuple[str, ...]],
        Frequent("my-text", 1),
        AlsoCalled("source input inputs input_dir data data_dir data_path dataset files"),
    ] = Field((), description="Folders, files, glob patterns or URLs with text; builtin: the built-in corpus (Python's library).")
    source: dict[str, SourceConfig] = Field(
        default_factory=dict, description="Sources, each with its settings. Only a recipe can define them."
    )
    output: Annotated[
        NoEffectOnResults[Path], Place(target="folder"), Frequent("workspace/data", 2), AlsoCalled("out out_dir output_dir")
    ] = Field(Path("workspace/data"), description="Folder that receives the prepared data.")
    workers: Annotated[NoEffectOnResults[int | None], Frequent("2", 4), AlsoCalled("jobs processes num_proc num_workers")] = Field(
        None, ge=1, le=4096, description="Number of worker processes, which never changes the result; none: one for each core."
    )
    engine: NoEffectOnResults[Literal["local", "ray"]] = Field(
        "local", description="Where the work runs. local: processes on this machine; ray: a Ray cluster."
    )
    ray_address: Annotated[NoEffectOnResults[str | None], OnlyIf("engine = ray")] = Field(
        None, description="Address of the Ray cluster; none: that of RAY_ADDRESS, or a new one on this machine."
    )
    if_empty: NoEffectOnResults[Literal["error", "builtin"]] = Field(
        "error", description="Action if the sources hold no text. builtin: use the built-in corpus."
    )
    keep_rejects: Annotated[NoEffectOnResults[KeptRejects], BeforeValidator(_name_of_flag)] = Field(
        "none",
        description="Rejected documents that are written. samples (true): the beginnings of some, in rejects.jsonl; all: also each "
        "one in full, in the folder rejects.",
    )
    replace: Annotated[NoEffectOnResults[bool], AlsoCalled("force overwrite")] = Field(
        False,
        description="Whether finished data in the output folder that differs in settings or text is replaced. false: an error.",
    )
    row_length: Annotated[
        ShapesData[int],
        Frequent("512", 5),
        AlsoCalled("block_size context context_length seq_len seq_length sequence_length max_seq_len max_length"),
    ] = Field(1024, ge=8, le=1 << 20, description="Tokens in a row. A row of L tokens has up to L-1 targets.")
    partition_bytes: Annotated[ShapesData[int], DIVIDES_WORK] = Field(
        16 * _MIB, ge=1024, description="Input bytes in one task. Small files share a task."
    )
    text: TextConfig = Field(default_factory=TextConfig, description="Plain text files (.txt, .md, …)")
    records: RecordConfig = Field(default_factory=RecordConfig, description="JSON Lines, CSV, TSV, Parquet and Arrow")
    chat: ChatConfig = Field(default_factory=ChatConfig, description="Conversations and preference pairs")
    html: HtmlConfig = Field(default_factory=HtmlConfig, description="HTML pages")
    clean: CleanConfig = Field(default_factory=CleanConfig, description="Normalisation and length of documents")
    heuristics: HeuristicConfig = Field(
        default_factory=HeuristicConfig,
        description="Rules about the form of a text. A document that breaks a rule of the chosen `presets` is rejected",
    )
    language: LanguageConfig = Field(default_factory=LanguageConfig, description="Identification of languages")
    dedup: DedupConfig = Field(default_factory=DedupConfig, description="Exact and near duplicates")
    quality: QualityConfig = Field(
        default_factory=QualityConfig,
        description="Perplexity (if `trusted` or `reference` is set) and content classifier (if `good` and `bad` are set)",
    )
    balance: BalanceConfig = Field(default_factory=BalanceConfig, description="Shares of sources or other groups")
    augment: AugmentConfig = Field(default_factory=AugmentConfig, description="Random changes to training documents")
    split: SplitConfig = Field(default_factory=SplitConfig, description="Training and validation")
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="Text to tokens")
    packing: PackingConfig = Field(default_factory=PackingConfig, description="Tokens to rows and shards")
    limits: LimitConfig = Field(default_factory=LimitConfig, description="Limits for broken or hostile input")

    @classmethod
    def chosen(cls, _given: Mapping[str, Any]) -> dict[str, Any]:
        # Small models train fastest on short rows.
        return {"tokenizer.kind": "bpe", "tokenizer.vocab_size": "auto", "row_length": 256}

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if not self.sources and not self.source and self.if_empty == "error":
            raise ValueError(f"sources is not set; give --sources PATH, or --sources {BUILTIN} for the built-in corpus")
        of_sources = self.by_place
        for place, config in of_sources.items():
            if self.split.by == "tail" and config.text.documents != "chunks":
                raise ValueError(
                    f"split.by = tail cuts files by position, but {place}text.documents = {config.text.documents}; "
                    f"set {place}text.documents to chunks, or split.by to content"
                )
            if config.records.chat_fields and not self.chat.is_on:
                name = "messages_field" if config.records.messages_field is not None else "chosen_field"
                raise ValueError(
                    f"{place}records.{name} is set, but chat.template = none; set chat.template, for example to chatml"
                )
        if self.chat.is_on:
            if self.chat.template == "tokenizer" and self.tokenizer.path is None:
                raise ValueError(
                    "chat.template = tokenizer needs tokenizer.path, a folder with a chat template; set tokenizer.path, or "
                    "name a built-in template"
                )
            if self.packing.method == "greedy":
                raise ValueError("packing.method = greedy cuts conversations at the end of a row; use best-fit or one-per-row")
            pairs = {config.records.has_pairs for config in of_sources.values()}
            if len(pairs) > 1:
                raise ValueError("some sources have preference pairs and others do not; prepare them into two folders")
        labelled = [place for place, config in of_sources.items() if config.records.label_field is not None]
        if labelled and len(labelled) < len(of_sources):
            place = next(place for place in of_sources if place not in labelled)
            raise ValueError(
                f"some sources have labels, but {place}records.label_field is not set; set it, or prepare the source into "
                "another folder"
            )
        if labelled and self.packing.method == "greedy":
            raise ValueError(
                "packing.method = greedy cuts documents at the end of a row, and a piece has no label; use best-fit or one-per-row"
            )
        if self.balance.field is not None and all(self.balance.field not in one.records.kept_fields for one in of_sources.values()):
            raise ValueError(
                f"balance.field = {self.balance.field}, but no source keeps a field of this name; add it to records.metadata"
            )
        return self

    @property
    def has_mask(self) -> bool:
        """Whether a document with these settings of its source may have tokens without a loss."""
        return self.records.prompt_field is not None or bool(self.records.chat_fields)

    @property
    def has_labels(self) -> bool:
        return any(config.records.label_field is not None for config in self.by_place.values())

    @property
    def has_pairs(self) -> bool:
        return any(config.records.has_pairs for config in self.by_place.values())

    @property
    def by_place(self) -> dict[str, PrepareConfig]:
        """The settings of each source: under `source.NAME.` for those of a recipe, under the empty name for all others."""
        own = {f"source.{name}.": self.for_source(name) for name in self.source}
        return own if own and not self.sources else {"": self} | own

    def for_source(self, name: str) -> PrepareConfig:
        """Return these settings with those that the source `name` overrides. Raises ValueError if one is wrong."""
        own = self.source.get(name)
        if own is None:
            return self
        update = {}
        for section in OVERRIDABLE:
            if changes := getattr(own, section):
                before = getattr(self, section)
                fields = type(before).model_fields
                if shared := sorted(name for name in changes if name in fields and SHARED_BY_SOURCES in fields[name].metadata):
                    raise ValueError(f"source.{name}.{section}.{shared[0]} is shared by all sources; set {section}.{shared[0]}")
                try:
                    update[section] = type(before)(**before.model_dump() | with_nones(type(before), changes))
                    keep_set(update[section], before.model_fields_set | changes.keys())
                except ValidationError as error:
                    raise ValueError(explain(type(before), error, "source", name, section)) from None
        return self.model_copy(update=update)

    @property
    def weights(self) -> dict[str, float]:
        of_sources = {name: source.weight for name, source in self.source.items()} if self.balance.by == "source" else {}
        return of_sources | self.balance.weights


def settings_without_effect(config: PrepareConfig) -> list[str]:
    """Return a warning for each setting that differs from its default and has no effect for any source."""
    found = {place: unmet_conditions(view) for place, view in config.by_place.items()}
    warnings = []
    for name in dict.fromkeys(name for unmet in found.values() for name in unmet):
        shared = [unmet.get(name) for place, unmet in found.items() if not _is_own(config, place, name)]
        if shared and all(shared):
            warnings.append(needed_text(name, shared[0] or []))
    for place, unmet in found.items():
        warnings += [needed_text(place + name, needs) for name, needs in unmet.items() if _is_own(config, place, name)]
    values = {"balance.by": config.balance.by}
    for source, settings in config.source.items():  # those that only sources have, such as their weight
        for name, field in SourceConfig.model_fields.items():
            needs = unmet_in(field, values)
            if needs and getattr(settings, name) != field.default:
                warnings.append(needed_text(f"source.{source}.{name}", needs))
    return warnings


def _is_own(config: PrepareConfig, place: str, name: str) -> bool:
    section, _, leaf = name.partition(".")
    return bool(place) and section in OVERRIDABLE and leaf in getattr(config.source[place.split(".", 1)[1][:-1]], section)

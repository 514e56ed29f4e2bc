from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, create_model, model_validator

from common.settings.markers import SHARED_BY_SOURCES, AlsoCalled, Effect, OnlyIf, ShapesData, ShapesDataByContent
from common.settings.model import Section
from data_pipeline.heuristics.presets import PRESETS
from data_pipeline.heuristics.rule import Share

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]


def _listed(*, for_code: bool) -> str:
    chosen = [preset for preset in PRESETS.values() if preset.for_code == for_code]
    return ", ".join(f"{preset.name} ({preset.source})" if preset.source else preset.name for preset in chosen)


_PERPLEXITY = OnlyIf("quality.trusted or quality.reference")


class _Presets(Section):
    """Rules about the form of a text. Only the presets that are set apply. The default thresholds are those of the papers."""

    presets: ShapesData[tuple[Preset, ...]] = Field(
        (), description=f"Sets of rules that apply. Prose and web text: {_listed(for_code=False)}. Code: {_listed(for_code=True)}."
    )


if TYPE_CHECKING:

    class HeuristicConfig(_Presets):
        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    HeuristicConfig = create_model(
        "HeuristicConfig",
        __base__=_Presets,
        __module__=__name__,
        __doc__=_Presets.__doc__,
        **{
            name: (Annotated[kind, Effect.SHAPES_DATA, OnlyIf(f"heuristics.presets has {preset.name}")], field)
            for preset in PRESETS.values()
            for name, (kind, field) in preset.settings.items()
        },
    )


class LanguageConfig(Section):
    """Identification of languages, and the languages that are kept."""

    identify: ShapesData[bool] = Field(
        True, description="Whether languages are identified, for the report and the rules that need them. Code has none."
    )
    keep: Annotated[ShapesData[tuple[str, ...]], AlsoCalled("lang language languages")] = Field(
        (), description="ISO 639-1 codes of the languages that are kept; empty: all."
    )
    min_confidence: Annotated[ShapesData[Share], OnlyIf("language.keep")] = Field(
        0.4, description="Confidence below which a document is rejected. The report shows what each value keeps."
    )
    sample_bytes: Annotated[ShapesData[int], OnlyIf("language.identify")] = Field(
        2048, ge=256, le=1 << 20, description="Bytes of a longer document that are examined: from its start, middle and end."
    )
    fasttext_model: Annotated[ShapesDataByContent[Path | None], OnlyIf("language.identify"), SHARED_BY_SOURCES] = Field(
        None, description="fastText model file whose labels are language codes; none: the built-in models."
    )

    @model_validator(mode="after")
    def _what_is_kept_is_identified(self) -> Self:
        if self.keep and not self.identify:
            raise ValueError("keep names languages, but identify = false; set identify to true, or remove keep")
        return self


class QualityConfig(Section):
    """Bounds on the content of documents, measured by models that the pipeline trains. A source may have other thresholds."""

    trusted: Annotated[ShapesData[str | None], SHARED_BY_SOURCES] = Field(
        None,
        description="Source that trains the reference model, and whose documents are not judged. none: perplexity is measured only "
        "with `reference`.",
    )
    reference: Annotated[ShapesDataByContent[Path | None], SHARED_BY_SOURCES] = Field(
        None,
        description="Reference of the perplexity: good text, an n-gram model in the ARPA format, or prepared data with a reference "
        "model. It judges all sources. none: `trusted`.",
    )
    reference_tokens: Annotated[ShapesData[int], _PERPLEXITY, SHARED_BY_SOURCES] = Field(
        64 << 20,
        ge=1024,
        description="Tokens that train the reference model, from the start of the trusted source or reference text.",
    )
    reference_bits: Annotated[ShapesData[int], _PERPLEXITY, SHARED_BY_SOURCES] = Field(
        22, ge=12, le=28, description="Counters of the reference model for pairs of tokens, and for triples, as a power of two."
    )
    max_perplexity: Annotated[ShapesData[float | None], _PERPLEXITY] = Field(
        1000.0, ge=1, description="Perplexity per token above which a document is rejected; none: no upper bound."
    )
    min_perplexity: Annotated[ShapesData[float | None], _PERPLEXITY] = Field(
        None,
        ge=1,
        description="Perplexity per token below which a document, such as repeated text, is rejected; none: no lower bound.",
    )
    max_perplexity_percentile: Annotated[ShapesData[float | None], _PERPLEXITY] = Field(
        None, ge=0, le=100, description="Percentage of each source's documents that is kept, those of lowest perplexity; none: 100."
    )
    min_perplexity_percentile: Annotated[ShapesData[float | None], _PERPLEXITY] = Field(
        None,
        ge=0,
        le=100,
        description="Percentage of each source's documents that is rejected, those of lowest perplexity; none: 0.",
    )
    good: Annotated[ShapesDataByContent[tuple[Path, ...]], SHARED_BY_SOURCES] = Field(
        (), description="Files or folders with wanted text, which train the classifier together with `bad`."
    )
    bad: Annotated[ShapesDataByContent[tuple[Path, ...]], SHARED_BY_SOURCES] = Field(
        (), description="Files or folders with unwanted text."
    )
    classifier_bits: Annotated[ShapesData[int], OnlyIf("quality.good"), SHARED_BY_SOURCES] = Field(
        18, ge=10, le=24, description="Weights of the classifier, as a power of two."
    )
    min_good_probability: Annotated[ShapesData[Share], OnlyIf("quality.good")] = Field(
        0.5, description="Probability of being good below which a document is rejected. Good and bad examples have equal weight."
    )

    @property
    def measures_perplexity(self) -> bool:
        return self.trusted is not None or self.reference is not None

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.trusted is not None and self.reference is not None:
            raise ValueError("quality.trusted and quality.reference are both set; keep one of them, because there is one reference")
        if bool(self.good) != bool(self.bad):
            given, missing = ("good", "bad") if self.good else ("bad", "good")
            raise ValueError(
                f"quality.{given} is set, but quality.{missing} is not; the classifier needs examples of both, so set both"
            )
        for unit, low, high in (
            ("perplexity", self.min_perplexity, self.max_perplexity),
            ("perplexity_percentile", self.min_perplexity_percentile, self.max_perplexity_percentile),
        ):
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{unit} = {low} is above max_{unit} = {high}; nothing would be kept")
        return self

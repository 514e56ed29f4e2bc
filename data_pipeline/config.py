"""Every setting of `prepare`, with its unit, bounds and default; how they are read is in `settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from common.settings.messages import explain
from common.settings.model import Section, Settings, with_nones
from data_pipeline.shaping import portable_settings

__all__ = [
    "BUILTIN",
    "FIM_TOKENS",
    "KINDS",
    "AugmentSettings",
    "BalanceSettings",
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
]

BUILTIN = "builtin"
"""The word that stands in `sources` for the text of the interpreter's own standard library."""

_MIB = 1 << 20


FIM_TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
"""Names of the special tokens of fill-in-the-middle, as Qwen and CodeGemma write them."""


Kind = Literal["prose", "web", "code"]
"""What sort of text a document is; it decides which rules make sense for it."""

KINDS: tuple[Kind, ...] = ("prose", "web", "code")
"""The kinds by their numbers in tables."""

LineRule = Literal["notices", "javascript", "unpunctuated", "few-words", "long-word"]
Preset = Literal["gopher-quality", "gopher-repetition", "c4", "fineweb", "spam", "code"]


class TextSettings(Section):
    """How plain text files become documents."""

    documents: Literal["file", "paragraphs", "chunks"] = Field(
        "file", description="what one document is: a whole file, a paragraph (between blank lines), or a chunk of lines"
    )
    chunk_chars: int = Field(4096, ge=64, le=1 << 24, description="length of a chunk, in characters, cut at the next line end")


class RecordSettings(Section):
    """How JSON Lines, CSV, TSV and Parquet become documents."""

    text_field: str = Field("text", min_length=1, description="name of the field or column that holds the text")
    metadata: tuple[str, ...] = Field((), description="names of fields that are kept with each document: strings and numbers")
    quotes: bool = Field(True, description="CSV and TSV: double quotes enclose fields; false takes a quote as part of the text")
    markup: Literal["plain", "html"] = Field("plain", description="html: the field holds HTML, which is turned into text")


class HtmlSettings(Section):
    """How HTML becomes text."""

    extract: Literal["main", "all"] = Field(
        "main", description="main: the main content without navigation and other boilerplate; all: everything but the tags"
    )


class CleanSettings(Section):
    """What is put in order in a document, and how long it must be."""

    unicode: Literal["nfc", "none"] = Field("nfc", description="Unicode normalisation, not of code; none leaves all as it is")
    mojibake: bool = Field(True, description="repair text, not code, that was once read in a wrong encoding and shows it")
    drop_lines: tuple[LineRule, ...] = Field(
        (),
        description="lines that are removed, as C4 does: notices (cookies, terms of use), javascript, unpunctuated (no terminal "
        "punctuation), few-words (under 5), long-word (one of over 1000 characters); not in code",
    )
    repeats: Literal["lines", "paragraphs"] = Field("lines", description="what repeat_window compares")
    repeat_window: int = Field(
        0,
        ge=0,
        description="a line (or paragraph) that equals one of so many before it is removed, but not in code; 0 removes none",
    )
    repeat_min_chars: int = Field(20, ge=1, description="shortest line (or paragraph) that repeat_window removes, in characters")
    min_chars: int = Field(20, ge=1, description="shortest document that is kept, in characters; 10 to 50 is usual")
    max_chars: int | None = Field(None, ge=1, description="longest document that is kept, in characters; none keeps all")

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars = {self.max_chars} is below min_chars = {self.min_chars}; raise it or lower min_chars")
        return self


Share = Annotated[float, Field(ge=0, le=1)]


class HeuristicSettings(Section):
    """Rules of thumb about the form of a text. Which presets apply is a setting; their thresholds are those of the papers."""

    presets: tuple[Preset, ...] = Field(
        (),
        description="sets of rules: gopher-quality, gopher-repetition (Rae 2021), c4 (Raffel 2020), fineweb (Penedo 2024), spam; "
        "code (Li 2023), the only one that applies to code, and only to code",
    )
    gopher_min_words: int = Field(50, ge=0, description="fewest words")
    gopher_max_words: int = Field(100_000, ge=1, description="most words")
    gopher_min_word_length: float = Field(3, ge=0, description="least mean length of words, in characters")
    gopher_max_word_length: float = Field(10, ge=0, description="greatest mean length of words, in characters")
    gopher_max_symbols: float = Field(0.1, ge=0, description="most hash signs, or ellipses, for each word")
    gopher_max_bullet_lines: Share = Field(0.9, description="greatest share of lines that begin with a bullet")
    gopher_max_ellipsis_lines: Share = Field(0.3, description="greatest share of lines that end with an ellipsis")
    gopher_min_alphabetic: Share = Field(0.8, description="least share of words with a letter")
    gopher_min_stop_words: int = Field(2, ge=0, le=8, description="fewest of: the, be, to, of, and, that, have, with; English only")
    gopher_max_duplicate_lines: Share = Field(0.3, description="greatest share of lines that repeat an earlier one")
    gopher_max_duplicate_paragraphs: Share = Field(0.3, description="greatest share of paragraphs that repeat an earlier one")
    gopher_max_duplicate_line_chars: Share = Field(0.2, description="greatest share of characters in such lines")
    gopher_max_duplicate_paragraph_chars: Share = Field(0.2, description="greatest share of characters in such paragraphs")
    gopher_max_top_ngrams: tuple[Share, Share, Share] = Field(
        (0.2, 0.18, 0.16), description="greatest share of characters in the commonest run of 2, 3 and 4 words"
    )
    gopher_max_duplicate_ngrams: tuple[Share, Share, Share, Share, Share, Share] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.1), description="greatest share of characters in repeated runs of 5, 6, … 10 words"
    )
    c4_max_curly_brackets: int = Field(0, ge=0, description="most opening curly brackets")
    c4_max_lorem_ipsum: int = Field(0, ge=0, description="most occurrences of lorem ipsum")
    c4_min_sentences: int = Field(3, ge=0, description="fewest sentences, in lines that C4 keeps")
    c4_min_line_words: int = Field(5, ge=0, description="fewest words in a line that C4 keeps")
    fineweb_min_punctuated_lines: Share = Field(0.12, description="least share of lines that end with terminal punctuation")
    fineweb_max_short_lines: Share = Field(0.67, description="greatest share of lines of up to fineweb_short_line_chars")
    fineweb_short_line_chars: int = Field(30, ge=1, description="longest line that counts as short, in characters")
    fineweb_max_duplicate_line_chars: Share = Field(0.1, description="greatest share of characters in lines that repeat others")
    fineweb_max_newlines: float = Field(0.3, ge=0, description="most line ends for each word")
    spam_max_repeated: Share = Field(0.2, description="greatest share of characters in runs of ten or more of the same one")
    spam_max_urls: Share = Field(0.3, description="greatest share of characters in web addresses")
    spam_max_digits: Share = Field(0.3, description="greatest share of digits among characters other than white space")
    spam_max_symbols: Share = Field(0.3, description="greatest share of ASCII punctuation among characters other than white space")
    spam_max_upper_case: Share = Field(0.5, description="greatest share of capitals among ASCII letters")
    spam_max_keyword: Share = Field(0.15, description="greatest share of one word of four or more characters, in texts of 50 words")
    spam_max_blobs: Share = Field(0.1, description="greatest share of characters in words of over 40, such as base64")
    code_max_line_chars: int = Field(1000, ge=1, description="longest line, in characters")
    code_max_mean_line_chars: float = Field(100, ge=1, description="greatest mean length of lines, in characters")
    code_min_alphanumeric: Share = Field(0.25, description="least share of letters and digits among characters")
    code_max_generated: int = Field(0, ge=0, description="most remarks in the first five lines that a program wrote the file")


class LanguageSettings(Section):
    """Which languages are kept."""

    identify: bool = Field(True, description="identify languages, for the report and the rules that need them; not of code")
    keep: tuple[str, ...] = Field((), description="ISO 639-1 codes of the languages that are kept; empty keeps all")
    min_confidence: float = Field(
        0.9, ge=0, le=1, description="with keep: confidence from which a language is believed; see its costs in the report"
    )
    sample_bytes: int = Field(
        2048, ge=256, le=1 << 20, description="of a longer document so much is looked at: from its start, its middle and its end"
    )
    fasttext_model: Path | None = Field(
        None, description="fastText model file that identifies instead of the built-in models; its labels are the codes"
    )

    @model_validator(mode="after")
    def _what_is_kept_is_identified(self) -> Self:
        if self.keep and not self.identify:
            raise ValueError("keep names languages, but identify = false; set identify to true, or keep to nothing")
        return self


class DedupSettings(Section):
    """Which documents count as the same."""

    exact: bool = Field(True, description="drop documents whose letters and digits equal those of an earlier one")
    near: bool = Field(True, description="drop documents that are nearly the same as an earlier one (MinHash)")
    threshold: float = Field(
        0.8, ge=0.3, le=1, description="share of common shingles (Jaccard similarity) from which two documents are nearly the same"
    )
    shingle_words: int = Field(5, ge=1, le=64, description="words in a shingle")
    num_hashes: int = Field(128, ge=16, le=1024, description="numbers in a MinHash signature; more of them compare fewer in vain")
    max_cluster: int = Field(
        100_000, ge=1, description="near-duplicates that are dropped in favour of one document; those beyond are kept, and counted"
    )
    alarm_fraction: float = Field(
        0.5, ge=0, le=1, description="share of a source's documents that may go as duplicates without an alarm"
    )
    benchmarks: tuple[Path, ...] = Field((), description="benchmark files (.jsonl, .txt) whose text must not be trained on")
    benchmark_words: int = Field(13, ge=4, le=64, description="words in a run that a document shares with a benchmark")
    benchmark_overlaps: int = Field(1, ge=1, description="fewest shared runs for which a document is dropped")

    @model_validator(mode="after")
    def _near_includes_exact(self) -> Self:
        if self.near and not self.exact:
            raise ValueError(
                "dedup.near = true finds equal documents too, but dedup.exact = false; set near to false too, or exact to true"
            )
        return self


class QualitySettings(Section):
    """What a document's content must be like, by models that the pipeline trains itself. A source may set thresholds of its own."""

    trusted: str | None = Field(
        None, description="source that the reference model is trained on, and that perplexity does not judge; none measures none"
    )
    reference_tokens: int = Field(
        64 << 20, ge=1024, description="tokens of the trusted source that the reference model is trained on, from its start"
    )
    reference_bits: int = Field(
        22, ge=12, le=28, description="size of the reference model: counters for pairs, and again for triples, as a power of two"
    )
    max_perplexity: float | None = Field(1000.0, ge=1, description="perplexity per token above which a document is dropped")
    min_perplexity: float | None = Field(
        None, ge=1, description="perplexity per token below which a document is dropped: text that repeats itself or is boilerplate"
    )
    max_perplexity_percentile: float | None = Field(
        None, ge=0, le=100, description="keep this share of each source's documents, those of lowest perplexity, in percent"
    )
    min_perplexity_percentile: float | None = Field(
        None, ge=0, le=100, description="drop this share of each source's documents, those of lowest perplexity, in percent"
    )
    good: tuple[Path, ...] = Field((), description="files with examples of wanted text, for the classifier (with bad)")
    bad: tuple[Path, ...] = Field((), description="files with examples of unwanted text, for the classifier (with good)")
    classifier_bits: int = Field(18, ge=10, le=24, description="size of the classifier: number of its weights, as a power of two")
    min_good_probability: float = Field(
        0.5, ge=0, le=1, description="lowest probability of being wanted that keeps a document; good and bad weigh the same"
    )

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if bool(self.good) != bool(self.bad):
            raise ValueError("good and bad: only one of them is set; the classifier needs examples of both")
        for unit in ("perplexity", "perplexity_percentile"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low is not None and high is not None and low > high:
                raise ValueError(f"min_{unit} = {low} is above max_{unit} = {high}; nothing would be kept")
        return self


class BalanceSettings(Section):
    """How much of each source or class is taken for training."""

    by: Literal["none", "source", "kind", "language", "field"] = Field(
        "none", description="what the shares are of: sources, kinds of text, languages, or the values of a metadata field"
    )
    field: str | None = Field(None, description="the metadata field (by = field); it must be among records.metadata")
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="share of the training tokens of each, relative to the others; 1 where none is given; in recipes only",
    )
    max_repeats: float = Field(
        1.0, ge=1, le=100, description="how often a document may be taken where there is too little; 1 takes less of the others"
    )

    @model_validator(mode="after")
    def _field_is_named(self) -> Self:
        if (self.by == "field") != (self.field is not None):
            raise ValueError(f"by = {self.by} and field = {self.field} do not agree; set both, or neither")
        unknown = [name for name in self.weights if name not in KINDS] if self.by == "kind" else []
        if unknown:
            raise ValueError(f"weights.{unknown[0]} is no kind of text; there are {', '.join(KINDS)}")
        if negative := [name for name, weight in self.weights.items() if not 0 <= weight < float("inf")]:
            raise ValueError(f"weights.{negative[0]} = {self.weights[negative[0]]}: a weight is a finite number from 0")
        return self


class AugmentSettings(Section):
    """Changes to training documents. Off by default."""

    seed: int = Field(0, ge=0, lt=1 << 63, description="another seed changes other documents in other places")
    subword_rate: float = Field(
        0.0, ge=0, le=1, description="share of documents whose words are cut into pieces at random (bpe, unigram)"
    )
    subword_alpha: float = Field(
        0.1, gt=0, lt=1, description="bpe: share of the joins left out; unigram: how strongly likelier pieces are preferred"
    )
    fim_rate: float = Field(0.0, ge=0, le=1, description="share of code documents that are turned into fill-in-the-middle")
    fim_spm_rate: float = Field(
        0.5, ge=0, le=1, description="share of those with the suffix first (SPM); the others have the prefix first"
    )
    synonyms: Path | None = Field(
        None, description="file with synonyms: a word and its synonyms on each line between tabs (.tsv), or a JSON object of lists"
    )
    synonym_rate: float = Field(0.0, ge=0, le=1, description="share of the listed words that are replaced, in prose and web text")

    @model_validator(mode="after")
    def _synonyms_are_named(self) -> Self:
        if self.synonym_rate > 0 and self.synonyms is None:
            raise ValueError(f"synonym_rate = {self.synonym_rate}, but synonyms is not set; name a file, or set synonym_rate to 0")
        return self

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens that a tokenizer must have for this."""
        return FIM_TOKENS if self.fim_rate > 0 else ()


class SplitSettings(Section):
    """Which documents are held out for validation."""

    by: Literal["content", "tail"] = Field(
        "content",
        description="content: by the digest of the text, so equal texts fall on one side; tail: the last part of each file",
    )
    val_fraction: float = Field(0.05, gt=0, lt=1, description="share of the text that is held out")
    min_val_documents: int = Field(
        4, ge=0, description="documents that are held out at least, but (content) no more than a tenth of a small folder, and one"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="another seed holds out other documents (content)")


class TokenizerSettings(Section):
    """How text becomes numbers."""

    kind: Literal["bpe", "unigram", "char", "byte"] = Field("bpe", description="bpe and unigram are trained by SentencePiece")
    vocab_size: int = Field(
        32_000, ge=264, le=1 << 20, description="number of tokens (bpe, unigram); char and byte have what the text or bytes need"
    )
    add_bos: bool = Field(True, description="begin every document with the bos token")
    add_eos: bool = Field(True, description="end every document with the eos token")
    sample_bytes: int = Field(
        32 * _MIB, ge=1024, description="training text that bpe and unigram are trained on, in bytes, drawn evenly from all sources"
    )
    character_coverage: float = Field(
        0.9995, ge=0.98, le=1, description="share of characters with a token of their own; the rest are spelt in bytes"
    )
    train_threads: int = Field(
        4, ge=1, le=1024, description="threads of the tokenizer's training; part of its result (unigram), so not the core count"
    )
    extra_special: tuple[str, ...] = Field(
        (), description="names of further special tokens, such as <|user|>, which no text can produce; not with path"
    )
    path: Path | None = Field(
        None, description="a tokenizer made elsewhere, used as it is: tokenizer.json, a SentencePiece .model, or a folder with one"
    )
    pad_token: str | None = Field(None, description="name of the pad token (path), where the tokenizer's files do not say it")
    unk_token: str | None = Field(None, description="name of the unk token (path)")
    bos_token: str | None = Field(None, description="name of the bos token (path)")
    eos_token: str | None = Field(None, description="name of the eos token (path)")

    @model_validator(mode="after")
    def _tokens_have_names(self) -> Self:
        named = {role: name for role in ("pad", "unk", "bos", "eos") if (name := getattr(self, f"{role}_token")) is not None}
        if named and self.path is None:
            raise ValueError(f"{next(iter(named))}_token is set, but path is not; a tokenizer of our own has its names fixed")
        if self.path is not None and self.extra_special:
            raise ValueError("extra_special and path are both set; a supplied tokenizer is used as it is, so add them to its file")
        reserved = {"<pad>", "<unk>", "<s>", "</s>"}
        for name in self.extra_special:
            if not name.strip() or any(character.isspace() or character == "\u2581" for character in name) or name in reserved:
                raise ValueError(f"extra_special: {name!r} is empty, holds a space, or is one of {sorted(reserved)}; rename it")
        if len(set(self.extra_special)) < len(self.extra_special):
            raise ValueError("extra_special names a token twice; name each once")
        return self


class PackingSettings(Section):
    """How documents share rows."""

    method: Literal["best-fit", "greedy", "one-per-row"] = Field(
        "best-fit",
        description="best-fit cuts only documents longer than a row; greedy fills each row in order and cuts what does not fit; "
        "one-per-row pads each",
    )
    keep_tokens: bool = Field(
        True, description="keep the tokens by document too, for `repack`, `leaks` and `inspect --document`; as large as the shards"
    )
    window_tokens: int = Field(
        8 << 20, ge=1024, le=1 << 34, description="tokens that are packed together, in the order of the input; bounds memory"
    )
    shard_bytes: int = Field(64 * _MIB, ge=4096, le=1 << 34, description="size at which a shard is closed, in bytes of tokens")


class LimitSettings(Section):
    """Budgets for input that is broken or hostile."""

    max_rejected_fraction: float = Field(
        0.05, ge=0, le=1, description="malformed documents tolerated, as a share of all that were read"
    )
    max_bytes_per_source: int | None = Field(
        None, ge=1, description="input taken from each source, in bytes, files in name order, the last one whole; none takes all"
    )
    max_line_bytes: int = Field(
        16 * _MIB, ge=64, description="longest line, row or field that is read, in bytes; a longer one is rejected unread"
    )
    max_document_bytes: int = Field(32 * _MIB, ge=64, description="largest file or paragraph that may be one document, in bytes")
    max_json_depth: int = Field(100, ge=1, le=500, description="deepest nesting of a JSON line, in levels")
    max_expansion: int = Field(400, ge=2, description="decompressed bytes per compressed byte at which a file is given up")
    max_decompressed_bytes: int = Field(1 << 40, ge=1024, description="decompressed bytes at which a file is given up")
    max_window_bytes: int = Field(
        128 * _MIB, ge=_MIB, le=1 << 31, description="window or dictionary that zstd or xz data may ask for, in bytes"
    )
    max_archive_members: int = Field(1_000_000, ge=1, description="members at which an archive is given up")
    max_member_bytes: int = Field(1 << 34, ge=1024, description="largest member of an archive that is read, in bytes")
    reader_memory_bytes: int = Field(
        512 * _MIB,
        ge=64 * _MIB,
        description="memory that a Parquet file or an HTML page may take, in bytes; beyond it a file is refused, "
        "and a page is only stripped of its tags",
    )
    outside_links: bool = Field(
        False, description="follow links inside a source to files outside of it; false leaves those files out, with a warning"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="hosts that web addresses may redirect to, and that may have private addresses, besides the named ones: names, "
        "addresses, or patterns such as *.example.org",
    )
    retries: int = Field(5, ge=0, le=100, description="times that reading from a store is tried again after a failure in a row")
    retry_wait_s: float = Field(0.5, ge=0, le=60, description="wait before the first of them, in seconds; doubled each time")


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

"""The sections about documents: where they came from, where they went, and what was done to them; and the settings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from common.text import decimal, duration, share, size
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.reports.html_cells import (
    NOTHING,
    UNKNOWN,
    Report,
    bytes_of,
    count_of,
    decimal_of,
    flat,
    listed,
    others,
    share_of,
)
from data_pipeline.reports.html_parts import Html, bar, definitions, element, join, note, number_table
from data_pipeline.reports.lookup import largest_first, part

__all__ = ["changes", "documents", "duplicates", "languages", "samples", "settings", "sources", "throughput", "tiles"]


def tiles(report: Report, manifest: Manifest) -> Html:
    """The numbers that are looked at first."""
    counts, train = part(report, "documents"), part(report, "rows", "train")
    total, leaks = _total_tokens(report), part(report, "leaks")
    free_of_leaks = leaks and not any(leaks.values())
    shown = {
        "documents kept": (count_of(counts, "kept"), f"of {count_of(counts, 'read')} read"),
        "text kept": (bytes_of(counts, "text_bytes"), f"of {bytes_of(counts, 'input_bytes')} input"),
        "tokens": (
            _short(total),
            f"{decimal(counts['text_bytes'] / total)} bytes each" if total and "text_bytes" in counts else "",
        ),
        "training rows": (count_of(train, "rows"), f"of {manifest.row_length:,} tokens"),
        "rows filled": (share_of(train, "fill_rate"), f"{share_of(train, 'cut_rate')} of documents cut"),
        "held out": (count_of(counts, "val"), "documents" + (", none also in training" if free_of_leaks else " for validation")),
    }
    return element(
        "div",
        *(
            element("div", element("span", name), element("b", value), element("small", remark), class_="tile")
            for name, (value, remark) in shown.items()
        ),
        class_="tiles",
    )


def documents(report: Report) -> Html:
    """The way of the documents through the stages, by reason; and whether every one is accounted for."""
    counts = part(report, "documents")
    stages = report.get("stages") or [{"name": name, "rejected": lost} for name, lost in part(report, "rejected").items()]
    if not stages:
        return NOTHING
    begun = max(counts.get("read") or 0, 1)
    lines = [line for stage in stages for line in _stage_lines(stage, begun)]
    return join((_account(counts), number_table(("stage", "in", "", "rejected", "of all read", "out"), lines)))


def _account(counts: Report) -> Html:
    if not {"read", "kept", "rejected"} <= counts.keys():
        return NOTHING
    sentence = f"{counts['read']:,} read = {counts['kept']:,} kept + {counts['rejected']:,} rejected."
    if counts["read"] == counts["kept"] + counts["rejected"]:
        return note("Every document is accounted for: ", sentence)
    return note("The counts do not add up, so documents were lost or counted twice: ", sentence, alarm=True)


def _stage_lines(stage: Report, begun: int) -> Iterator[tuple[object, ...]]:
    lost = dict(sorted(part(stage, "rejected").items(), key=lambda item: -item[1]))
    total = sum(lost.values())
    entered = stage.get("in")
    width = bar((entered if entered is not None else total) / begun, "kept" if entered is not None else "lost")
    name = element("b", str(stage.get("name", UNKNOWN)))
    yield name, count_of(stage, "in"), width, f"{total:,}", share(total / begun), count_of(stage, "out")
    for reason, count in lost.items():
        yield element("span", reason, class_="inner"), "", bar(count / begun, "lost"), f"{count:,}", share(count / begun), ""


def sources(report: Report) -> Html:
    """What each source gave, what it lost, and its share of the training tokens."""
    found = part(report, "sources")
    if not found:
        return NOTHING
    columns = ("source", "kind", "most often rejected as", "read", "rejected", "kept", "", "text", "tokens", "bytes per token")
    table = number_table(columns, (_source_line(name, source) for name, source in listed(found).items()), num_names=3)
    weighted = {name: source for name, source in found.items() if source.get("weight") is not None and "share" in source}
    if not weighted:
        return join((table, others(found)))
    asked = sum(source["weight"] for source in weighted.values()) or 1
    balance = number_table(
        ("source", "weight", "share asked for", "share of training tokens", "", "training tokens"),
        (
            (
                name,
                decimal(one["weight"]),
                share(one["weight"] / asked),
                share(one["share"]),
                bar(one["share"]),
                count_of(one, "train_tokens"),
            )
            for name, one in listed(weighted).items()
        ),
        title="Balance",
    )
    return join((table, balance, others(found)))


def _source_line(name: str, source: Report) -> tuple[object, ...]:
    counts, lost = part(source, "documents"), part(source, "rejected")
    worst = max(lost, key=lambda reason: lost[reason], default=None)
    kept = counts.get("kept", 0) / max(counts.get("read", 0), 1)
    return (
        name,
        source.get("kind") or UNKNOWN,
        f"{worst} ({lost[worst]:,})" if worst is not None else UNKNOWN,
        *(count_of(counts, key) for key in ("read", "rejected", "kept")),
        bar(kept),
        bytes_of(counts, "text_bytes"),
        count_of(source, "tokens"),
        decimal_of(source, "bytes_per_token"),
    )


def languages(report: Report, wanted: float | None) -> Html:
    """What there is of each language, and what each threshold of confidence would keep of it; `wanted` is the one that is set."""
    found = largest_first(part(report, "languages"), "bytes")
    confidence = largest_first(part(report, "language_confidence"), "all")
    parts = []
    if found:
        table = number_table(
            ("language", "documents", "text", "tokens", "bytes per token"),
            (
                (
                    code,
                    count_of(one, "documents"),
                    bytes_of(one, "bytes"),
                    count_of(one, "tokens"),
                    decimal_of(one, "bytes_per_token"),
                )
                for code, one in listed(found).items()
            ),
        )
        parts += [table, others(found)]
    if confidence:
        thresholds = sorted({name for kept in confidence.values() for name in kept if name != "all"}, key=float)
        heads = [f"{name} (set)" if wanted is not None and float(name) == wanted else name for name in thresholds]
        table = number_table(
            ("language", "documents", *heads),
            (
                (code, f"{kept.get('all', 0):,}", *(share(kept.get(name, 0) / max(kept.get("all", 0), 1)) for name in thresholds))
                for code, kept in listed(confidence).items()
            ),
            title="Documents that a threshold of confidence keeps, of all in which the language was found",
        )
        parts.append(table)
    return join(parts)


def duplicates(report: Report) -> Html:
    """How many documents were the same as others, what each source lost to that, and the largest clusters."""
    found = part(report, "duplicates")
    if not found:
        return NOTHING
    counted = {
        "exact": "documents equal to an earlier one",
        "near": "documents nearly the same as an earlier one",
        "benchmark": "documents that share text with a benchmark",
        "candidates": "pairs of documents compared",
        "similar": "pairs found similar",
        "capped": "documents kept because their cluster was full",
    }
    parts = [definitions({words: f"{found[key]:,}" for key, words in counted.items() if key in found})]
    parts += [
        note(f"{name} lost more of its documents to duplicates than the alarm allows; look at the clusters below.", alarm=True)
        for name in found.get("alarms") or ()
    ]
    if lost := part(found, "lost_share_by_source"):
        shares = ((name, share(one_share), bar(one_share, "lost")) for name, one_share in listed(lost).items())
        parts.append(number_table(("source", "share lost to duplicates", ""), shares))
    if found.get("clusters"):
        clusters = (
            (_place(part(one, "leader")), element("q", _line_of(one.get("sample"))), count_of(one, "size"))
            for one in found["clusters"]
        )
        columns = ("document that was kept", "its text begins", "documents")
        parts.append(number_table(columns, clusters, num_names=2, title="Largest clusters"))
    return join(parts)


def changes(report: Report) -> Html:
    """How many documents each rule of cleaning changed, and what augmentation did."""
    tables = [
        number_table(
            (title, "documents"), ((name, f"{count:,}") for name, count in sorted(counted.items(), key=lambda item: -item[1]))
        )
        for title, counted in (("cleaned", part(report, "cleaned")), ("augmented", part(report, "augmentation")))
        if counted
    ]
    return element("div", *tables, class_="pair") if tables else NOTHING


def samples(report: Report) -> Html:
    """A few rejected documents for each reason, folded."""
    counts = {(stage, reason): count for stage, lost in part(report, "rejected").items() for reason, count in lost.items()}
    places = {place: number for number, place in enumerate(counts)}
    found = [((one.get("stage", ""), one.get("reason", "")), one) for one in report.get("samples") or []]
    found.sort(key=lambda item: (places.get(item[0], len(places)), item[0]))
    folded = []
    for (stage, reason), group in groupby(found, key=lambda item: item[0]):
        shown = [_sample(one) for _, one in group]
        total = f"{counts[stage, reason]:,} rejected, " if (stage, reason) in counts else ""
        folded.append(
            element("details", element("summary", element("b", reason), f" at {stage}: {total}{len(shown)} shown"), *shown)
        )
    return join(folded)


def _sample(sample: Report) -> Html:
    detail = f": {sample['detail']}" if sample.get("detail") else ""
    return element("figure", element("figcaption", _place(sample), detail), element("pre", sample.get("sample") or "", dir="auto"))


def throughput(timings: Report) -> Html:
    """How fast each stage was, in this run alone."""
    stages = timings.get("stages") or []
    if not stages:
        return NOTHING
    total = sum(stage.get("seconds", 0) for stage in stages)
    before = any(stage.get("bytes_done_before") for stage in stages)
    table = number_table(
        ("stage", "time", "", "done", "a second", *(("done before",) if before else ())),
        (
            (
                stage.get("name", UNKNOWN),
                duration(stage.get("seconds", 0)),
                bar(stage.get("seconds", 0) / max(total, 1e-9)),
                bytes_of(stage, "bytes"),
                size(stage.get("bytes", 0) / max(stage.get("seconds", 0), 1e-9)) if stage.get("bytes") else UNKNOWN,
                *((bytes_of(stage, "bytes_done_before"),) if before else ()),
            )
            for stage in stages
        ),
    )
    told = note(
        f"{duration(total)} in all. Times are those of the run that finished; bytes are those of a stage's own input.",
        " What an earlier run had done before it was stopped is not in the speed." if before else "",
    )
    return join((told, table))


def settings(manifest: Manifest) -> Html:
    """Every setting that decides the result."""
    pairs = list(flat(manifest.config))
    lines = ((element("code", name), element("code", value)) for name, value in pairs)
    table = number_table(("setting", "value"), lines, num_names=2)
    return element("details", element("summary", f"{len(pairs)} settings"), table) if pairs else NOTHING


def _place(found: Report) -> Html:
    line = f", line {found['line']:,}" if found.get("line") else ""
    return element("code", f"{found.get('source', UNKNOWN)}: {found.get('path', '')}{line}")


def _line_of(sample: object) -> str:
    return " ".join(str(sample or "").split())[:120]


def _total_tokens(report: Report) -> int:
    total: int = part(report, "lengths", "tokens").get("total") or sum(
        source.get("tokens", 0) for source in part(report, "sources").values()
    )
    return total


def _short(value: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value:,}" if value else UNKNOWN

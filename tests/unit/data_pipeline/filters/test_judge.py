from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import LimitConfig, PrepareConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.filters import judge
from data_pipeline.filters.clean import clean
from data_pipeline.filters.html import PageReader
from data_pipeline.filters.judge import JudgedBatch, JudgedDocument, judge_batch
from data_pipeline.text import TextBatch

ENGLISH = "The ship had been at sea for nine days when the captain first saw land, and nobody on board believed him."
GERMAN = "Das Schiff war seit neun Tagen auf See, als der Kapitän zum ersten Mal Land sah, und niemand glaubte ihm."


def config(**sections: dict[str, object]) -> PrepareConfig:
    return PrepareConfig(sources=("somewhere",), **sections)


def document(text: str, **fields: str) -> Document:
    return Document(text, "file", 7, 0, **fields)


PAGES = PageReader(LimitConfig())


@pytest.fixture(scope="module", autouse=True)
def parser() -> Iterator[None]:
    yield
    PAGES.close()


def judged_batch(items: Sequence[Document | Rejection], settings: PrepareConfig) -> JudgedBatch:
    return judge_batch(items, settings, PAGES)


def texts_of(batch: TextBatch) -> list[str]:
    return [batch.bytes_N[start:end].tobytes().decode() for start, end in zip(batch.starts_D, batch.ends_D, strict=True)]


def test_each_document_is_kept_or_has_its_reason_in_the_order_that_it_came() -> None:
    broken = Rejection(Reason.NOT_JSON, "file", 1)
    items = [
        document("short"),
        document(ENGLISH),
        broken,
        document(GERMAN),
        document(f"<p>{ENGLISH}</p>", kind="web", markup="html"),
        document(ENGLISH.upper()),
        document("x = 1  # a comment\n", kind="code"),
    ]
    judged = judged_batch(items, config(language={"keep": ["en"]}, heuristics={"presets": ["spam"]}, clean={"min_chars": 10}))
    reasons = [item.reason if isinstance(item, Rejection) else item.language for item in judged.items]
    assert reasons == [
        Reason.TOO_SHORT,
        "en",
        Reason.NOT_JSON,
        Reason.LANGUAGE_UNWANTED,
        "en",
        Reason.SPAM_UPPER_CASE,
        "code",
    ]
    assert judged.items[2] is broken
    assert judged.changes == {"html-main": 1}


def test_the_kept_documents_are_plain_and_lead_to_their_texts_in_the_batch() -> None:
    items = [
        document("word " * 100),
        document(f"{ENGLISH}\r\n"),
        document(""),
        document(f"<p>{GERMAN}</p>", markup="html"),
    ]
    judged = judged_batch(items, config(heuristics={"presets": ["spam"]}))
    kept = [item for item in judged.items if isinstance(item, JudgedDocument)]
    assert [item.document for item in kept] == [document(ENGLISH), document(GERMAN)]
    assert [texts_of(judged.texts)[number] for number in judged.kept] == [ENGLISH, GERMAN]
    assert [item.language for item in kept] == ["en", "de"]


def test_changes_and_confidences_are_counted() -> None:
    judged = judged_batch([document(f"{ENGLISH}\r\n"), document(f"{ENGLISH} cafÃ©\r\n"), document(GERMAN)], config())
    assert judged.changes == {"newlines": 2, "mojibake": 1}
    assert {language: sum(bins.values()) for language, bins in judged.confidences.items()} == {"en": 2, "de": 1}
    assert all(90 <= int(name) <= 100 for bins in judged.confidences.values() for name in bins)


def test_a_document_rejected_for_its_language_is_in_the_histogram() -> None:
    settings = config(language={"keep": ["en"], "min_confidence": 1.0})
    judged = judged_batch([document(ENGLISH), document(GERMAN)], settings)
    assert [item.reason for item in judged.items if isinstance(item, Rejection)] == [
        Reason.LANGUAGE_UNCERTAIN,
        Reason.LANGUAGE_UNWANTED,
    ]
    assert set(judged.confidences) == {"en", "de"}
    assert len(judged.texts) == len(judged.kept) == 0


def test_details_name_the_settings() -> None:
    uncertain, unwanted = judged_batch(
        [document(ENGLISH), document(GERMAN)], config(language={"keep": ["en", "fr"], "min_confidence": 1.0})
    ).items
    assert isinstance(uncertain, Rejection)
    assert isinstance(unwanted, Rejection)
    assert "language.min_confidence = 1.0" in uncertain.detail
    assert "language.keep = en, fr" in unwanted.detail
    assert (unwanted.path, unwanted.line, unwanted.sample) == ("file", 7, GERMAN)


def test_code_has_no_language_to_be_rejected_for() -> None:
    judged = judged_batch([document("for x in range(10):\n\tprint(x)", kind="code")], config(language={"keep": ["en"]}))
    assert isinstance(judged.items[0], JudgedDocument)
    assert judged.items[0].language == "code"
    assert judged.confidences == {}


def test_identification_can_be_turned_off() -> None:
    judged = judged_batch([document(ENGLISH)], config(language={"identify": False}))
    assert isinstance(judged.items[0], JudgedDocument)
    assert (judged.items[0].language, judged.confidences) == ("und", {})


def test_a_very_long_text_is_judged_by_its_beginning_and_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_JUDGED_BYTES", len(ENGLISH) + 1)
    late = f"{ENGLISH}é{'!' * 1000}"  # the limit cuts the é in two
    judged = judged_batch([document(late), document("!" * 200)], config(heuristics={"presets": ["spam"]}))
    assert isinstance(judged.items[0], JudgedDocument)
    assert isinstance(judged.items[1], Rejection)
    assert texts_of(judged.texts)[judged.kept[0]] == late


def test_no_documents_are_no_trouble() -> None:
    judged = judged_batch([], config())
    assert (judged.items, len(judged.texts), len(judged.kept), judged.changes, judged.confidences) == ([], 0, 0, {}, {})


some_texts = st.sampled_from([ENGLISH, GERMAN, "word " * 60, "<b>bold</b> text that is long enough"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=80
)
some_documents = st.builds(
    document, some_texts, kind=st.sampled_from(["prose", "web", "code"]), markup=st.sampled_from(["plain", "html"])
)


@given(st.lists(some_documents, max_size=5))
def test_a_document_fares_alike_alone_and_in_a_batch(items: list[Document]) -> None:
    settings = config(
        heuristics={"presets": ["gopher-quality", "gopher-repetition", "c4", "fineweb", "spam", "code"]}, clean={"min_chars": 1}
    )
    together = judged_batch(items, settings)
    assert together.items == [outcome for item in items for outcome in judged_batch([item], settings).items]
    kept = [item.document.text for item in together.items if isinstance(item, JudgedDocument)]
    assert [texts_of(together.texts)[number] for number in together.kept] == kept


pieces = st.text(st.sampled_from("ab \r\n\x07e\u0301é"), max_size=12)


@given(prompt=pieces.filter(bool), answer=pieces)
def test_cleaning_keeps_the_border_of_the_parts(prompt: str, answer: str) -> None:
    item = Document(f"{prompt}|{answer}", "file", 1, 0, parts=(len(prompt) + 1, len(answer)))
    [judged] = judged_batch([item], config(clean={"min_chars": 1}, language={"identify": False})).items
    if not clean(answer, config().clean).text:
        assert isinstance(judged, Rejection)
        assert judged.reason == Reason.EMPTY
        return
    assert isinstance(judged, JudgedDocument)
    first, second = judged.document.pieces
    assert first.endswith("|")
    assert second == clean(answer, config().clean).text
    assert first[:-1] == clean(f"{prompt}|", config().clean).text[:-1]


def test_a_prompt_alone_is_rejected_although_it_is_long_enough() -> None:
    [judged] = judged_batch([Document(f"{ENGLISH}\n \n", "file", 1, 0, parts=(len(ENGLISH) + 1, 2))], config()).items
    assert isinstance(judged, Rejection)
    assert (judged.reason, judged.detail) == (Reason.EMPTY, "only the prompt has text, so there is nothing to train on")

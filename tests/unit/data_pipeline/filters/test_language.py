import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from data_pipeline.config import LanguageConfig
from data_pipeline.filters import language
from data_pipeline.filters.language import Identified, check_codes, confidence_bin, identify, kept_by_threshold

DEFAULT = LanguageConfig()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("en", "The quick brown fox jumps over the lazy dog."),
        ("de", "Das ist ein kurzer Satz auf Deutsch."),
        ("fr", "Bonjour tout le monde, comment allez-vous ?"),
        ("es", "El perro come la comida en la casa."),
        ("it", "Il gatto dorme sul divano tutto il giorno"),
        ("pt", "O menino não quer ir para a escola hoje."),
        ("tr", "Merhaba, bugün hava çok güzel"),
        ("ru", "Привет, как дела сегодня?"),
        ("ar", "مرحبا كيف حالك اليوم"),
        ("he", "שלום, מה שלומך היום"),
        ("zh", "你好世界，今天天气很好"),  # noqa: RUF001
        ("ja", "今日はとても天気がいいですね。"),
        ("ko", "안녕하세요, 오늘 날씨가 좋네요"),
        ("th", "สวัสดีครับ วันนี้อากาศดีมาก"),
    ],
)
def test_a_short_sentence_is_enough(code: str, text: str) -> None:
    found = identify(text.encode(), DEFAULT)
    assert found.language == code
    assert found.confidence >= 0.9


@pytest.mark.parametrize("text", ["", " ", "12345 67890", "ok", "\x01\x02", "\ufdd0\ufdd1", "+-*/ ()[]", "asdf qwer zxcv ghjk"])
def test_a_text_without_language_is_undetermined(text: str) -> None:
    assert identify(text.encode(), DEFAULT) == Identified("und", 0.0)


def test_characters_that_cld2_refuses_do_not_hide_the_language() -> None:
    found = identify("\ufdd0Dear friends\x01 of the world, welcome\x85 to this place".encode(), DEFAULT)
    assert found.language == "en"
    assert found.confidence >= 0.9


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text(st.sampled_from("ab é日\0\ufffe\U0001ffff.1")))
def test_no_text_raises_and_confidence_is_a_share(text: str) -> None:
    found = identify(text.encode(), DEFAULT)
    assert 0.0 <= found.confidence <= 1.0
    assert (found.language == "und") == (found.confidence == 0.0)
    assert identify(text.encode(), DEFAULT) == found


def test_a_doubtful_text_gets_less_than_a_clear_one() -> None:
    english, german = "This sentence is written in plain English. ", "Dieser Satz ist in deutscher Sprache geschrieben. "
    mixed = identify((english * 20 + german * 20).encode(), DEFAULT)
    assert mixed.language in ("en", "de")
    assert mixed.confidence < 0.9 < identify((english * 40).encode(), DEFAULT).confidence


@pytest.mark.parametrize("code", ["yue", "wuu", "zh-Hant"])
def test_written_chinese_has_one_code(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    details = (("Chinese", "zh", 50, 900.0),)
    monkeypatch.setattr(language.pycld2, "detect", lambda *_, **__: (True, 20, details))
    monkeypatch.setattr(language, "_langid_model", lambda: SimpleNamespace(classify=lambda _: (code, 0.7)))
    assert identify(b"text", DEFAULT) == Identified("zh", (0.5 + 0.7) / 2)


def test_a_fasttext_model_knows_the_languages_of_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_fasttext_model", lambda _: SimpleNamespace(labels=["__label__eng_Latn", "__label__deu_Latn"]))
    settings = LanguageConfig(fasttext_model=Path("model.bin"))
    check_codes("language.keep", ["eng_Latn"], settings)
    with pytest.raises(ConfigError, match=r"'deu' .*did you mean deu_Latn\?"):
        check_codes("language.keep", ["deu"], settings)


def test_a_result_that_cld2_itself_doubts_counts_half(monkeypatch: pytest.MonkeyPatch) -> None:
    details = (("ENGLISH", "en", 96, 900.0), ("Unknown", "un", 0, 0.0), ("Unknown", "un", 0, 0.0))
    monkeypatch.setattr(language.pycld2, "detect", lambda *_, **__: (False, 20, details))
    monkeypatch.setattr(language, "_ask_langid", lambda _: Identified("en", 1.0))
    assert identify(b"text", DEFAULT) == Identified("en", (0.48 + 1.0) / 2)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (Identified("en", 0.95), None, Identified("en", 0.95)),  # sure: nobody else is asked
        (Identified("en", 0.8), Identified("en", 0.6), Identified("en", 0.7)),
        (Identified("en", 0.8), Identified("de", 0.9), Identified("de", 0.45)),
        (Identified("en", 0.8), Identified("und", 0.0), Identified("en", 0.4)),
        (Identified("und", 0.0), Identified("de", 1.0), Identified("de", 0.5)),
        (Identified("und", 0.0), Identified("und", 0.0), Identified("und", 0.0)),
    ],
)
def test_a_second_vote_counts_where_the_first_is_not_sure(
    monkeypatch: pytest.MonkeyPatch, first: Identified, second: Identified | None, expected: Identified
) -> None:
    monkeypatch.setattr(language, "_ask_cld2", lambda _: first)
    monkeypatch.setattr(language, "_ask_langid", lambda _: second)
    assert identify(b"text", DEFAULT) == expected


def test_of_a_long_text_the_start_the_middle_and_the_end_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = []
    monkeypatch.setattr(language, "_ask_cld2", lambda sample: samples.append(sample) or Identified("en", 1.0))
    text = "é" * 10_000 + "日" * 10_000 + "я" * 10_000
    identify(text.encode(), LanguageConfig(sample_bytes=300))
    identify(b"short", LanguageConfig(sample_bytes=300))
    start, middle, end = samples[0].decode().split("\n")
    assert (set(start), set(middle), set(end)) == ({"é"}, {"日"}, {"я"})
    assert len(samples[0]) <= 302
    assert samples[1] == b"short"


def test_bins_are_whole_percents_rounded_down() -> None:
    assert [confidence_bin(value) for value in (0.0, 0.899999, 0.9, 0.29, 0.57, 1.0)] == ["0", "89", "90", "29", "57", "100"]


def test_a_threshold_keeps_the_documents_of_at_least_this_confidence() -> None:
    kept = kept_by_threshold({"97": 6, "90": 1, "89": 2, "0": 4})
    assert (kept["0.4"], kept["0.9"], kept["0.95"], kept["0.99"]) == (9, 7, 6, 0)
    assert set(kept_by_threshold({}).values()) == {0}


class FakeModel:
    """Answers as a fastText model does: through `.f`, whose text must be one line."""

    def __init__(self, path: str) -> None:
        if not Path(path).exists():
            raise ValueError(f"{path} cannot be opened for loading!")
        self.f = self

    def predict(self, text: str, count: int, threshold: float, on_unicode_error: str) -> list[tuple[float, str]]:
        assert text.index("\n") == len(text) - 1
        assert (count, threshold, on_unicode_error) == (1, 0.0, "strict")
        return [(1.00001, "__label__en")] if text.strip() else []


def test_a_fasttext_model_that_the_user_names_answers_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fasttext", SimpleNamespace(load_model=FakeModel))
    model = tmp_path / "model.bin"
    model.touch()
    assert identify(b"zwei\nZeilen", LanguageConfig(fasttext_model=model)) == Identified("en", 1.0)
    assert identify(b"\n", LanguageConfig(fasttext_model=model)) == Identified("und", 0.0)
    with pytest.raises(ConfigError, match=r"language.fasttext_model = .*missing.bin: .*cannot be opened.*\.bin or \.ftz"):
        identify(b"text", LanguageConfig(fasttext_model=tmp_path / "missing.bin"))


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fasttext", None)
    with pytest.raises(ConfigError, match="pip install fasttext"):
        identify(b"text", LanguageConfig(fasttext_model=tmp_path / "another.bin"))


def test_languages_cannot_be_kept_without_being_identified() -> None:
    with pytest.raises(ValueError, match="identify = false"):
        LanguageConfig(keep=("en",), identify=False)

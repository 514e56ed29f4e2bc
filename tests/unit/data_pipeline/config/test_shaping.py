from common.settings.markers import Effect
from common.settings.model import settings_with
from data_pipeline.config import PrepareConfig, named_files, portable_settings, shaping_settings
from data_pipeline.config.prepare import OVERRIDABLE


def test_a_source_overrides_the_sections_of_the_recipe() -> None:
    assert set(OVERRIDABLE) == {"text", "records", "html", "clean", "heuristics", "language", "quality"}
    assert set(OVERRIDABLE) <= set(PrepareConfig.model_fields)


def test_the_settings_of_a_preparation_come_back_without_files_and_without_what_is_local() -> None:
    config = PrepareConfig(
        sources=("x",),
        row_length=64,
        engine="ray",
        ray_address="ray://elsewhere",
        workers=7,
        tokenizer={"path": "tokenizer.json"},
        source={"web": {"paths": ("y",), "weight": 2.0, "clean": {"min_chars": 3}}},
        balance={"by": "source", "weights": {"web": 3.0}},
    )
    plain = config.model_dump(mode="json")
    shaping = shaping_settings(plain)
    assert shaping["source"]["web"]["clean"] == {"min_chars": 3}
    assert shaping["balance"]["weights"] == {"web": 3.0}
    assert not {*settings_with(PrepareConfig, Effect.NONE)} & {*shaping}
    assert "paths" not in shaping["source"]["web"]
    assert "path" not in shaping["tokenizer"]
    assert {"retries", "retry_wait_s"}.isdisjoint(shaping["limits"])
    assert named_files(plain) == ["tokenizer.path"]
    assert named_files(portable_settings(PrepareConfig(sources=("x",)))) == []


def test_settings_of_other_types_are_left_out() -> None:
    assert shaping_settings({"text": 5, "source": [], "dedup": None}) == {"source": {}}
    assert shaping_settings({"source": {"a": 5, "b": {"language": {"fasttext_model": "/etc/passwd", "keep": ["en"]}}}}) == {
        "source": {"b": {"language": {"keep": ["en"]}}}
    }
    assert named_files({"tokenizer": [], "quality": {"good": []}, "dedup": {"benchmarks": ["/dev/zero"]}}) == ["dedup.benchmarks"]

from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import SplitSettings
from data_pipeline.split import choose_split, content_fraction, tail_offset

texts = [f"document {n}".encode() for n in range(20_000)]


@given(st.binary(), st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 1000))
def test_equal_texts_fall_on_the_same_side_wherever_they_stand(text: bytes, seed: int, here: int, there: int) -> None:
    settings = SplitSettings(seed=seed, val_fraction=0.5)
    assert choose_split(text, here, 1000, settings) == choose_split(text, there, 2000, settings)


def test_the_share_held_out_is_the_one_that_was_asked_for() -> None:
    for fraction in (0.005, 0.05, 0.5):
        held_out = sum(choose_split(text, 0, 1, SplitSettings(val_fraction=fraction)) == "val" for text in texts)
        expected = fraction * len(texts)
        assert abs(held_out - expected) < 5 * expected**0.5


def test_another_seed_holds_out_other_documents() -> None:
    sides = [{text for text in texts if content_fraction(text, seed) < 0.1} for seed in (0, 1)]
    assert len(sides[0] & sides[1]) < 0.2 * len(sides[0])


def test_a_larger_share_holds_out_the_same_documents_and_more() -> None:
    few, many = ({t for t in texts if choose_split(t, 0, 1, SplitSettings(val_fraction=share)) == "val"} for share in (0.05, 0.1))
    assert few < many


def test_by_position_the_end_of_a_file_is_held_out() -> None:
    settings = SplitSettings(by="tail", val_fraction=0.1)
    assert [choose_split(b"", offset, 1000, settings) for offset in (0, 899, 900, 999)] == ["train", "train", "val", "val"]


@given(st.integers(0, 10**12), st.floats(0.001, 0.999))
def test_the_border_lies_in_the_file(file_bytes: int, fraction: float) -> None:
    assert 0 <= tail_offset(file_bytes, fraction) <= file_bytes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.dedup.duplicates import Fate, Resolution, components, resolve
from data_pipeline.dedup.pairs import Pairs, distinct
from tests.support.duplicates import naive_fates

NUM = 14

places = st.integers(0, NUM - 1)
similar_pairs = st.sets(st.tuples(places, places).filter(lambda pair: pair[0] > pair[1]), max_size=40)
kinds = st.lists(st.integers(0, NUM), min_size=NUM, max_size=NUM)
"""Documents with the same number are equal."""


def pairs_of(pairs: set[tuple[int, int]]) -> Pairs:
    return distinct(*(np.array([pair[place] for pair in pairs], np.uint64) for place in (0, 1)))


def decide(similar: set[tuple[int, int]], copies: set[tuple[int, int]] = frozenset(), max_cluster: int = 100) -> Resolution:
    return resolve(pairs_of(copies), pairs_of(similar), max_cluster)


def copies_of(numbers: list[int]) -> dict[int, int]:
    return {document: numbers.index(number) for document, number in enumerate(numbers) if numbers.index(number) < document}


@given(similar_pairs, kinds, st.integers(1, 4))
def test_decisions_are_those_of_the_plain_rule(similar: set[tuple[int, int]], numbers: list[int], max_cluster: int) -> None:
    copies = copies_of(numbers)
    resolution = decide(similar, set(copies.items()), max_cluster)
    expected = naive_fates(NUM, copies, similar, max_cluster)
    decisions = zip(resolution.fates_M.tolist(), resolution.leaders_M.tolist(), strict=True)
    found = dict(zip(resolution.ids_M.tolist(), decisions, strict=True))
    assert [found.get(document, (0, document)) for document in range(NUM)] == expected


@given(similar_pairs, kinds, st.integers(1, 4))
def test_every_dropped_document_is_similar_to_one_that_is_kept(
    similar: set[tuple[int, int]], numbers: list[int], max_cluster: int
) -> None:
    resolution = decide(similar, set(copies_of(numbers).items()), max_cluster)
    fates = dict(zip(resolution.ids_M.tolist(), resolution.fates_M.tolist(), strict=True))
    for document, fate, leader in zip(resolution.ids_M.tolist(), resolution.fates_M, resolution.leaders_M.tolist(), strict=True):
        assert fates[leader] == Fate.KEEP
        if fate == Fate.NEAR:
            assert (document, leader) in similar
        if fate == Fate.KEEP:
            assert leader == document


@given(similar_pairs, kinds)
def test_connected_documents_have_one_root_and_others_have_another(similar: set[tuple[int, int]], numbers: list[int]) -> None:
    pairs = similar | set(copies_of(numbers).items())
    resolution = decide(similar, set(copies_of(numbers).items()))
    roots = dict(zip(resolution.ids_M.tolist(), resolution.roots_M.tolist(), strict=True))
    reached = {document: {document} for document in roots}
    for _ in range(NUM):
        for one, other in pairs:
            reached[one] = reached[other] = reached[one] | reached[other]
            for member in reached[one]:
                reached[member] = reached[one]
    assert roots == {document: min(members) for document, members in reached.items()}


def test_a_chain_of_similar_documents_loses_every_second_one_and_stays_in_one_split() -> None:
    resolution = decide({(document, document - 1) for document in range(1, 1000)})
    assert resolution.fates_M.tolist() == [Fate.KEEP, Fate.NEAR] * 500
    assert set(resolution.roots_M.tolist()) == {0}


def test_a_leader_absorbs_at_most_max_cluster_documents() -> None:
    resolution = decide({(document, 0) for document in range(1, 10)}, max_cluster=3)
    assert resolution.fates_M.tolist() == [Fate.KEEP] + [Fate.NEAR] * 3 + [Fate.KEEP] * 6
    assert resolution.capped == 6
    assert set(resolution.roots_M.tolist()) == {0}


def test_a_document_similar_only_to_a_dropped_copy_is_kept_and_does_not_count_as_capped() -> None:
    resolution = decide({(2, 1)}, {(1, 0)})
    assert resolution.fates_M.tolist() == [Fate.KEEP, Fate.EXACT, Fate.KEEP]
    assert resolution.capped == 0


def test_copies_of_a_dropped_document_name_the_kept_document() -> None:
    resolution = decide({(1, 0)}, {(2, 1), (3, 1)})
    assert resolution.fates_M.tolist() == [Fate.KEEP, Fate.NEAR, Fate.EXACT, Fate.EXACT]
    assert resolution.leaders_M.tolist() == [0, 0, 0, 0]


def test_nothing_is_decided_if_no_document_is_similar() -> None:
    assert len(decide(set()).ids_M) == 0


def test_a_long_chain_in_bad_order_is_one_component() -> None:
    order = np.random.default_rng(0).permutation(20_000)
    assert not components(20_000, order[1:], order[:-1]).any()

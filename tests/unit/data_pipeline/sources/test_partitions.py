from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.sources.inputs import InputFile, cut_into_partitions
from data_pipeline.sources.listing import Location

input_files = st.lists(
    st.builds(
        InputFile,
        source=st.sampled_from(["a", "b"]),
        path=st.just("file"),
        location=st.just(Location("/file")),
        format=st.sampled_from(["text", "jsonl"]),
        compression=st.sampled_from(["none", "gz"]),
        kind=st.none(),
        bytes=st.integers(1, 100),
        stamp=st.just("0"),
    ),
    max_size=20,
).map(lambda files: sorted(files, key=lambda file: file.source))


@given(input_files, st.integers(1, 120))
def test_every_byte_of_every_file_is_in_one_partition_in_order(files: list[InputFile], partition_bytes: int) -> None:
    parts = [part for partition in cut_into_partitions(files, partition_bytes) for part in partition.parts]
    ranges = [(file, [(part.start, part.end) for part in group]) for file, group in groupby(parts, key=lambda part: id(part.file))]
    assert [file for file, _ in ranges] == [id(file) for file in files]
    for (_, spans), file in zip(ranges, files, strict=True):
        assert spans[0][0] == 0
        assert spans[-1][1] == file.bytes
        assert all(before[1] == after[0] for before, after in pairwise(spans))


@given(input_files, st.integers(1, 120))
def test_a_partition_has_one_source_and_only_an_indivisible_file_makes_it_too_large(
    files: list[InputFile], partition_bytes: int
) -> None:
    for number, partition in enumerate(cut_into_partitions(files, partition_bytes)):
        assert partition.number == number
        assert {part.file.source for part in partition.parts} == {partition.source}
        assert partition.bytes <= partition_bytes or len(partition.parts) == 1
        if partition.bytes > partition_bytes:
            file = partition.parts[0].file
            assert file.format == "text" or file.compression != "none"


@given(input_files, st.integers(1, 120))
def test_partitions_are_no_smaller_than_need_be(files: list[InputFile], partition_bytes: int) -> None:
    whole = [
        p
        for p in cut_into_partitions(files, partition_bytes)
        if all(part.end == part.file.bytes for part in p.parts if not part.start)
    ]
    for before, after in pairwise(whole):
        neighbours = before.number + 1 == after.number and before.source == after.source
        if neighbours and not before.parts[-1].start and not after.parts[0].start:
            assert before.bytes + after.parts[0].file.bytes > partition_bytes

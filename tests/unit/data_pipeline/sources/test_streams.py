import bz2
import gzip
import io
import lzma
import random
import tracemalloc
import zlib
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import LimitConfig
from data_pipeline.documents import Reason
from data_pipeline.sources.streams import (
    Budget,
    Compression,
    StreamError,
    decompress,
    raw_blocks,
    read_lines,
)

LIMITS = LimitConfig()
UNLIMITED = Budget(LIMITS, lambda: 1 << 40)
COMPRESS = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "xz": lzma.compress, "bz2": bz2.compress}
compressions = pytest.mark.parametrize("compression", list(COMPRESS))


def blocks_of(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def blocks_in(data: bytes, compression: Compression, limits: LimitConfig = LIMITS) -> Iterator[bytes]:
    file = io.BytesIO(data)
    return decompress(raw_blocks(file), compression, limits, Budget(limits, file.tell))


def read(data: bytes, compression: Compression, limits: LimitConfig = LIMITS) -> bytes:
    return b"".join(blocks_in(data, compression, limits))


@given(st.text("ab\n", max_size=60).map(str.encode), st.integers(1, 9))
def test_lines_are_those_between_newlines(data: bytes, block_bytes: int) -> None:
    lines = list(read_lines(blocks_of(data, block_bytes), 1000))
    expected = data.split(b"\n")
    assert [line.data for line in lines] == (expected[:-1] if not expected[-1] else expected)
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    assert all(data[line.offset : line.offset + len(line.data)] == line.data for line in lines)


@given(st.text("ab\n", max_size=60).map(str.encode), st.integers(1, 20), st.integers(1, 9), st.integers(1, 8))
def test_ranges_of_any_size_hold_every_line_once(data: bytes, range_bytes: int, block_bytes: int, max_bytes: int) -> None:
    whole = [(line.offset, line.data, line.too_long) for line in read_lines(blocks_of(data, block_bytes), max_bytes)]
    parts = []
    for start in range(0, len(data), range_bytes):
        blocks = blocks_of(data[max(start - 1, 0) :], block_bytes)
        parts += [
            (line.offset, line.data, line.too_long)
            for line in read_lines(blocks, max_bytes, start, min(start + range_bytes, len(data)))
        ]
    assert parts == whole


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 9))
def test_a_line_over_the_limit_is_cut_and_marked(lengths: list[int], block_bytes: int) -> None:
    data = b"".join(b"x" * length + b"\n" for length in lengths)
    lines = list(read_lines(blocks_of(data, block_bytes), 6))
    assert [line.too_long for line in lines] == [length > 6 for length in lengths]
    assert [len(line.data) for line in lines] == [min(length, 6) for length in lengths]


def test_a_giant_line_is_passed_over_in_constant_memory_and_not_read_again_by_later_ranges() -> None:
    consumed = 0

    def giant() -> Iterator[bytes]:
        nonlocal consumed
        for _ in range(4096):
            consumed += 1 << 16
            yield b"x" * (1 << 16)

    tracemalloc.start()
    [line] = read_lines(giant(), 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert line.too_long
    assert consumed == 1 << 28
    assert peak < 8 << 20
    consumed = 0
    assert list(read_lines(giant(), 1 << 20, start=1 << 20, end=2 << 20)) == []
    assert consumed <= 2 << 20


@compressions
@given(data=st.binary(max_size=500), times=st.integers(1, 3))
def test_compressed_data_comes_back_whatever_the_number_of_members(compression: Compression, data: bytes, times: int) -> None:
    assert read(COMPRESS[compression](data) * times, compression) == data * times


@compressions
def test_large_compressed_data_comes_back(compression: Compression) -> None:
    data = b"".join(b"line %d of many\n" % n for n in range(200_000))
    assert read(COMPRESS[compression](data), compression) == data


@pytest.mark.parametrize("compression", ["gz", "xz"])
def test_zero_padding_after_a_member_is_allowed_where_its_tool_allows_it(compression: Compression) -> None:
    whole = COMPRESS[compression](b"text")
    assert read(whole + bytes(1000), compression) == b"text"
    assert read(whole + bytes(1000) + whole, compression) == b"texttext"


@compressions
@given(cut=st.integers(0, 3000), block_bytes=st.integers(1, 700))
def test_it_does_not_matter_where_the_blocks_of_compressed_data_end(compression: Compression, cut: int, block_bytes: int) -> None:
    data = random.Random(cut).randbytes(2000) + bytes(cut)
    blocks = blocks_of(COMPRESS[compression](data) * 2, block_bytes)
    assert b"".join(decompress(blocks, compression, LIMITS, UNLIMITED)) == data * 2


def test_bare_deflate_data_comes_back() -> None:
    packer = zlib.compressobj(wbits=-15)
    assert (
        b"".join(decompress(iter([packer.compress(b"text" * 99) + packer.flush()]), "deflate", LIMITS, UNLIMITED)) == b"text" * 99
    )


def test_a_dictionary_over_the_limit_is_refused_before_it_is_made() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 32 << 20}]
    large_xz = lzma.compress(bytes(1000), filters=filters)
    parameters = zstandard.ZstdCompressionParameters(window_log=25, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    large_zst = packer.compress(bytes(64 << 20)) + packer.flush()
    for compression, data in (("xz", large_xz), ("zst", large_zst)):
        with pytest.raises(StreamError, match=r"over limits\.max_window_bytes") as caught:
            read(data, compression, LimitConfig(max_window_bytes=16 << 20, max_expansion=10**6))
        assert caught.value.reason == Reason.DECOMPRESSION_BUDGET
        assert read(data, compression, LimitConfig(max_window_bytes=32 << 20, max_expansion=10**6)).strip(b"\0") == b""


@compressions
@pytest.mark.parametrize("part", ["nothing", "half", "all but one byte", "garbage", "garbage at the end"])
def test_damaged_data_is_refused_after_what_could_be_read(compression: Compression, part: str) -> None:
    whole = COMPRESS[compression](bytes(range(256)) * 40)
    data = {
        "nothing": b"",
        "half": whole[: len(whole) // 2],
        "all but one byte": whole[:-1],
        "garbage": b"no compressed data at all",
        "garbage at the end": whole + b"trailing words",
    }[part]
    with pytest.raises(StreamError) as caught:
        read(data, compression)
    assert caught.value.reason == Reason.CORRUPT_COMPRESSION


@compressions
def test_a_bomb_is_given_up_at_the_budget(compression: Compression) -> None:
    bomb = COMPRESS[compression](bytes(200 << 20))
    limits = LimitConfig(max_expansion=100, max_decompressed_bytes=8 << 20)
    sizes = (len(block) for block in blocks_in(bomb, compression, limits))
    total = 0

    def read_to_the_end() -> None:
        nonlocal total
        for size in sizes:
            total += size

    with pytest.raises(StreamError) as caught:
        read_to_the_end()
    assert caught.value.reason == Reason.DECOMPRESSION_BUDGET
    assert "raise limits.max_expansion or limits.max_decompressed_bytes" in caught.value.detail
    assert total <= 8 << 20


@compressions
def test_a_file_of_nothing_but_empty_members_is_given_up_at_the_budget(compression: Compression) -> None:
    member = COMPRESS[compression](b"")
    with pytest.raises(StreamError) as caught:
        read(member * ((1 << 20) // len(member)), compression)
    assert caught.value.reason == Reason.DECOMPRESSION_BUDGET


@compressions
def test_many_members_with_text_in_them_are_read(compression: Compression) -> None:
    text = b"A line of a log that was compressed by itself, as some programs write them, number 1234567.\n"
    assert read(COMPRESS[compression](text) * 2000, compression) == text * 2000


@compressions
def test_a_small_file_may_expand_as_it_likes(compression: Compression) -> None:
    assert read(COMPRESS[compression](bytes(500_000)), compression) == bytes(500_000)


def test_a_budget_counts_everything_that_came_out_against_what_went_in() -> None:
    went_in = 0
    budget = Budget(LimitConfig(max_expansion=10, max_decompressed_bytes=1 << 30), lambda: went_in)
    assert list(budget.watch(iter([bytes(1 << 19), bytes(1 << 19)]))) == [bytes(1 << 19)] * 2, "a megabyte harms nobody"
    with pytest.raises(StreamError, match="0 compressed bytes expand to more than 1048576; if you trust the file, raise"):
        budget.charge(1)
    went_in = 1 << 20
    budget.charge(8 << 20)
    with pytest.raises(StreamError):
        budget.charge(1 << 20)

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.config import LimitConfig, RecordConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers.json_lines import parse_json_line, parse_quickly, parse_strictly
from data_pipeline.sources.parsers.source_format import MalformedError, Origin
from data_pipeline.sources.streams import Line
from tests.support.json_cases import GOOD, LINES

LIMITS = LimitConfig()
ORIGIN = Origin("file.jsonl")


def parse(data: bytes, **records: object) -> Document | Rejection:
    return parse_json_line(Line(7, 100, data), ORIGIN, RecordConfig.model_validate(records), LIMITS)


def outcome(item: Document | Rejection) -> str | Reason:
    return item.text if isinstance(item, Document) else item.reason


@pytest.mark.parametrize("name", LINES)
def test_a_line_becomes_its_text_or_a_rejection_with_its_reason(name: str) -> None:
    data, expected = LINES[name]
    item = parse(data)
    assert outcome(item) == expected
    assert (item.path, item.line) == ("file.jsonl", 7)


@given(
    st.one_of(
        st.binary(max_size=80),
        st.sampled_from([data for data, _ in LINES.values() if len(data) < 200]).flatmap(
            lambda data: st.tuples(st.integers(0, len(data)), st.integers(0, len(data)), st.binary(max_size=3)).map(
                lambda cut: data[: cut[0]] + cut[2] + data[cut[1] :]
            )
        ),
    )
)
def test_no_line_raises(data: bytes) -> None:
    item = parse(data)
    if isinstance(item, Document):
        item.text.encode()


def test_a_rejection_shows_the_line_and_says_what_is_there() -> None:
    item = parse(b'{"body": "\xe2\x82\xac", "title": "t"}')
    assert isinstance(item, Rejection)
    assert item.sample == '{"body": "€", "title": "t"}'
    assert item.detail.startswith("no field 'text'; the fields are 'body', 'title'; see records.text_field;")


def test_the_byte_order_mark_of_a_file_is_no_part_of_its_first_line() -> None:
    item = parse_json_line(Line(1, 0, b"\xef\xbb\xbf" + GOOD), ORIGIN, RecordConfig(), LIMITS)
    assert outcome(item) == "a good line"


def strictly(data: bytes, max_depth: int = 100) -> object:
    try:
        return parse_strictly(data, max_depth)
    except MalformedError as error:
        return error.reason


names = st.sampled_from(["text", "a", "b", 'q"', "t\u0065xt", "", "é"])
strings = st.text(st.sampled_from('ab":\\ {}[],é\ud83d\ude00\u0000\n'), max_size=8)
numbers = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none())


def objects(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Draw objects as bytes. A field can occur twice in an object, and white space is everywhere that JSON allows."""
    space = st.sampled_from([b"", b"", b" ", b"\t\r"])
    encoded = st.one_of(names.map(json.dumps), names.map(lambda name: json.dumps(name, ensure_ascii=False)))
    field = st.tuples(space, encoded.map(str.encode), space, space, values, space).map(
        lambda part: part[0] + part[1] + part[2] + b":" + part[3] + part[4] + part[5]
    )
    return st.lists(field, max_size=4).map(lambda fields: b"{" + b",".join(fields) + b"}")


scalars = st.one_of(
    numbers.map(json.dumps).map(str.encode),
    strings.map(lambda text: json.dumps(text).encode()),
    strings.map(lambda text: json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.sampled_from([b"NaN", b"1e400", b"-0", b"9" * 30, b"9" * 5000, b"01", rb'"\ud800"', b"1.5E+3", b'"\xff"', b"tru"]),
)
lines = objects(
    st.recursive(
        scalars, lambda inner: st.one_of(objects(inner), st.lists(inner, max_size=3).map(lambda v: b"[" + b",".join(v) + b"]"))
    )
)


@given(data=lines, max_depth=st.sampled_from([1, 2, 3, 100]))
@example(data=b'{"a":1,"a"\t:2}', max_depth=100)
@example(data=rb'{"a":"\":","a":2}', max_depth=100)
@example(data=b'{"a":{"b":1,"b":2}}', max_depth=100)
@example(data=b'{"a":[{"b":1}]}', max_depth=2)
def test_the_fast_parser_finds_what_the_strict_one_finds_or_nothing(data: bytes, max_depth: int) -> None:
    quick = parse_quickly(data, max_depth)
    if quick is not None:
        strict = strictly(data, max_depth)
        assert isinstance(strict, dict)
        assert json.dumps(exact(quick)) == json.dumps(exact(strict))


def exact(value: object) -> object:
    """Return the value without numbers that the fast parser rounds."""
    if isinstance(value, dict):
        return {name: exact(item) for name, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    return None if isinstance(value, int | float) and abs(value) >= 2**63 else value


def test_the_fast_parser_takes_what_is_plainly_good() -> None:
    plain = [b'{"text": "a", "id": 1}', b'{"text": "a", "meta": {"tags": ["b", {"c": null}]}}', '{"text":"é"}'.encode()]
    assert all(parse_quickly(line, 100) == strictly(line) for line in plain)


def test_the_fields_that_are_asked_for_come_along_as_one_json_object() -> None:
    line = (
        rb'{"text": "t", "url": "\u00e9", "id": 12345678901234567890123, "ok": true, '
        rb'"tags": ["a"], "none": null, "x": 1.5, "b": "\ud800"}'
    )
    item = parse(line, metadata=("x", "url", "id", "ok", "tags", "none", "missing", "b"))
    assert isinstance(item, Document)
    assert item.metadata == r'{"b":"\ud800","id":12345678901234567890123,"ok":true,"url":"é","x":1.5}'
    exact = parse(b'{"text": "t", "id": 12345678901234567890123, "x": 1e30}', metadata=("id", "x"))
    assert isinstance(exact, Document)
    assert exact.metadata == '{"id":12345678901234567890123,"x":1e+30}'
    assert parse(GOOD, metadata=("url",)) == ORIGIN.document("a good line", 7, 100)


def test_another_field_can_hold_the_text() -> None:
    assert outcome(parse(b'{"body": "t"}', text_field="body")) == "t"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"q": "Why?", "text": "So."}, ("Why?\nSo.", (5, 3))),
        ({"q": "", "text": "So."}, ("So.", ())),
        ({"text": "So."}, Reason.NO_TEXT_FIELD),
        ({"q": None, "text": "So."}, Reason.TEXT_NOT_A_STRING),
        ({"q": "\ud800", "text": "So."}, Reason.LONE_SURROGATE),
    ],
)
def test_a_prompt_is_the_first_part_of_a_document(line: dict[str, object], expected: object) -> None:
    item = parse(json.dumps(line).encode(), prompt_field="q")
    assert (item.reason if isinstance(item, Rejection) else (item.text, item.parts)) == expected
    if expected == Reason.NO_TEXT_FIELD:
        assert isinstance(item, Rejection)
        assert "records.prompt_field" in item.detail


def test_the_characters_after_a_prompt_can_be_chosen() -> None:
    item = parse(b'{"q": "Why?", "text": "So."}', prompt_field="q", prompt_end=" => ")
    assert isinstance(item, Document)
    assert (item.text, item.parts, item.pieces) == ("Why? => So.", (8, 3), ["Why? => ", "So."])


def test_the_fields_that_no_setting_uses_are_named() -> None:
    line = {"text": "So.", "title": "T", "url": "u", "empty": "", "none": None, "no": [], "label": 0}
    item = parse(json.dumps(line).encode(), metadata=["url"])
    assert isinstance(item, Document)
    assert item.unread == ("title", "label")
    item = parse(b'{"instruction": "Why?", "input": "", "context": "C", "text": "So.", "system": "S"}', prompt_field="instruction")
    assert isinstance(item, Document)
    assert item.unread == ("system",)


@pytest.mark.parametrize("value", ["on", "Off", True, False])
def test_a_field_that_only_says_whether_there_is_reasoning_is_not_the_reasoning(value: object) -> None:
    origin, records = Origin("file.jsonl", markup="chat"), RecordConfig(prompt_field="input", text_field="output")
    record = {"input": "Ask", "output": "Say", "reasoning": value}
    item = origin.record(record, 7, 100, records)
    assert json.loads(item.text) == {"prompt": "Ask", "response": "Say"}
    assert item.unread == ("reasoning",)
    item = origin.record(record | {"reasoning": "On it."}, 7, 100, records)
    assert json.loads(item.text)["reasoning"] == "On it."
    assert item.unread == ()

"""Loads one tokenizer in a separate process with limits, which `loading` starts: compiled libraries trust their input.

The first line on standard input is the request, a JSON object; the rest is the file. Standard output gets `ok` or the problem.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from common.child_process import SoftLimit, forbid_files, limit_memory

_TEXT = (
    "The quick brown fox, 1234567890 times: \"it's\" (we'll) <s> </s> {x} [y] #!/$%&*+=@^_`|~\\ ;-)\r\n\t\n  two  spaces   \n\n"
    "naïve café Ünïcödé ß ﬁ Ⅳ ① ½ ﷺ 日本語 한국어 русский עברית العربية ไทย 😀👩‍👩‍👧‍👦 e\u0301 \u00a0\u2003\u3000\ufeff\u2581 "
    "def f(self, a=[1, 2]):\n        return {'a': a}  # done\n" + "a" * 64 + "b " + "0" * 64 + " " * 64 + "(" * 64 + "\n" * 64
)
_MAX_HINT_CHARS = 1 << 16
_MAX_IDS = 4096
_MAX_IDS_PER_CHAR = 100  # NFKC makes up to 18 characters of one, and each has up to four bytes
_MAX_CHARS_PER_ID = 4096

_Encode = Callable[[str], list[int]]
_Decode = Callable[[list[int]], str]


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    content = sys.stdin.buffer.read()
    forbid_files()
    SoftLimit(resource.RLIMIT_CPU).set_seconds(request["seconds"])
    limit_memory(request["memory_bytes"])
    try:
        problem = _use(*(_huggingface if request["kind"] == "huggingface" else _sentencepiece)(content))
    except BaseException as error:  # a panic of the library is a BaseException
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    sys.stdout.buffer.write((problem or "ok").encode("utf-8", "backslashreplace"))


def _huggingface(content: bytes) -> tuple[str, int, _Encode, _Decode]:
    import tokenizers  # noqa: PLC0415 - within the limits

    library = tokenizers.Tokenizer.from_str(content.decode())
    library.no_truncation()
    library.no_padding()
    library.post_processor = None
    library.encode_special_tokens = True
    values = json.loads(library.to_str())
    hints = "".join(islice(_strings([values[name] for name in ("normalizer", "pre_tokenizer", "decoder", "added_tokens")]), 10_000))
    num_ids = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
    return (
        hints[:_MAX_HINT_CHARS],
        num_ids,
        lambda text: list(library.encode(text, add_special_tokens=False).ids),
        lambda ids: str(library.decode(ids, skip_special_tokens=True)),
    )


def _sentencepiece(content: bytes) -> tuple[str, int, _Encode, _Decode]:
    import sentencepiece  # noqa: PLC0415 - within the limits

    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        num_ids = int(processor.get_piece_size())
        processor.id_to_piece(list(range(num_ids)))
    except RuntimeError as error:
        raise ValueError(f"it is damaged, or not a model of SentencePiece ({error})") from None
    if not num_ids:
        raise ValueError("it holds no vocabulary")
    return "", num_ids, lambda text: list(processor.encode(text)), lambda ids: str(processor.decode(ids))


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts that a tokenizer's parts search for or insert: a file can expand a character that is not in `_TEXT`."""
    if isinstance(value, str):
        yield value + " "
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name != "precompiled_charsmap":
                yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _use(hints: str, num_ids: int, encode: _Encode, decode: _Decode) -> str:
    text = _TEXT + hints
    try:
        ids = encode(text)
        encode("")
    except Exception:  # it lacks a character of this text, which need not be in its usual texts
        ids = []
    if len(ids) > _MAX_IDS_PER_CHAR * len(text):
        return f"it makes {len(ids)} tokens from {len(text)} characters"
    known = list(range(0, num_ids, max(1, num_ids // _MAX_IDS)))[:_MAX_IDS]
    decoded = sum(len(decode(some)) for some in (ids[:_MAX_IDS], known, [], *([one] for one in known[:64])))
    if decoded > _MAX_CHARS_PER_ID * _MAX_IDS:
        return f"it makes {decoded} characters from {len(known)} tokens"
    return ""


if __name__ == "__main__":
    main()

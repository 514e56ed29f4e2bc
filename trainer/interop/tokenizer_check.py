"""Compares an exported tokenizer with ours on odd texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import tokenizers

from common.errors import ConfigError
from data_pipeline.conversations.chat_template import ChatTemplate
from data_pipeline.conversations.messages import Message, MessagesError
from data_pipeline.conversations.rendering import ChatRenderer, encode_pieces
from data_pipeline.tokenizer import SentencePieceTokenizer, Tokenizer
from data_pipeline.tokenizer.model_file import BPE
from data_pipeline.tokenizer.sentence_pieces import SPACE_MARK
from trainer.inference.likelihood import num_common

ODD_TEXTS = (
    "",
    " ",
    "  two before, two after  ",
    "\t\ttabs\t and\t\tmore\t",
    "lines\r\nof\rthree\n\n\nkinds\n",
    "no\u00a0break\u202fspace\u2003em\u3000wide",
    "zero\u200bwidth\u200cand\u200djoiners\u2060\ufeff",
    "e\u0301 \u00e9 n\u0303 \u1e9b\u0323 \u0915\u094d\u0937\u093f",  # combining marks, composed and not
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1ea\U0001f1fa \U0001f44b\U0001f3fd \u2764\ufe0f",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u0645\u0631\u062d\u0628\u0627 \u202babc\u202c",  # right to left
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587\u3002\ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03ac \u0531\u0580\u0587 \u10d2\u10d0\u10db",
    "\u2581 a\u2581b \u2581\u2581 \u2585 \ufffd \0 \x01\x7f \x80\x9f \U0010ffff \uffff \u0378",
    "<0x0A> <0xE2><0x96> &lt;s&gt; <s </s <unk >",
    "def f(x):\n    if x < 0:\n\treturn {'a': -x}  # 0x1F, 3.14e-10\n" + " " * 17 + "}\n",
    "I'm, don't; WE'LL -- (twice) ... \"quoted\" `code` http://a.b/c?d=e&f#g 1234567890 1,000.00 $5 50%",
    "x" * 5000,
    "ab" * 1500,
    "abc" * 700 + "\u00e9" * 300,
    *(character * count for character in " \n\t-=." for count in (2, 3, 5, 7, 15, 16, 17, 33, 77, 300)),
)
"""Texts in which tokenizers differ if they differ at all."""
_CHAT_TEXTS = [text for text in ODD_TEXTS if text.strip() and len(text) < 300]  # many templates refuse or change an empty message
_ADVICE = (
    "prepare with a tokenizer of kind bpe, byte or char, or add --inexact_tokenizer to export it although some texts get other ids"
)
_NAMES = 300
_MIXED = 200
_PERIODIC_PIECES = 300


def check_tokenizer(tokenizer: Tokenizer, library: tokenizers.Tokenizer, *, exact: bool) -> None:
    """Check that an exported tokenizer gives the texts of ours, and if `exact` the ids, after the beginning-of-text token."""
    if exact and isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.spec.model_type != BPE:
        raise ConfigError(
            "a unigram tokenizer cannot be exported exactly: SentencePiece adds the scores of pieces in 32 bits and a "
            f"tokenizer.json in 64 bits, so some texts get other ids for the same text; {_ADVICE}"
        )
    if difference := first_difference(tokenizer, library, _texts(tokenizer, library), exact=exact):
        raise ConfigError(
            f"the tokenizer of kind {tokenizer.kind} cannot be exported exactly: {difference}{f'; {_ADVICE}' * exact}"
        )


def check_chat(tokenizer: Tokenizer, library: tokenizers.Tokenizer, template: ChatTemplate, *, exact: bool) -> None:
    """Unless `exact`, only the special tokens must be equal to ours. Afterwards their names in a text are tokens to `library`."""
    library.encode_special_tokens = False
    special = {token.id for token in tokenizer.named_tokens}
    with ChatRenderer(template) as renderer:
        for text in _CHAT_TEXTS:
            messages: list[Message] = [{"role": "user", "content": text}, {"role": "assistant", "content": f"a{text}b"}]
            try:
                rendered = renderer.prompt([*messages, {"role": "user", "content": f"{text} {text}"}])
            except MessagesError as error:
                raise ConfigError(f"the chat template cannot be used: {error}; prepare the data with another one") from None
            ours = encode_pieces(tokenizer, rendered.pieces())
            theirs = library.encode(rendered.text, add_special_tokens=False).ids
            if not exact:
                ours, theirs = ([number for number in ids if number in special] for ids in (ours, theirs))
            if ours != theirs:
                place = num_common(theirs, ours)
                raise ConfigError(
                    f"the tokenizer of kind {tokenizer.kind} cannot be exported exactly with the chat template: the text "
                    f"{_shown(rendered.text)} has the ids {theirs[place : place + 4]} instead of {ours[place : place + 4]} from "
                    f"token {place} on; prepare with another tokenizer, or with another chat.template"
                )


def first_difference(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, texts: Sequence[str], *, exact: bool = True
) -> str | None:
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for text, ours in zip(texts, tokenizer.encode_batch(texts), strict=True):
        try:
            theirs = library.encode(text, add_special_tokens=True).ids
        except Exception as error:  # the library raises plain exceptions
            return f"it cannot encode the text {_shown(text)} ({error})"
        if exact and theirs != [*first, *ours]:
            place = num_common(theirs, [*first, *ours])
            found, expected = theirs[place : place + 4], [*first, *ours][place : place + 4]
            return f"the text {_shown(text)} has the ids {found} instead of {expected} from token {place} on"
        decoded = library.decode(ours, skip_special_tokens=True)
        if decoded != (expected_text := tokenizer.decode(ours)):
            return f"the text {_shown(text)} is decoded as {_shown(decoded)} instead of {_shown(expected_text)}"
    return None


def _texts(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> list[str]:
    names = [token.content for token in library.get_added_tokens_decoder().values()][:_NAMES]
    periodic = list(_periodic(tokenizer)) if isinstance(tokenizer, SentencePieceTokenizer) else []
    named = [text for name in names for text in (name, f"a{name}b", f" {name} {name}{name}\n", name[:-1], name[1:])]
    draw = random.Random(0)
    parts = [text for text in (*ODD_TEXTS, *named, *periodic, " the", "of ", "a", "I", "0") if len(text) < 100]
    mixed = ["".join(draw.choices(parts, k=4)) for _ in range(_MIXED)]
    return [*ODD_TEXTS, *named, *periodic, *mixed]


def _periodic(tokenizer: SentencePieceTokenizer) -> Iterator[str]:
    """Yield repetitions of pieces that repeat a shorter text. Several ways to merge such a piece may compete in a text."""
    names = [piece.name.replace(SPACE_MARK, " ") for piece in tokenizer.pieces if piece.kind == "text"]
    found = {name: period for name in names if (period := _period(name)) < len(name)}
    for name, period in list(found.items())[:_PERIODIC_PIECES]:
        for extra in range(1, 2 * len(name) + 2):
            text = (name[:period] * (extra + len(name)))[: len(name) + extra]
            yield text
            yield f"{name[-1]}x{text}"


def _period(text: str) -> int:
    """Return the smallest shift by which a text overlaps with itself; its length if there is none."""
    return next((shift for shift in range(1, len(text)) if text.startswith(text[shift:])), len(text))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")

"""B rows, L tokens of a row, T new tokens, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from data_pipeline.tokenizer import ByteTokenizer, CharacterTokenizer
from trainer.config import ModelConfig
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TextModel, TokenRows, can_cache, window_start
from trainer.model.attention import Layout, make_layout
from trainer.model.decoder import Decoder, build_model

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, VOCAB = 16, 60
SMALL: dict[str, Any] = {"layers": 2, "width": 32, "context": CONTEXT, "init_std": 0.3}
"""Weights large enough that the next token depends on what stands before."""


def decoder(**shape: Any) -> Decoder:
    return build_model(ModelConfig(**({"heads": 4} | SMALL | shape)), VOCAB, seed=0).eval()


def drawn(model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling, **how: Any) -> list[list[int]]:
    rows = TokenRows(model, prompts, VOCAB, sampling, CONTEXT, **how)
    for _ in range(sampling.max_tokens):
        rows.step()
    return rows.rows


PROMPTS = [[1], [1, 5, 9], [2] * 7, [*range(3, 18)], [*range(16)], [4, 8] * 20]


WINDOWS = {"window": 5, "window_pattern": "SL", "window_rope_theta": 100.0}


@pytest.mark.parametrize("shape", [{"heads": 4}, {"heads": 4, "kv_heads": 2}, {"heads": 4, "kv_heads": 1}, WINDOWS])
@pytest.mark.parametrize("sampling", [Sampling(40, temperature=0), Sampling(40, temperature=1.3, top_k=40, seed=3)])
def test_tokens_are_the_same_with_and_without_the_cache_also_beyond_the_context(shape: dict[str, Any], sampling: Sampling) -> None:
    model = decoder(**shape)
    with_cache, without = (drawn(model, PROMPTS, sampling, use_cache=use_cache) for use_cache in (True, False))
    assert with_cache == without
    assert len({tuple(row[-40:]) for row in without}) == len(PROMPTS)  # and they say something about the prompts


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4),
    cut=st.integers(1, CONTEXT),
    shape=st.sampled_from([{"kv_heads": 1}, {"kv_heads": 2}, {"kv_heads": 4}, WINDOWS]),
    seed=st.integers(0, 99),
)
def test_states_with_a_cache_agree_with_those_of_whole_rows(lengths: list[int], cut: int, shape: dict[str, Any], seed: int) -> None:
    model = decoder(**shape)
    longest = max(lengths)
    tokens_BL = torch.randint(0, VOCAB, (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    positions_BL = torch.arange(longest).expand_as(tokens_BL)
    with torch.no_grad():
        whole_BLD = model.hidden(tokens_BL, make_layout(torch.zeros_like(tokens_BL), positions_BL))
        cache, parts = model.empty_cache(longest), []
        for start, end in [(0, min(cut, longest)), *((place, place + 1) for place in range(min(cut, longest), longest))]:
            parts.append(model.extend(tokens_BL[:, start:end], positions_BL[:, start:end], end, cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BLD, atol=2e-5, rtol=2e-5)


def test_rows_at_different_positions_stand_side_by_side_in_a_cache() -> None:
    model, lengths = decoder(kv_heads=2), (3, 9, 6)
    rows = [torch.randint(0, VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(length)) for length in lengths]
    prefix_BT = torch.stack([torch.cat((row[0, :-1], torch.full((9 - row.shape[1] + 1,), 59))) for row in rows])
    cache, last_B1 = model.empty_cache(12), torch.tensor(lengths)[:, None]
    with torch.no_grad():
        model.extend(prefix_BT, torch.arange(9).expand_as(prefix_BT), 9, cache)
        together = model.extend(torch.stack([row[0, -1:] for row in rows]), last_B1, 10, cache)
        for row, state in zip(rows, together, strict=True):
            alone = model.hidden(row, make_layout(torch.zeros_like(row), torch.arange(row.shape[1])[None]))
            torch.testing.assert_close(state[0], alone[0, -1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_does_not_depend_on_the_other_rows_of_its_batch(use_cache: bool) -> None:
    model, sampling = decoder(kv_heads=2), Sampling(30, temperature=1.2, repetition_penalty=1.2, seed=11)
    together = drawn(model, PROMPTS, sampling, use_cache=use_cache)
    for number, prompt in enumerate(PROMPTS):
        assert drawn(model, [prompt], sampling, use_cache=use_cache, first_row=number) == [together[number]]


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_goes_on_as_before_when_others_leave_the_batch(use_cache: bool) -> None:
    model, sampling = decoder(kv_heads=2), Sampling(30, temperature=1.2, repetition_penalty=1.2, seed=11)
    together = drawn(model, PROMPTS, sampling, use_cache=use_cache)
    rows = TokenRows(model, PROMPTS, VOCAB, sampling, CONTEXT, use_cache=use_cache)
    for step in range(30):
        rows.finish({4: [0, 3], 9: [1], 17: [5]}.get(step, []))
        assert [row for row, _ in rows.step()] == rows.active
    assert rows.active == [2, 4]
    assert [rows.rows[row] for row in (2, 4)] == [together[row] for row in (2, 4)]
    assert [len(rows.rows[row]) - len(PROMPTS[row]) for row in range(6)] == [4, 9, 30, 4, 30, 17]


def test_each_seed_draws_another_text_and_the_same_one_again() -> None:
    model = decoder()
    first, again, other = (drawn(model, [[1]], Sampling(20, temperature=2.0, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_ids_of_the_vocabularys_padding_are_never_drawn() -> None:
    model = decoder()
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 100 * model.lm_head.weight[:1]
    assert model.lm_head.weight.shape[0] == 64
    assert max(max(row) for row in drawn(model, PROMPTS, Sampling(20, temperature=2.0))) < VOCAB


@given(num_tokens=st.integers(1, 300), context=st.integers(2, 64))
def test_the_window_ends_with_the_row_fits_the_context_and_moves_by_half_of_it(num_tokens: int, context: int) -> None:
    start, size = window_start(num_tokens, context), num_tokens - window_start(num_tokens, context)
    assert start == 0 if num_tokens <= context else start > 0
    assert start % (context // 2) == 0
    assert min(num_tokens, context - context // 2 + 1) <= size <= context
    assert window_start(num_tokens + 1, context) - start in (0, context // 2)


def test_a_token_of_a_full_window_sees_exactly_the_window() -> None:
    model, seen = Recorder(), []
    rows = TokenRows(model, [[*range(20, 30)]], VOCAB, Sampling(14), CONTEXT)
    for _ in range(14):
        rows.step()
    seen = [len(tokens) for tokens in model.seen]
    assert seen == [10, 11, 12, 13, 14, 15, 16, 9, 10, 11, 12, 13, 14, 15]
    assert model.seen[7] == rows.rows[0][8:17]


class Recorder(nn.Module):
    """A user's model: the likeliest next token is the sum of those that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))
        self.seen: list[list[int]] = []

    def forward(self, tokens_BL: Tensor, layout: Layout) -> Tensor:
        assert layout.positions_BL.tolist() == [[*range(tokens_BL.shape[1])]]
        self.seen.append(tokens_BL[0].tolist())
        return self.scale * nn.functional.one_hot(tokens_BL.cumsum(1) % VOCAB, VOCAB + 3)


class Wider(Decoder):
    """A decoder that overrides what the cache would not ask."""

    def hidden(self, tokens_BL: Tensor, layout: Layout) -> Tensor:
        return super().hidden(tokens_BL, layout) * 2


def test_models_and_attention_of_ones_own_do_without_the_cache_and_other_layers_do_with_it() -> None:
    class Identity(nn.Module):
        def forward(self, x_BLD: Tensor, *_: object) -> Tensor:
            return x_BLD

    other_mlp, other_attention = decoder(), decoder()
    other_mlp.model.layers[0].mlp = Identity()
    other_attention.model.layers[1].self_attn = Identity()
    models = [Recorder(), Wider(ModelConfig(heads=4, **SMALL), VOCAB).eval(), other_attention, other_mlp, decoder()]
    assert [can_cache(model) for model in models] == [False, False, False, True, True]
    for model in models:
        with_cache, without = (drawn(model, [[1, 7]], Sampling(8, seed=2), use_cache=use_cache) for use_cache in (True, False))
        assert with_cache == without


def test_compiled_layers_are_not_compiled_anew_for_every_length() -> None:
    compiled: list[object] = []

    def note(graph: Any, _inputs: object) -> Any:
        compiled.append(graph)
        return graph.forward

    plain, model = decoder(), decoder()
    for layer in model.model.layers:
        layer.compile(backend=note, dynamic=False)
    for use_cache in (True, False):
        expected, texts = (drawn(one, [[1, 7]], Sampling(8, seed=2), use_cache=use_cache) for one in (plain, model))
        assert texts == expected
    assert compiled == []
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64), make_layout(torch.zeros(1, 2), torch.arange(2)[None]))
    assert compiled  # they would have been


class Reciting(nn.Module):
    """Writes one text after another, whatever the prompt: token i of the text for row length i + 1."""

    def __init__(self, text: bytes, tokenizer: ByteTokenizer, end: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1e4))
        eos = [tokenizer.eos_id] if end else []
        self.tokens = [*(4 + byte for byte in text), *eos]  # bytes come after four special ids
        self.first: int | None = None

    def forward(self, tokens_BL: Tensor, _layout: Layout) -> Tensor:
        self.first = tokens_BL.shape[1] if self.first is None else self.first
        token = self.tokens[(tokens_BL.shape[1] - self.first) % len(self.tokens)]
        return self.scale * nn.functional.one_hot(torch.full_like(tokens_BL, token), 320)


def recited(text: str | bytes, sampling: Sampling, end: bool = True) -> tuple[list[str], str, str, int]:
    """The pieces that were streamed; text, reason and tokens of the same as a whole."""
    tokenizer, data = ByteTokenizer(), text.encode() if isinstance(text, str) else text
    pieces = [*TextModel(Reciting(data, tokenizer, end), tokenizer, 512).stream("go", sampling)]
    [whole] = TextModel(Reciting(data, tokenizer, end), tokenizer, 512).complete(["go"], sampling)
    assert "".join(pieces) == whole.text
    assert whole.prompt == "go"
    assert whole.to_json()["tokens"] == len(whole.tokens)
    return pieces, whole.text, whole.finish_reason, len(whole.tokens)


def test_a_text_ends_where_the_model_ends_it_or_at_the_limit() -> None:
    assert recited("abc", Sampling(10)) == (["a", "b", "c"], "abc", "end", 3)
    assert recited("abcdef", Sampling(4)) == (["a", "b", "c", "d"], "abcd", "length", 4)
    assert recited("", Sampling(4)) == ([], "", "end", 0)
    assert recited("abc", Sampling(10, stop_tokens=(4 + ord("c"),))) == (["a", "b"], "ab", "stop", 2)


def test_characters_of_several_tokens_are_shown_when_they_are_whole() -> None:
    assert recited("né🙂!", Sampling(20))[0] == ["n", "é", "🙂", "!"]
    assert recited("é".encode()[:1], Sampling(20))[1] == "\ufffd"  # what never becomes whole is shown at the end


@given(text=st.text("ab\u00e9.", max_size=12), stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=3), min_size=1, max_size=2))
@settings(max_examples=80)
def test_a_text_ends_before_a_stop_text_of_which_nothing_is_ever_shown(text: str, stops: list[str]) -> None:
    found = [text.find(stop) + len(stop) for stop in stops if stop in text]
    sampling = Sampling(40, stop=tuple(stops))
    pieces, whole, reason, _ = recited(text, sampling)
    if not found:
        assert (whole, reason) == (text, "end")
        return
    shown = text[: min(found)]  # the first text in which a stop stands is the first prefix that holds one
    assert reason == "stop"
    assert whole == shown[: min(shown.find(stop) for stop in stops if stop in shown)]
    assert not any(stop in "".join(pieces) for stop in stops)


def test_a_stop_text_in_the_prompt_stops_nothing() -> None:
    assert recited("abc", Sampling(10, stop=("go",)))[1:3] == ("abc", "end")


def test_a_space_at_the_beginning_of_a_continuation_is_kept() -> None:
    class Stripping(CharacterTokenizer):
        """Drops a space at the beginning of what it decodes, as SentencePiece does."""

        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids).removeprefix(" ")

    tokenizer = Stripping(" ab")

    class SpaceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1e4))

        def forward(self, tokens_BL: Tensor, _layout: Layout) -> Tensor:
            space = tokens_BL.shape[1] % 2 == 0
            return self.scale * nn.functional.one_hot(torch.full_like(tokens_BL, 4 if space else 5), 8)

    [one] = TextModel(SpaceFirst(), tokenizer, 64).complete(["b"], Sampling(3))
    assert one.text == " a "


def test_a_batch_gives_each_prompt_the_text_it_has_alone_and_may_be_cut_anywhere() -> None:
    source = TextModel(build_model(ModelConfig(heads=4, **SMALL | {"init_std": 0.1}), 260, 0), ByteTokenizer(), CONTEXT)
    sampling, prompts = Sampling(12, temperature=1.5, seed=1), ["a", "", "longer than the context is", "a"]
    whole = source.complete(prompts, sampling)
    parts = [*source.complete(prompts[:1], sampling), *source.complete(prompts[1:], sampling, first_row=1)]
    assert whole == parts
    assert [one.prompt for one in whole] == prompts
    assert whole[0].text != whole[3].text  # the same prompt twice gives two texts
    assert source.complete([], sampling) == []


def test_generating_leaves_the_model_in_the_mode_it_was_in_also_when_it_is_broken_off() -> None:
    model = decoder()
    for training in (True, False):
        model.train(training)
        pieces = TextModel(model, CharacterTokenizer("".join(map(chr, range(60, 100)))), CONTEXT).stream("<", Sampling(40))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        assert model.training is training


def test_an_empty_prompt_for_a_tokenizer_without_a_beginning_is_one_token() -> None:
    class NoBeginning(ByteTokenizer):
        bos_id = None

    assert TextModel(decoder(), NoBeginning(), CONTEXT).prompt_tokens("") == [0]
    assert TextModel(decoder(), NoBeginning(), CONTEXT).prompt_tokens("a") == [4 + ord("a")]
    assert TextModel(decoder(), ByteTokenizer(), CONTEXT).prompt_tokens("a") == [2, 4 + ord("a")]

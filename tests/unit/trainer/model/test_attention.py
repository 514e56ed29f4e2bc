"""B rows, L tokens of a row, N query heads, K key and value heads, H width of a head."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import ConfigError
from tests.support.varlen import use_varlen_on_cpu
from trainer.model.attention import (
    BACKENDS,
    Backend,
    Capability,
    Layout,
    attend,
    attention_operators,
    capability_of,
    causal_varlen,
    choose_backend,
    document_mask,
    make_layout,
    within_window,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
H100 = Capability(cuda=(9, 0))
TRAINS_ON_CPU: tuple[Backend, ...] = ("documents", "sdpa")
# The plain form of flex, which PyTorch runs uncompiled and warns about; compiling takes longer than all tests here.
FLEX = pytest.param("flex", marks=pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"))
ON_GPU: tuple[Backend, ...] = ("varlen", "flex", "sdpa")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU of compute capability 8.0 or newer")


def rows_of(*documents: list[int], length: int) -> Tensor:
    """Rows with documents of these lengths, then padding; shape (rows, length)."""
    rows = [[number for number, size in enumerate(row) for _ in range(size)] for row in documents]
    return torch.tensor([row + [-1] * (length - len(row)) for row in rows], dtype=torch.int32)


def layout(segments_BL: Tensor, backend: Backend, empty_pieces: int = 3, window: int = 0) -> Layout:
    """On the device of the segments; positions do not matter to attention."""
    flat = segments_BL.cpu() + 10_000 * torch.arange(len(segments_BL))[:, None]
    _, lengths = torch.unique_consecutive(flat.flatten(), return_counts=True)
    ends = lengths.cumsum(0)
    bounds = torch.cat((torch.zeros(1), ends, ends[-1:].expand(empty_pieces))).int()
    found = make_layout(segments_BL, torch.zeros_like(segments_BL), backend, bounds.to(segments_BL.device), window=window)
    return within_window(found, window) if window else found


def inputs(segments_BL: Tensor, heads: int = 4, kv_heads: int = 2, size: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Laid out in memory as the model does, (B, L, N, H)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*segments_BL.shape, n, size) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes)
    return q, k, v


def attended(tensors: Sequence[Tensor], where: Layout) -> Tensor:
    q, k, v = tensors
    return attend(q, k, v, where)


def by_definition(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, segments_BL: Tensor, window: int = 1000) -> Tensor:
    """Attention one query at a time, over the last `window` keys of its document up to itself."""
    group = q_BNLH.shape[1] // k_BKLH.shape[1]
    out_BNLH = torch.empty_like(q_BNLH)
    for b, row_L in enumerate(segments_BL.tolist()):
        for i, document in enumerate(row_L):
            seen = [j for j in range(i + 1) if row_L[j] == document and i - j < window]
            k_NSH, v_NSH = (x[b, :, seen].repeat_interleave(group, dim=0) for x in (k_BKLH, v_BKLH))
            scores_NS = (k_NSH @ q_BNLH[b, :, i, :, None])[..., 0] / q_BNLH.shape[-1] ** 0.5
            out_BNLH[b, :, i] = (scores_NS.softmax(-1)[:, None] @ v_NSH)[:, 0]
    return out_BNLH


ROWS = st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3), min_size=1, max_size=2)


@pytest.mark.parametrize("backend", TRAINS_ON_CPU)
@settings(max_examples=15)
@given(rows=ROWS, kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_attention_equals_its_definition(backend: Backend, rows: list[list[int]], kv_heads: int, seed: int) -> None:
    segments_BL = rows_of(*rows, length=24)
    q, k, v = inputs(segments_BL, kv_heads=kv_heads, seed=seed)
    torch.testing.assert_close(attend(q, k, v, layout(segments_BL, backend)), by_definition(q, k, v, segments_BL))


@pytest.mark.parametrize("backend", ["documents", "sdpa", "varlen", FLEX])
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, window=st.integers(1, 9), kv_heads=st.sampled_from([1, 4]), seed=st.integers(0, 99))
def test_in_a_window_a_token_sees_the_last_tokens_of_its_document_alone(
    backend: Backend, rows: list[list[int]], window: int, kv_heads: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_varlen_on_cpu(monkeypatch)
    segments_BL = rows_of(*rows, length=24)
    q, k, v = inputs(segments_BL, kv_heads=kv_heads, seed=seed)
    found = attend(q, k, v, layout(segments_BL, backend, window=window))
    torch.testing.assert_close(found, by_definition(q, k, v, segments_BL, window))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("backend", ["documents", "sdpa", FLEX])
def test_a_soft_cap_bounds_the_scores_before_the_softmax(backend: Backend, window: int) -> None:
    segments_BL = rows_of([7, 9, 5], [24], length=24)
    q, k, v = inputs(segments_BL)
    found = attend(q * 3, k, v, layout(segments_BL, backend, window=window), softcap=1.5)
    scores = torch.tanh(q * 3 @ k.repeat_interleave(2, dim=1).transpose(2, 3) / 4 / 1.5) * 1.5
    seen = document_mask(segments_BL)
    seen = seen & (torch.arange(24)[:, None] - torch.arange(24) < window) if window else seen
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(attend(q * 3, k, v, layout(segments_BL, backend, window=window)), expected, atol=1e-2)


def test_varlen_has_no_soft_cap() -> None:
    assert choose_backend("auto", CUDA, "bf16", 64, softcap=50.0, capability=H100) == "flex"
    with pytest.raises(ConfigError, match=r"varlen has no soft cap, and model.attention_softcap is above 0"):
        choose_backend("varlen", CUDA, "bf16", 64, softcap=50.0, capability=H100)


@pytest.mark.parametrize("lengths", [[7, 9, 5], [24], [8, 8, 8]])
@pytest.mark.parametrize("backend", ["documents", "varlen"])
def test_the_gradients_in_a_window_agree(backend: Backend, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    use_varlen_on_cpu(monkeypatch)
    segments_BL = rows_of(lengths, lengths, length=24)
    found = [gradients(inputs(segments_BL), layout(segments_BL, one, window=4)) for one in (backend, "sdpa")]
    torch.testing.assert_close(found[0], found[1])


def test_a_kernel_counts_the_tokens_before_a_token_in_its_window() -> None:
    def kernel(*_tensors: Tensor, window_size: tuple[int, int]) -> tuple[int, int]:
        return window_size

    attention, x = causal_varlen(kernel, ("window_size",)), torch.zeros(5, 2, 4)
    assert [attention(x, x, x, torch.tensor([0, 5]), 5, window) for window in (0, 1, 4)] == [(-1, 0), (0, 0), (3, 0)]


def test_a_window_needs_a_kernel_that_has_it() -> None:
    old = Capability(cuda=(8, 0), has_varlen_windows=False)
    assert choose_backend("auto", CUDA, "bf16", 64, capability=old) == "varlen"
    assert choose_backend("auto", CUDA, "bf16", 64, window=8, capability=old) == "flex"
    with pytest.raises(ConfigError, match=r"varlen has no window in PyTorch .*model.window is 8; use attention = auto"):
        choose_backend("varlen", CUDA, "bf16", 64, window=8, capability=old)
    assert choose_backend("varlen", CUDA, "bf16", 64, window=8, capability=H100) == "varlen"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_the_definition() -> None:
    segments_BL = rows_of([7, 9, 5], [3, 3, 4], length=24)
    q, k, v = inputs(segments_BL)
    torch.testing.assert_close(attend(q, k, v, layout(segments_BL, "flex")), by_definition(q, k, v, segments_BL))


@pytest.mark.parametrize("lengths", [[7, 9, 5], [24], [8, 8, 8]])
def test_the_gradients_of_the_backends_agree(lengths: list[int]) -> None:
    segments_BL = rows_of(lengths, lengths, length=24)
    gradients = []
    for backend in TRAINS_ON_CPU:
        leaves = [x.detach().requires_grad_() for x in inputs(segments_BL)]
        torch.autograd.backward(attended(leaves, layout(segments_BL, backend)).square().sum())
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(gradients[0], gradients[1])


def with_other_document(tensors: Sequence[Tensor], changed_BL: Tensor) -> list[Tensor]:
    return [torch.where(changed_BL[:, None, :, None], x + 1 + x.square(), x) for x in tensors]


@pytest.mark.parametrize("changed", [-1, 0, 1, 2])
@pytest.mark.parametrize("backend", [*TRAINS_ON_CPU, FLEX])
def test_changing_one_document_leaves_the_others_bitwise_unchanged(backend: Backend, changed: int) -> None:
    segments_BL = rows_of([7, 9, 5], [3, 3, 4], length=24)
    where = layout(segments_BL, backend)
    tensors = inputs(segments_BL)
    changed_BL = segments_BL == changed
    before, after = (attended(each, where).transpose(1, 2) for each in (tensors, with_other_document(tensors, changed_BL)))
    assert torch.equal(before[~changed_BL], after[~changed_BL])
    assert not torch.equal(before[changed_BL], after[changed_BL])


@pytest.mark.parametrize("backend", TRAINS_ON_CPU)
def test_changing_one_document_leaves_the_gradients_of_the_others_bitwise_unchanged(backend: Backend) -> None:
    segments_BL = rows_of([7, 9, 5], length=24)
    tensors = inputs(segments_BL, kv_heads=4)
    changed_BL = segments_BL == 1
    before, after = (gradients(each, layout(segments_BL, backend)) for each in (tensors, with_other_document(tensors, changed_BL)))
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first[~changed_BL], second[~changed_BL])
        assert not torch.equal(first[changed_BL], second[changed_BL])


def gradients(tensors: Sequence[Tensor], where: Layout) -> list[Tensor]:
    """Of queries, keys and values, each (B, L, N, H)."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    torch.autograd.backward(attended(leaves, where).float().square().sum())
    return [leaf.grad.transpose(1, 2) for leaf in leaves if leaf.grad is not None]


def test_a_document_by_itself_has_the_same_bits_wherever_it_stands() -> None:
    after_another, twice = rows_of([11, 5, 8], length=24), rows_of([8, 8, 8], length=24)
    document = inputs(rows_of([8], length=8))
    results = []
    for segments_BL in (after_another, twice):
        tensors = inputs(segments_BL)
        for x, part in zip(tensors, document, strict=True):
            x[:, :, 16:] = part
        results.append(attended(tensors, layout(segments_BL, "documents"))[:, :, 16:])
    assert torch.equal(results[0], results[1])


def test_documents_of_equal_length_keep_the_memory_layout_of_the_model() -> None:
    for lengths in ([24], [7, 17]):
        segments_BL = rows_of(lengths, length=24)
        y_BLNH = attended(inputs(segments_BL), layout(segments_BL, "documents")).transpose(1, 2)
        assert y_BLNH.is_contiguous()


def test_a_document_that_has_the_number_of_its_neighbour_row_is_another_one() -> None:
    segments_BL = rows_of([24], [10, 14], length=24)
    assert make_layout(segments_BL, segments_BL, "documents").lengths == (24, 10, 14)


def test_queries_in_another_type_than_the_values_are_cast() -> None:
    segments_BL = rows_of([7, 9, 5], length=24)
    q, k, v = inputs(segments_BL)
    for backend in TRAINS_ON_CPU:
        assert attend(q, k, v.bfloat16(), layout(segments_BL, backend)).dtype == torch.bfloat16


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", TRAINS_ON_CPU)
def test_selective_checkpointing_knows_the_operator_of_the_backend(backend: Backend) -> None:
    segments_BL = rows_of([7, 9, 5], length=24)
    with Recorder() as recorder:
        attended(inputs(segments_BL, kv_heads=4), layout(segments_BL, backend))
    assert set(recorder.operators) & set(attention_operators())


@pytest.mark.parametrize(
    ("precision", "head_size", "compiled", "capability", "chosen"),
    [
        ("bf16", 64, True, H100, "flex"),
        ("bf16", 64, False, H100, "varlen"),
        ("bf16", 64, True, Capability(cuda=(8, 0)), "varlen"),
        ("bf16", 256, True, H100, "varlen"),
        ("fp16", 256, True, Capability(cuda=(8, 0)), "varlen"),
        ("float8", 128, True, H100, "flex"),
        ("fp32", 64, True, H100, "flex"),
        ("bf16", 64, True, Capability(cuda=(7, 5)), "flex"),
        ("bf16", 264, True, H100, "flex"),
        ("bf16", 20, True, H100, "flex"),
        ("bf16", 64, True, Capability(cuda=(9, 0), has_varlen=False), "flex"),
        ("fp32", 64, True, Capability(cuda=(9, 0), has_triton=False), "sdpa"),
        ("fp32", 8, True, H100, "sdpa"),
        ("fp32", 64, False, Capability(cuda=(7, 0)), "sdpa"),
        ("fp32", 64, False, Capability(cuda=None), "documents"),
        ("bf16", 64, False, Capability(cuda=None), "documents"),
        ("fp32", 64, True, Capability(cuda=None), "sdpa"),
    ],
)
def test_auto_takes_the_fastest_backend_that_can_run(
    precision: str, head_size: int, compiled: bool, capability: Capability, chosen: Backend
) -> None:
    device = CPU if capability.cuda is None else CUDA
    assert choose_backend("auto", device, precision, head_size, compiled=compiled, capability=capability) == chosen


@pytest.mark.parametrize(
    ("wanted", "precision", "head_size", "compiled", "capability", "reason"),
    [
        ("varlen", "bf16", 64, False, Capability(cuda=None), "needs a CUDA GPU"),
        ("varlen", "bf16", 64, False, Capability(cuda=(7, 5)), "compute capability 8.0 or newer, and this one has 7.5"),
        ("varlen", "fp32", 64, False, H100, "train.precision is fp32"),
        ("varlen", "bf16", 20, False, H100, "the width is 20"),
        ("varlen", "bf16", 512, False, H100, "the width is 512"),
        ("varlen", "bf16", 64, False, Capability(cuda=(9, 0), has_varlen=False), "needs PyTorch 2.10"),
        ("flex", "fp32", 64, False, Capability(cuda=None), "no backward pass"),
        ("flex", "fp32", 64, False, Capability(cuda=(7, 0)), "this one has 7.0"),
        ("flex", "fp32", 8, False, H100, "the width is 8"),
        ("flex", "fp32", 64, False, Capability(cuda=(9, 0), has_triton=False), "pip install triton"),
        ("documents", "fp32", 64, False, H100, "is for CPUs"),
        ("documents", "fp32", 64, True, Capability(cuda=None), "train.compile is on"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_the_reason(
    wanted: Backend, precision: str, head_size: int, compiled: bool, capability: Capability, reason: str
) -> None:
    device = CPU if capability.cuda is None else CUDA
    with pytest.raises(ConfigError, match=f"train.attention = {wanted} .*{reason}.*use attention = auto, which is "):
        choose_backend(wanted, device, precision, head_size, compiled=compiled, capability=capability)


@settings(max_examples=30)
@given(
    rows=st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=40), min_size=1, max_size=3),
    num_padding=st.integers(0, 200),
    num_blocks=st.integers(1, 4),
    window=st.sampled_from([0, 1, 2, 100, 127, 128, 129, 255, 256, 300]),
)
def test_the_blocks_of_flex_are_those_of_the_mask_of_all_pairs(
    rows: list[list[int]], num_padding: int, num_blocks: int, window: int
) -> None:
    length = 128 * num_blocks
    segments_BL = torch.full((len(rows), length), -1, dtype=torch.int32)
    for row, lengths in zip(segments_BL, rows, strict=True):
        numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
        kept = min(length - min(num_padding, length), len(numbers))
        row[:kept] = numbers[:kept]
    found = layout(segments_BL, "flex", window=window).block_mask
    assert found is not None

    def may_look(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (segments_BL[row, query] == segments_BL[row, key]) & (query >= key) & (query - key < (window or length))

    expected = create_block_mask(may_look, len(rows), None, length, length, device="cpu")
    for kind in ("", "full_"):
        for side in ("kv", "q"):
            counts, indices = (getattr(found, f"{kind}{side}_{what}") for what in ("num_blocks", "indices"))
            assert torch.equal(counts, getattr(expected, f"{kind}{side}_num_blocks"))
            assert counts.is_contiguous()
            assert indices.is_contiguous()
            used = torch.arange(indices.shape[-1]) < counts[..., None]
            assert torch.equal(indices * used, getattr(expected, f"{kind}{side}_indices") * used)


def test_dropout_of_the_attention_needs_a_kernel_that_has_it() -> None:
    assert choose_backend("auto", CUDA, "bf16", 64, compiled=True, dropout=0.1, capability=H100) == "flex"
    assert choose_backend("auto", CPU, "bf16", 64, dropout=0.1, capability=Capability(cuda=None)) == "documents"
    with pytest.raises(ConfigError, match=r"train.attention = varlen has no dropout.*use attention = auto, which is flex here"):
        choose_backend("varlen", CUDA, "bf16", 64, compiled=True, dropout=0.1, capability=H100)


@pytest.mark.parametrize("wanted", ["varlen", "flex", "sdpa"])
def test_a_backend_that_can_run_is_what_was_wanted(wanted: Backend) -> None:
    assert choose_backend(wanted, CUDA, "bf16", 64, capability=H100) == wanted
    assert BACKENDS[wanted].startswith(wanted)


def test_the_capability_of_a_cpu_has_no_gpu() -> None:
    assert capability_of(CPU).cuda is None
    assert capability_of(CPU).has_varlen


def test_varlen_without_bounds_is_refused() -> None:
    segments_BL = rows_of([24], length=24)
    with pytest.raises(ValueError, match="got no bounds"):
        make_layout(segments_BL, segments_BL, "varlen")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


GPU_SEGMENTS = rows_of([70, 130, 40], [256], [1, 2, 3, 200], length=256)


def gpu_case(backend: Backend, precision: Literal["bf16", "fp16"] = "bf16") -> tuple[list[Tensor], Layout]:
    segments_BL = GPU_SEGMENTS.to(CUDA)
    type_ = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return [x.to(CUDA, type_) for x in inputs(GPU_SEGMENTS, heads=6, size=64)], layout(segments_BL, backend, empty_pieces=20)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_on_a_gpu_the_backends_agree_with_sdpa_forward_and_backward(backend: Backend, precision: Literal["bf16", "fp16"]) -> None:
    tensors, where = gpu_case(backend, precision)
    _, reference = gpu_case("sdpa", precision)
    torch.testing.assert_close(attended(tensors, where), attended(tensors, reference), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(gradients(tensors, where), gradients(tensors, reference), atol=5e-2, rtol=5e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_on_a_gpu_changing_one_document_leaves_the_others_bitwise_unchanged(backend: Backend, deterministic: None) -> None:
    tensors, where = gpu_case(backend)
    changed_BL = (GPU_SEGMENTS == 1).to(CUDA)
    other = with_other_document(tensors, changed_BL)
    before, after = (attended(each, where).transpose(1, 2) for each in (tensors, other))
    assert torch.equal(before[~changed_BL], after[~changed_BL])
    assert not torch.equal(before[changed_BL], after[changed_BL])
    for first, second in zip(gradients(tensors, where), gradients(other, where), strict=True):
        assert torch.equal(first[~changed_BL], second[~changed_BL])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ON_GPU)
def test_on_a_gpu_backward_gives_the_same_bits_twenty_times_in_deterministic_mode(backend: Backend, deterministic: None) -> None:
    tensors, where = gpu_case(backend)
    first = gradients(tensors, where)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(tensors, where), strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [32, 65, 128])
def test_on_a_gpu_flex_takes_short_rows_for_any_groups_of_heads(length: int, kv_heads: int) -> None:
    segments_BL = rows_of([10, length - 15], [length], length=length)
    tensors = [x.to(CUDA) for x in inputs(segments_BL, heads=4, kv_heads=kv_heads, size=32)]
    found, expected = (gradients(tensors, layout(segments_BL.to(CUDA), backend)) for backend in ("flex", "sdpa"))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("documents", [[900, 124], [600, 300, 124], [1024], [1, 500, 400]])
def test_on_a_gpu_flex_has_the_gradients_of_sdpa_in_rows_of_many_blocks(documents: list[int]) -> None:
    segments_BL = rows_of(documents, documents[::-1], length=1024)
    tensors = [x.to(CUDA) for x in inputs(segments_BL, heads=4, kv_heads=2, size=64)]
    found, expected = (gradients(tensors, layout(segments_BL.to(CUDA), backend)) for backend in ("flex", "sdpa"))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_on_a_gpu_selective_checkpointing_knows_the_operator_of_the_backend(backend: Backend) -> None:
    tensors, where = gpu_case(backend)
    with Recorder() as recorder:
        attended(tensors, where)
    assert set(recorder.operators) & set(attention_operators())


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_pieces_without_tokens_do_not_change_a_bit(deterministic: None) -> None:
    tensors, where = gpu_case("varlen")
    few = layout(GPU_SEGMENTS.to(CUDA), "varlen", empty_pieces=0)
    assert torch.equal(attended(tensors, where), attended(tensors, few))
    torch.testing.assert_close(gradients(tensors, where), gradients(tensors, few))


def old_kernel(*tensors: Tensor, is_causal: bool = False) -> tuple[list[Tensor], bool]:
    return list(tensors[:3]), is_causal


def test_a_kernel_that_knows_no_groups_gets_the_keys_and_values_of_each_query_head() -> None:
    q, k, v = torch.randn(5, 6, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    (q_seen, k_seen, v_seen), is_causal = causal_varlen(old_kernel, ("is_causal",))(q, k, v, torch.tensor([0, 5]), 5, 0)
    assert is_causal
    assert torch.equal(q_seen, q)
    for seen, fewer in ((k_seen, k), (v_seen, v)):
        assert torch.equal(seen, torch.stack([fewer[:, head // 3] for head in range(6)], dim=1))

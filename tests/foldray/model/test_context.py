"""Context-parallel attention against one process, and its parts: kernels, masks and merging."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foldray.blueprint import Layout
from foldray.comm import Communicator, Groups
from foldray.fold import Fold
from foldray.kernels import attention as kernels
from foldray.kernels.attention import Mask, attend, attend_backward, merge
from foldray.model import attention_mask, context
from foldray.model.attention_mask import AttentionMask
from foldray.model.context import ContextMode as Mode
from foldray.model.context import context_attention
from tests.foldray.model.sequences import ALL, HEADS, RANGED, Asked, B, D, L, data_of, masks, reference
from tests.foldray.packed import WAYS, packed

MODES: list[Mode] = ["ring", "all_gather"]
WHOLE = Asked()


def _attended(data: list[Tensor], communicator: Communicator, mode: Mode, case: Asked, device: str = "cpu") -> list[Tensor]:
    """Return the output and the gradients of this rank's shard."""
    shard = Layout(communicator.size, cp_rank=communicator.index).shard(range(L))
    q, k, v, dout = (x[:, :, shard] for x in data)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    (mask,) = masks([range(L)], communicator.size, communicator.index, case, device)
    y = context_attention(*inputs, communicator, mode, mask)
    return [y.detach(), *torch.autograd.grad(y, inputs, dout)]


def _errors(results: list[Tensor], references: list[Tensor], communicator: Communicator) -> list[float]:
    """Return the largest difference of each tensor, as a share of the tensor's largest value."""
    shard = Layout(communicator.size, cp_rank=communicator.index).shard(range(L))
    pairs = zip(results, references, strict=True)
    return [float((x - reference[:, :, shard]).abs().max() / reference.abs().max()) for x, reference in pairs]


def _parity(
    rank: int, cp: int, mode: Mode, heads: tuple[int, int], cases: list[Asked], dtype: torch.dtype, way: str = "bools"
) -> list[list[float]]:
    groups = Groups.create(Fold(4, cp=cp), rank)
    errors = []
    for case in cases:
        data = data_of(heads, dtype, groups.dp_rank, case.value_dim)
        with WAYS[way]():
            results = _attended(data, groups.context, mode, case)
        assert all(x.dtype == dtype for x in results)
        errors.append(_errors(results, reference(data, case), groups.context))
    groups.close()
    return errors


def _worst(results: Any) -> float:
    return float(torch.tensor(results).max())  # unlike Python's max, this keeps NaN


@pytest.mark.gate(3)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_output_and_gradients_are_those_of_one_process(ranks, cp: int, mode: Mode, heads: tuple[int, int]) -> None:
    assert _worst(ranks(4).run(_parity, cp, mode, heads, ALL, torch.float64)) <= 1e-12


@pytest.mark.gate(2)
@pytest.mark.parametrize("way", ["packed", "plain"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_gpus_ways_give_the_same(ranks, cp: int, mode: Mode, heads: tuple[int, int], way: str) -> None:
    assert _worst(ranks(4).run(_parity, cp, mode, heads, RANGED, torch.float64, way)) <= 1e-12


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("mode", MODES)
def test_narrower_types_stay_near(ranks, mode: Mode, dtype: torch.dtype, limit: float) -> None:
    assert _worst(ranks(4).run(_parity, 4, mode, (4, 2), [Asked(), Asked("few and long")], dtype)) <= limit


@pytest.mark.parametrize("case", [case for case in ALL if case.window in ("sliding:3", "sliding:10")], ids=str)
def test_runs_of_queries_with_the_keys_of_their_window(case: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that holds whole sequences does not compute with the keys that a window hides, nor holds a mask for them."""
    monkeypatch.setattr(attention_mask, "_SHORTEST_RUN", 4)
    data, alone = data_of((4, 2), torch.float64, 0, case.value_dim), Groups.create(Fold(1)).context
    (mask,) = masks([range(L)], 1, 0, case)
    assert len(mask.query_runs) > 2
    assert all(isinstance(run.mask, str) or run.mask.shape[-1] <= L // 2 for run in mask.query_runs)
    assert max(_errors(_attended(data, alone, "ring", case), reference(data, case), alone)) <= 1e-12


def _modes_agree(rank: int) -> float:
    groups = Groups.create(Fold(4, cp=4), rank)
    data = data_of((4, 2), torch.float64, 0)
    ring, gathered, again = (
        _attended(data, groups.context, mode, Asked("few and long")) for mode in ("ring", "all_gather", "ring")
    )
    assert all(torch.equal(x, y) for x, y in zip(ring, again, strict=True))
    groups.close()
    return max(float((x - y).abs().max()) for x, y in zip(ring, gathered, strict=True))


def test_the_modes_agree_and_the_ring_repeats_itself(ranks) -> None:
    assert _worst(ranks(4).run(_modes_agree)) <= 1e-14


def _with_each_parts_own_sum(rank: int, mode: Mode) -> list[float]:
    def own(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
        return attend_backward(dout, q, k, v, *attend(q, k, v, mask), mask)

    groups = Groups.create(Fold(4, cp=4), rank)
    data = data_of((4, 2), torch.float64, 0)
    with mock.patch.object(context, "attend_backward", own):
        errors = _errors(_attended(data, groups.context, mode, WHOLE), reference(data, WHOLE), groups.context)
    groups.close()
    return errors


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_forgets_the_other_parts_is_seen(ranks, mode: Mode) -> None:
    for output, *gradients in ranks(4).run(_with_each_parts_own_sum, mode):
        assert output <= 1e-12
        assert min(gradients) > 0.01


def _sent(rank: int, cp: int, mode: Mode, dtype: torch.dtype) -> list[dict[str, tuple[int, int]]]:
    """Return the calls and bytes of every operation, in forward and in backward."""
    groups = Groups.create(Fold(4, cp=cp), rank)
    shard = groups.context.size
    q, k, v, dout = (x[:, :, : L // shard].clone() for x in data_of((4, 2), dtype, 0))
    counts = []

    def count() -> None:
        taken = groups.traffic.counts.items()
        counts.append({operation: (count.calls, count.inside_bytes) for (_, operation), count in taken})
        groups.traffic.clear()

    (mask,) = masks([range(L)], cp, groups.context.index, WHOLE)
    y = context_attention(q, k.requires_grad_(), v, groups.context, mode, mask)
    count()
    y.backward(dout)
    count()
    groups.close()
    return counts


@pytest.mark.gate(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_are_those_of_the_formula(ranks, cp: int, dtype: torch.dtype) -> None:
    numbers = 2 * B * 2 * (L // cp) * D
    kv, dkv = (cp - 1) * numbers * dtype.itemsize, (cp - 1) * numbers * max(4, dtype.itemsize)
    for forward, backward in ranks(4).run(_sent, cp, "ring", dtype):
        assert forward == {"shift": (cp - 1, kv)}
        assert backward == {"shift": (2 * (cp - 1), kv + dkv)}
    for forward, backward in ranks(4).run(_sent, cp, "all_gather", dtype):
        assert forward == {"all_gather": (1, kv)}
        assert backward == {"all_gather": (1, kv), "reduce_scatter": (1, dkv)}


def _events(rank: int, mode: Mode, documents: str | None) -> tuple[list[str], list[str]]:
    """Return what a rank does in forward and in backward, in order: shifts, and parts with their sizes and masks."""
    groups = Groups.create(Fold(4, cp=4), rank)
    events: list[str] = []
    shift = Communicator.shift

    def noted_shift(self: Communicator, tensors: Any) -> Any:
        events.append("shift")
        return shift(self, tensors)

    def noted(compute: Any) -> Any:
        def run(*arguments: Any) -> Any:
            q, k = arguments[:2] if compute is attend else arguments[1:3]
            mask = arguments[-1]
            events.append(f"{q.shape[2]} x {k.shape[2]} {'masked' if isinstance(mask, Tensor) else mask or 'full'}")
            return compute(*arguments)

        return run

    (mask,) = masks([range(L)], 4, groups.context.index, Asked(documents))
    q, k, v, dout = (x[:, :, : L // 4].clone() for x in data_of((4, 2), torch.float32, 0))
    with (
        mock.patch.object(Communicator, "shift", noted_shift),
        mock.patch.object(context, "attend", noted(attend)),
        mock.patch.object(context, "attend_backward", noted(attend_backward)),
    ):
        y = context_attention(q.requires_grad_(), k, v, groups.context, mode, mask)
        forward = events.copy()
        events.clear()
        y.backward(dout)
    groups.close()
    return forward, events


def test_the_ring_sends_ahead_and_computes_only_what_is_seen(ranks) -> None:
    own, earlier, later = ["6 x 6 causal", "6 x 6 full", "6 x 6 causal"], ["6 x 6 full", "6 x 6 full"], ["6 x 12 full"]
    for rank, (forward, backward) in enumerate(ranks(4).run(_events, "ring", None)):
        expected, expected_back = ["shift", *own], ["shift", *own]
        for step in range(1, 4):
            ahead = ["shift"] if step < 3 else []
            parts = earlier if step <= rank else later
            expected += ahead + parts
            expected_back += [*ahead, *parts, "shift"]  # a gradient leaves after this rank has added its share
        assert forward == expected
        assert backward == expected_back


@pytest.mark.parametrize("mode", MODES)
def test_parts_that_no_document_crosses_are_skipped(ranks, mode: Mode) -> None:
    for events in ranks(4).run(_events, mode, "at every chunk edge"):
        for computed in events:
            assert [event for event in computed if event != "shift"] == ["6 x 6 causal"] * 2
    for rank, events in enumerate(ranks(4).run(_events, mode, "at some chunk edges")):
        # A document of the second sequence covers chunks 2n and 2n + 1, so the odd chunk also sees the even one.
        for computed in events:
            odd = 1 if {rank, 7 - rank} & {1, 3, 5, 7} else 0
            assert sum("masked" in event for event in computed) == odd
    for events in ranks(4).run(_events, mode, "one over all"):
        assert not [event for computed in events for event in computed if "masked" in event]


def test_mistakes_are_named() -> None:
    alone, (mask,) = Groups.create(Fold(1)).context, masks([range(L)], 1, 0, Asked())
    q, k, v, _ = data_of((4, 2), torch.float32, 0)
    with pytest.raises(ValueError, match="legal are 'ring', 'all_gather'"):
        context_attention(q, k, v, alone, "rings", mask)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"whole sequences have \(2, 48\)"):
        context_attention(q, k, v, alone, "ring", AttentionMask(range(L), L, mask.shards, 0, torch.zeros(B, 5)))


def test_a_gpu_refuses_documents_whose_numbers_come_again() -> None:
    (mask,) = masks([range(L)], 1, 0, Asked("numbers that come again"))
    with packed(), pytest.raises(ValueError, match="need a number for each document"):
        list(mask.visible_parts(range(L), [range(L)]))


# -- the parts ---------------------------------------------------------------------------------------------------------


def _part(
    heads: tuple[int, int], queries: int, keys: int, dtype: torch.dtype, device: str = "cpu", head_dim: int = D
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(B, heads[0], queries), (B, heads[1], keys), (B, heads[1], keys), (B, heads[0], queries)]
    drawn = [torch.randn((*shape, head_dim), generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).to(device) for x in drawn]


def _random_mask(queries: int, keys: int) -> Tensor:
    """Make a random mask in which row 0 of the first sequence and the second half of the second sequence see no key."""
    mask = torch.rand(B, 1, queries, keys, generator=torch.Generator().manual_seed(1)) > 0.6
    mask[0, :, 0] = False
    mask[1, :, queries // 2 :] = False
    return mask


CASES = [(16, 16, "causal"), (16, 40, None), (40, 16, None), (16, 40, "masked"), (7, 5, "masked"), (300, 700, "masked")]


def _difference(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    return max(float((x - y).detach().abs().nan_to_num(nan=math.inf).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("queries", "keys", "kind"), CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_the_cpu_kernels_agree_with_plain_products(
    heads: tuple[int, int], queries: int, keys: int, kind: str | None, dtype: torch.dtype, limit: float
) -> None:
    mask: Any = _random_mask(queries, keys) if kind == "masked" else kind
    q, k, v, dout = _part(heads, queries, keys, dtype)
    fast, plain = attend(q, k, v, mask), kernels._attend_plain(q, k, v, mask)
    assert all(torch.equal(a.isinf(), b.isinf()) for a, b in zip(fast, plain, strict=True))
    assert _difference(tuple(x.nan_to_num(neginf=0) for x in fast), tuple(x.nan_to_num(neginf=0) for x in plain)) <= limit
    # Merge with other keys of the same weight, so that the merged sum differs from the part's own sum.
    out, lse = merge(*plain, torch.randn_like(plain[0]), plain[1].nan_to_num(neginf=0))
    backward = attend_backward(dout, q, k, v, out.to(dtype), lse, mask)
    exact = kernels._attend_plain_backward(dout, q, k, v, out.to(dtype), lse, mask)
    assert _difference(backward, exact) <= limit


def test_plain_products_agree_with_autograd() -> None:
    q, k, v, dout = _part((4, 2), 9, 9, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    with torch.no_grad():
        out, lse = kernels._attend_plain(q, k, v, "causal")
        gradients = kernels._attend_plain_backward(dout, q, k, v, out, lse, "causal")
    assert _difference((out, *gradients), (y, *torch.autograd.grad(y, leaves, dout))) <= 1e-14


@pytest.mark.parametrize("run", [attend, kernels._attend_plain])
def test_queries_that_see_nothing_weigh_nothing(run: Any) -> None:
    q, k, v, dout = _part((4, 2), 8, 12, torch.float64)
    mask = _random_mask(8, 12)
    blind = ~mask.any(-1).expand(B, 4, 8)
    out, lse = run(q, k, v, mask)
    assert torch.equal(lse == -math.inf, blind)
    assert not out[blind].any()
    assert not out.isnan().any()
    whole = merge(out, lse, *attend(q, k, v))
    assert _difference((whole[0][blind],), (attend(q, k, v)[0][blind],)) <= 1e-15
    nothing = run(q, k, v, torch.zeros_like(mask))
    both = merge(*nothing, *nothing)
    assert not both[0].any()
    assert (both[1] == -math.inf).all()
    for gradient in attend_backward(dout, q, k, v, *whole, torch.zeros_like(mask)):
        assert not gradient.any()


def test_merging_goes_in_any_order() -> None:
    q, k, v, _ = _part((4, 2), 8, 30, torch.float64)
    whole = attend(q, k, v)
    a, b, c = (attend(q, k[:, :, part], v[:, :, part]) for part in (slice(0, 5), slice(5, 6), slice(6, 30)))
    for merged in (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), merge(*merge(*c, *a), *b)):
        assert _difference(merged, whole) <= 1e-14


def test_merging_holds_for_weights_far_apart_and_widens() -> None:
    small, large = torch.full((1, 1, 1), -1e4), torch.full((1, 1, 1), 1e4)
    out, lse = merge(torch.full((1, 1, 1, 2), 3.0, dtype=torch.bfloat16), large, torch.ones(1, 1, 1, 2).bfloat16(), small)
    assert out.dtype == torch.float32
    assert out.tolist() == [[[[3.0, 3.0]]]]
    assert lse.tolist() == [[[1e4]]]


def test_kernels_take_expanded_and_strided_tensors() -> None:
    q, k, v, _ = _part((4, 2), 16, 16, torch.float64)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2).mT.contiguous().mT for x in (q, k, v)]
    out, lse = attend(q, k, v, "causal")
    ones = torch.ones(()).double().expand(q.shape)
    assert _difference(attend(*strided, "causal"), (out, lse)) <= 1e-15
    expected = attend_backward(ones.contiguous(), q, k, v, out, lse, "causal")
    assert _difference(attend_backward(ones, *strided, out, lse, "causal"), expected) <= 1e-15


# -- on a GPU ----------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA's kernels cannot run")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("queries", "keys", "kind"), CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("head_dim", [6, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_kernels_agree_with_plain_products(
    heads: tuple[int, int], queries: int, keys: int, kind: str | None, head_dim: int, dtype: torch.dtype
) -> None:
    mask: Any = _random_mask(queries, keys).cuda() if kind == "masked" else kind
    q, k, v, dout = _part(heads, queries, keys, dtype, "cuda", head_dim)
    fast = attend(q, k, v, mask)
    wide = [x.double() for x in (q, k, v)]
    plain = kernels._attend_plain(*wide, mask)
    limit = 1e-4 if dtype == torch.float32 else 6e-2
    assert _difference(tuple(x.nan_to_num(neginf=0) for x in fast), tuple(x.nan_to_num(neginf=0) for x in plain)) <= limit
    other = torch.randn(plain[0].shape, device="cuda", dtype=torch.float64)
    out, lse = merge(*plain, other, plain[1].nan_to_num(neginf=0))
    backward = attend_backward(dout, q, k, v, out.to(dtype), lse.float(), mask)
    exact = kernels._attend_plain_backward(dout.double(), *wide, out, lse, mask)
    for gradient, wanted in zip(backward, exact, strict=True):
        assert float((gradient - wanted).norm() / wanted.norm()) <= limit / 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("documents", [None, "few and long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_gpu_alone(documents: str | None, dtype: torch.dtype) -> None:
    alone, case = Groups.create(Fold(1)).context, Asked(documents)
    data = data_of((4, 2), dtype, 0)
    results = _attended([x.cuda() for x in data], alone, "ring", case, "cuda")
    assert max(_errors([x.cpu() for x in results], reference(data, case), alone)) <= (1e-5 if dtype == torch.float32 else 2e-2)

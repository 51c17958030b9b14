"""Attention slice by slice equals attention over whole sequences, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foldray.blueprint import Layout
from foldray.comm import Communicator, Groups
from foldray.fold import Fold
from foldray.model import slices as module
from foldray.model.attention_mask import AttentionMask
from foldray.model.slices import KVCache, slice_attention
from tests.foldray.model.sequences import ALL, HEADS, RANGED, Asked, B, D, L, data_of, masks, reference
from tests.foldray.packed import WAYS, packed

WHOLE = Asked()
CUTS = [(48,), (24, 24), (16, 24, 8), (8, 8, 16, 8, 8), (40, 8)]


def sliced(
    data: list[Tensor], communicator: Communicator, cut: tuple[int, ...], case: Asked = WHOLE, again: bool = False
) -> tuple[list[Tensor], KVCache]:
    """Return the output and the gradients of this rank's shard, with the slices forward in order and backward reversed.

    Several ranks gather keys and values before attention of a slice, and sum up their gradient after its backward.
    """
    layout, memory = Layout(communicator.size, cp_rank=communicator.index, slices=cut), KVCache()
    graphs, outs = [], []
    slices = layout.cut(L)
    for part, mask in zip(slices, masks(slices, communicator.size, communicator.index, case), strict=True):
        q, k, v = leaves = [x[:, :, layout.shard(part)].requires_grad_() for x in data[:3]]
        if communicator.size > 1:
            gathered = mask.in_order(communicator.all_gather(torch.cat((k.detach(), v.detach()), dim=-1)))
            memory.put(*gathered.split((k.shape[-1], v.shape[-1]), dim=-1), mask)
        for _ in range(1 + again):
            out = slice_attention(q, memory, mask, *((k, v) if communicator.size == 1 else ()))
        graphs.append((out, leaves, data[3][:, :, layout.shard(part)], mask))
        outs.append(out.detach())
    found = []
    for out, (q, k, v), dout, mask in reversed(graphs):
        if communicator.size == 1:
            found.insert(0, torch.autograd.grad(out, (q, k, v), dout))
            continue
        (dq,) = torch.autograd.grad(out, (q,), dout)
        block = communicator.reduce_scatter(mask.by_member(memory.take_gradient(mask))).to(k.dtype)
        found.insert(0, (dq, *block.split((k.shape[-1], v.shape[-1]), dim=-1)))
    return [torch.cat(outs, 2), *(torch.cat(each, 2) for each in zip(*found, strict=True))], memory


def errors(results: list[Tensor], references: list[Tensor], communicator: Communicator, cut: tuple[int, ...]) -> list[float]:
    """Return the largest difference of each tensor, as a share of the tensor's largest value."""
    held = Layout(communicator.size, cp_rank=communicator.index, slices=cut).piece(L)
    pairs = zip(results, references, strict=True)
    return [float((x - whole[:, :, held]).abs().max() / whole.abs().max()) for x, whole in pairs]


def parity(
    rank: int, cp: int, heads: tuple[int, int], dtype: torch.dtype, cases: list[Asked], way: str = "bools"
) -> list[list[float]]:
    groups = Groups.create(Fold(4, cp=cp), rank)
    found = []
    for case in cases:
        data = data_of(heads, dtype, groups.dp_rank, case.value_dim)
        whole = reference(data, case)
        for cut in CUTS:
            with WAYS[way]():
                results, memory = sliced(data, groups.context, cut, case)
            assert all(x.dtype == dtype for x in results)
            assert memory.made is None
            found.append(errors(results, whole, groups.context, cut))
    groups.close()
    return found


def worst(results: Any) -> float:
    return float(torch.tensor(results).max())  # unlike Python's max, this keeps NaN


@pytest.mark.gate(1)
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_output_and_gradients_are_those_of_whole_sequences(ranks, cp: int, heads: tuple[int, int]) -> None:
    assert worst(ranks(4).run(parity, cp, heads, torch.float64, ALL)) <= 1e-12


@pytest.mark.gate(1)
@pytest.mark.parametrize("way", ["packed", "plain"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_a_gpus_ways_give_the_same(ranks, cp: int, heads: tuple[int, int], way: str) -> None:
    assert worst(ranks(4).run(parity, cp, heads, torch.float64, RANGED, way)) <= 1e-12


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_narrower_types_stay_near(ranks, dtype: torch.dtype, limit: float) -> None:
    assert worst(ranks(4).run(parity, 2, (4, 2), dtype, [Asked(), Asked("few and long")])) <= limit


def test_a_forward_that_is_computed_again_finds_its_keys_and_values() -> None:
    alone, data = Groups.create(Fold(1)).context, data_of((4, 2), torch.float64, 0)
    once, twice = (sliced(data, alone, (16, 24, 8), Asked(), again)[0] for again in (False, True))
    for x, y in zip(once, twice, strict=True):
        assert torch.equal(x, y)


def test_keys_and_values_are_kept_once_and_their_gradients_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slice copies earlier keys and values. All kernels read the same memory, and add to the same gradient."""
    seen: list[tuple[int, ...]] = []
    attend = module.attend

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        seen.append((k.untyped_storage().data_ptr(), k.untyped_storage().nbytes()))
        return attend(q, k, v, mask)

    monkeypatch.setattr(module, "attend", watched)
    sliced(data_of((4, 2), torch.float64, 0), Groups.create(Fold(1)).context, (16, 24, 8))
    assert len(seen) == 5, "two parts of each slice but the first"
    assert set(seen) == {(seen[0][0], 2 * B * 2 * L * D * 8)}


def test_documents_that_lie_elsewhere_are_not_met() -> None:
    segment_BL = torch.arange(2).repeat_interleave(24).repeat(B, 1)
    parts = [AttentionMask(part, L, [[part]], 0, segment_BL).parts[0] for part in (range(16), range(16, 36), range(36, 48))]
    assert [[(part.keys, part.mask if part.mask in ("causal", None) else "mask") for part in each] for each in parts[:1]] == [
        [(slice(0, 16), "causal")]
    ]
    assert [part.keys for part in parts[1]] == [slice(0, 16), slice(16, 36)]
    assert [part.keys for part in parts[2]] == [slice(24, 36), slice(36, 48)]
    assert parts[2][0].mask is None
    assert parts[2][1].mask == "causal"


def test_on_a_gpu_one_part_has_all_keys_that_are_met_and_no_later_ones() -> None:
    segment_BL = torch.arange(4).repeat_interleave(12).repeat(B, 1)
    mask = AttentionMask(range(L), L, [[range(8), range(40, 48)], [range(8, 16), range(32, 40)]], 1, segment_BL)
    with packed():
        parts = [[part.keys for part in mask.visible_parts(queries, mask.sequence)] for queries in mask.held]
        plain = [(part.keys, part.mask) for part in mask.visible_parts(range(40, 48), [range(32, 40), range(40, 48)])]
    assert parts == [[slice(0, 16)], [slice(16, 24)]]  # behind the first chunk and the second, the sequence has a gap
    assert plain == [(slice(4, 8), None), (slice(8, 16), "causal")]  # one document needs no ranges

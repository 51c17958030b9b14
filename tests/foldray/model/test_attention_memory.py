"""How much memory attention takes on a GPU at 32K tokens, with fake tensors: masks cost next to nothing.

What CUDA's kernels allocate inside counts: float32 sums of the queries' gradient, of which every run of packed sequences has 128
more rows, and gradients of keys and values for every query head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from foldray.blueprint import AttentionSpec, Layout, ModelSpec
from foldray.comm import Communicator, Groups
from foldray.fold import Fold
from foldray.kernels import attention as kernels
from foldray.kernels.attention import attend, attend_backward
from foldray.kernels.key_ranges import KeyRanges
from foldray.model.attention_mask import AttentionMask
from foldray.model.context import ContextMode, context_attention
from foldray.model.slices import KVCache, slice_attention
from foldray.recipe import Recipe
from foldray.windows import find_window
from tests.foldray.live import Live, storage
from tests.foldray.packed import packed

MIB = 2**20
RECIPE = Recipe.load(Path(__file__).parents[3] / "recipes" / "one_node.yaml")
OWN = "tests.foldray.model.striding:STRIDES"


class Case(NamedTuple):
    """Attention of a model's layer.

    Args:
        documents: whether there are documents, of 1000 tokens in the mean.
        fused: whether a kernel takes this type.
    """

    model: ModelSpec
    layer: int = 0
    documents: bool = False
    sequences: int = 1
    tokens: int = 32768
    fused: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> AttentionSpec:
        return self.model.block(self.layer).attention


class Cut(NamedTuple):
    """How sequences are cut: into slices, and over context-parallel ranks."""

    slices: int = 1
    cp: int = 1
    mode: ContextMode = "ring"


GPT_OSS, DEEPSEEK = ModelSpec(preset="gpt-oss-20b"), ModelSpec(preset="deepseek-v3")
CASES = {
    "gpt-oss-20b, a window": Case(GPT_OSS),
    "gpt-oss-20b, documents": Case(GPT_OSS, 1, documents=True),
    "gpt-oss-20b, both": Case(GPT_OSS, documents=True),
    "deepseek-v3": Case(DEEPSEEK),
    "deepseek-v3, documents": Case(DEEPSEEK, documents=True),
    "qwen2-57b-a14b, a window": Case(ModelSpec(preset="qwen2-57b-a14b", windows=["sliding:4096"])),
    "one_node.yaml": Case(RECIPE.model, documents=RECIPE.data.mask_documents, sequences=RECIPE.training.micro_batch),
}
CUTS = {
    "whole": Cut(), "4 slices": Cut(4), "cp2, ring": Cut(cp=2), "cp2, all-gather": Cut(cp=2, mode="all_gather"),
    "4 slices, cp2": Cut(4, 2),
}  # fmt: skip


class _Aten:
    """torch's ops, which allocate in backward what the kernels of a GPU allocate."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)

    def _flash_attention_backward(self, *given: Any, **named: Any) -> Any:
        q_QND, k_KGD, runs = given[1], given[2], given[6].numel() - 1
        inside = _inside(q_QND, k_KGD, q_QND.shape[1], k_KGD.shape[1], len(q_QND) + 128 * runs)
        gradients = torch.ops.aten._flash_attention_backward(*given, **named)
        del inside
        return gradients

    def _scaled_dot_product_flash_attention_for_cpu_backward(self, *given: Any, **named: Any) -> Any:
        q_BNSD, k_BGTD = given[1:3]
        inside = _inside(q_BNSD, k_BGTD, q_BNSD.shape[1], k_BGTD.shape[1], len(q_BNSD) * q_BNSD.shape[2])
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, **named)
        del inside
        return gradients


def _inside(q: Tensor, k: Tensor, heads: int, groups: int, rows: int) -> list[Tensor]:
    width = q.shape[-1]
    rounded = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    expanded = [torch.empty((k.numel() // groups, heads), dtype=k.dtype) for _ in range(2 if heads > groups else 0)]
    return [torch.empty((rows, heads, rounded)), *expanded]


@pytest.fixture
def groups() -> Iterator[dict[int, Groups]]:
    """A rank alone, and the first of two ranks that share sequences. Nothing travels."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield {1: Groups.create(Fold(1)), 2: Groups.create(Fold(2, cp=2), 0)}
    dist.destroy_process_group()


def _masks(case: Case, cut: Cut, hidden: bool) -> list[AttentionMask]:
    """Return the masks of all slices; without `hidden`, those of plain causal attention. The host has found out all they need."""
    window, documents = case.spec.window if hidden else "full", hidden and case.documents
    length, size = case.tokens, case.tokens // cut.slices
    starts_BL = torch.rand(case.sequences, length, generator=torch.Generator().manual_seed(0)) < 1 / 1000
    segment_BL, slices = starts_BL.cumsum(1) if documents else None, Layout(1, slices=(size,) * cut.slices).cut(length)
    masks = []
    for part in slices:
        shards = [Layout(cut.cp, cp_rank=member).chunks(part) for member in range(cut.cp)]
        masks.append(AttentionMask(part, length, shards, 0, segment_BL, find_window(window)))
        for queries in masks[-1].held:
            for runs in (masks[-1].sequence, *shards, (range(queries.start), queries)):
                for part in masks[-1].visible_parts(queries, runs):
                    if isinstance(part.mask, KeyRanges):
                        part.mask.spans(case.sequences)
                        part.mask.seen(slice(0, 1))
    return masks


def _peak(case: Case, cut: Cut, groups: dict[int, Groups], hidden: bool = True) -> int:
    """Return the most bytes beside inputs, over the forward and the backward of all slices.

    Without `hidden`, attention is causal and has no sinks.
    """
    spec, ring = case.spec, groups[cut.cp].context
    query, key = (spec.heads, spec.key_dim), (spec.kv_heads, spec.key_dim)
    heads = query, key, (spec.kv_heads, spec.value_dim), (spec.heads, spec.value_dim)
    with packed(plain=not case.fused):
        masks = _masks(case, cut, hidden)
        with mock.patch.object(kernels, "_aten", _Aten()), FakeTensorMode(allow_non_fake_inputs=True):
            shape = case.sequences, case.tokens // cut.slices // cut.cp
            slices = [[torch.empty((*shape, *each), dtype=case.dtype).transpose(1, 2) for each in heads] for _ in masks]
            sinks = [torch.empty(spec.heads).requires_grad_()] if hidden and spec.sinks else []
            with Live({storage(x)[0] for each in slices for x in each}) as live:
                if hidden or cut != Cut():
                    _there_and_back(slices, masks, sinks, ring, cut.mode)
                else:  # nothing but the kernel
                    (q, k, v, dout), *_ = slices
                    attend_backward(dout, q, k, v, *attend(q, k, v, "causal"), "causal")
    return live.peak


def _there_and_back(
    slices: list[list[Tensor]], masks: list[AttentionMask], sinks: list[Tensor], ring: Communicator, mode: ContextMode
) -> None:
    """Run all slices forward, and all backward."""
    memory, graphs, several = KVCache(), [], len(slices) > 1
    for each, mask in zip(slices, masks, strict=True):
        leaves, own = [x.requires_grad_() for x in each[:3]], not several or mask.alone
        q, k, v = leaves
        if not own:
            gathered = mask.in_order(ring.all_gather(torch.cat((k.detach(), v.detach()), dim=-1)))
            memory.put(*gathered.split((k.shape[-1], v.shape[-1]), dim=-1), mask)
        if several:
            out = slice_attention(q, memory, mask, *((k, v) if own else (None, None)), *sinks)
        else:
            out = context_attention(q, k, v, ring, mode, mask, *sinks)
        graphs.append((out, [*leaves[: 3 if own else 1], *sinks], each[3]))
    while graphs:
        torch.autograd.grad(*graphs.pop())


@pytest.mark.gate(4)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_masks_take_no_memory(groups: dict[int, Groups], name: str, cut: str) -> None:
    """Attention takes at most a fifth more than causal attention of the same shapes, which is cut alike."""
    case, along = CASES[name], CUTS[cut]
    peak, plain = (_peak(case, along, groups, hidden) for hidden in (True, False))
    assert peak <= 1.2 * plain, f"{peak / MIB:.0f} MiB, and {plain / MIB:.0f} MiB without masks and sinks"


WIDE = {
    "float32": Case(GPT_OSS, 0, True, 1, 8192, False, torch.float32),
    "float64": Case(DEEPSEEK, 0, True, 1, 8192, False, torch.float64),
    "a window of the user's own": Case(ModelSpec(preset="qwen2-57b-a14b", windows=[OWN])),
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("cut", ["whole", "4 slices", "cp2, ring"])
@pytest.mark.parametrize("name", WIDE)
def test_where_no_kernel_fits_few_scores_are_held(groups: dict[int, Groups], name: str, cut: str) -> None:
    """Plain products hold at most `_MOST_SCORES` scores, and some tensors like them."""
    case, along = WIDE[name], CUTS[cut]
    spec, size = case.spec, case.dtype.itemsize
    inputs = case.tokens * (2 * spec.queries + spec.keys + spec.values) * size
    assert _peak(case, along, groups) <= 3 * inputs + 6 * kernels._MOST_SCORES * max(size, 4)

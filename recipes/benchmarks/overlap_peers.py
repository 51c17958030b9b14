"""How other projects run the blocks of overlap.py: DeepSpeed's MoE layer, and foldray's with one thing of theirs at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from common import GatedMlp
from torch import Tensor, nn

from foldray.blueprint import ModelSpec
from foldray.comm import Communicator
from foldray.model import Batch, Transformer
from foldray.moe import Layer

PREFIXES = ("mm/", "gloo/", "padded/")


class GlooOrder(Communicator):
    """A communicator with gloo's own all-to-all, which sends before it receives. Other projects call this one."""

    _sends_first = False  # whether foldray has to work around this order


def without_prefixes(name: str) -> str:
    """Return a variant's schedule."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


@contextmanager
def as_others(name: str, layers: Sequence[Layer]) -> Iterator[None]:
    """Do as other projects do, within the context.

    Args:
        name: name of a variant. With `mm/`, experts multiply with `torch.mm`, even if oneDNN is faster. With `gloo/`, rows
            travel with gloo's own all-to-all.
        layers: the MoE layers of the variant.
    """
    exchanges = [layer.exchange for layer in layers]  # type: ignore[attr-defined]
    own = [getattr(exchange, "tokens", None) for exchange in exchanges]
    try:
        # torch.backends.mkldnn.flags also changes settings of Intel GPUs, and warns, so it is not used here.
        torch._C._set_mkldnn_enabled("mm/" not in name)
        if "gloo/" in name:
            for exchange in exchanges:
                tokens = exchange.tokens
                exchange.tokens = GlooOrder(**{field.name: getattr(tokens, field.name) for field in fields(tokens)})
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)
        for exchange, tokens in zip(exchanges, own, strict=True):
            if tokens is not None:
                exchange.tokens = tokens


def deepspeed_stack(spec: ModelSpec, model: Transformer, hosts: int) -> nn.Module:
    """Make blocks of foldray's norms and attention, and DeepSpeed's gate, all-to-all and experts of the same size."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.moe.layer import MoE

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([model.block(layer) for layer in range(spec.layers)])
            settings: dict[str, Any] = {"ep_size": hosts, "k": 1, "capacity_factor": 1.0, "use_rts": False}
            moes = [MoE(spec.hidden, GatedMlp(spec.hidden, spec.expert_hidden), hosts, **settings) for _ in spec.moe_layers]
            self.moes = nn.ModuleDict({str(layer): moe for layer, moe in zip(spec.moe_layers, moes, strict=True)})
            for moe in moes:
                moe.set_deepspeed_parallelism()

        def forward(self, x_BLH: Tensor) -> Tensor:
            (place,) = model.places(Batch(*[torch.zeros(x_BLH.shape[:2], dtype=torch.int64)] * 2))
            for layer in range(spec.layers):
                block = model.block(layer)
                x_BLH = block.attend(x_BLH, place)
                moe = self.moes[str(layer)] if spec.is_moe(layer) else None
                x_BLH = block.feed(x_BLH) if moe is None else x_BLH + moe(block.ffn_norm(x_BLH))[0]
            return x_BLH

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles code meanwhile
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": str(hosts)}
    deepspeed.init_distributed("gloo", verbose=False)
    return Stack()

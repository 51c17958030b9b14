"""The decoder-only Transformer with Mixture-of-Experts blocks.

B sequences, S positions, H hidden, V vocabulary, L MoE layers, E experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from foldray.comm import Groups
from foldray.model.attention import Attention
from foldray.model.layers import FeedForward, Norm
from foldray.moe.layer import Experts, MoeBackend, MoELayer, MoeStats
from foldray.moe.router import Router
from foldray.spec import ModelSpec, parameter_table


class Losses(NamedTuple):
    """What one pass over B sequences gives.

    Shapes: total, language, balance, z scalars, each a mean over the pass's tokens (balance and z also over MoE layers;
    `total` carries the gradient: language + weighted balance and z summed over layers); count_LE int64 assignments per MoE
    layer and expert; dropped int64 scalar.
    """

    total: torch.Tensor
    language: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor
    count_LE: torch.Tensor
    dropped: torch.Tensor


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm dense or MoE feed-forward."""

    def __init__(
        self, model: ModelSpec, layer: int, groups: Groups, backend: MoeBackend, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        self.attention_norm = Norm(model, device, dtype)
        self.attention = Attention(model, device, dtype)
        self.ffn_norm = Norm(model, device, dtype)
        if model.is_moe(layer):
            shared = FeedForward(model, model.shared_hidden, device, dtype) if model.shared_hidden else None
            self.moe = MoELayer(model, groups, backend, shared, device, dtype)
        else:
            self.ffn = FeedForward(model, model.ffn_hidden, device, dtype)

    def forward(self, x_BSH: torch.Tensor, segment_BS: torch.Tensor | None) -> tuple[torch.Tensor, MoeStats | None]:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), segment_BS)
        h_BSH = self.ffn_norm(x_BSH)
        if hasattr(self, "moe"):
            y_BSH, stats = self.moe(h_BSH)
            return x_BSH + y_BSH, stats
        return x_BSH + self.ffn(h_BSH), None


class Transformer(nn.Module):
    """This rank's part of the model.

    Args:
        model: what to build.
        groups: the fold's communicators; this rank holds its own share of every MoE block's experts.
        backend: kernels of the MoE layers.
        seed: every parameter is drawn from its own stream (seed, global name): all folds start equal.
    """

    def __init__(
        self,
        model: ModelSpec,
        groups: Groups,
        backend: MoeBackend | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.spec = model
        device, backend = torch.device(device or "cpu"), backend or MoeBackend()
        self.embedding = _table(model.vocab, model.hidden, device, dtype)
        if model.positions == "learned":
            self.positions = _table(model.max_positions, model.hidden, device, dtype)
        self.blocks = nn.ModuleList(Block(model, i, groups, backend, device, dtype) for i in range(model.layers))
        self.final_norm = Norm(model, device, dtype)
        if not model.tied_embeddings:
            self.head = _table(model.vocab, model.hidden, device, dtype)
        self._initialise(seed)

    def forward(self, token_BS: torch.Tensor, target_BS: torch.Tensor, segment_BS: torch.Tensor | None = None) -> Losses:
        """Losses of next-token prediction; `segment_BS` (document numbers) keeps attention inside documents."""
        logits_BSV, stats = self.logits(token_BS, segment_BS)
        logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
        language = F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())
        if not stats:
            zero = language.detach().new_zeros(())
            none_LE = target_BS.new_zeros(0, self.spec.experts)
            return Losses(language, language.detach(), zero, zero, none_LE, target_BS.new_zeros(()))
        balance_L, z_L = (torch.stack([getattr(layer, name) for layer in stats]) for name in ("balance_loss", "z_loss"))
        router = self.spec.router
        total = language + router.balance_loss * balance_L.sum() + router.z_loss * z_L.sum()
        return Losses(
            total, language.detach(), balance_L.detach().mean(), z_L.detach().mean(),
            torch.stack([layer.count_E for layer in stats]), torch.stack([layer.dropped for layer in stats]).sum(),
        )  # fmt: skip

    def logits(self, token_BS: torch.Tensor, segment_BS: torch.Tensor | None = None) -> tuple[torch.Tensor, list[MoeStats]]:
        """Logits [B, S, V] and what each MoE block tells."""
        x_BSH = self.embedding(token_BS)
        if self.spec.positions == "learned":
            x_BSH = x_BSH + self.positions.weight[: token_BS.shape[1]]
        found = []
        for block in self.blocks:
            x_BSH, stats = block(x_BSH, segment_BS)
            if stats is not None:
                found.append(stats)
        head = self.embedding if self.spec.tied_embeddings else self.head
        return F.linear(self.final_norm(x_BSH), head.weight), found

    def routers(self) -> Iterator[tuple[str, Router]]:
        """Global name and router of every MoE block."""
        return ((name, module) for name, module in self.named_modules() if isinstance(module, Router))

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters whose gradients are summed over EDP; all others are summed over DP×CP."""
        return [parameter for module in self.modules() if isinstance(module, Experts) for parameter in module.parameters()]

    def global_names(self) -> dict[str, list[tuple[str, int | None]]]:
        """For each parameter of this rank, its parts by global name: (name, index into the first axis, or None for all of it)."""
        names: dict[str, list[tuple[str, int | None]]] = {name: [(name, None)] for name, _ in self.named_parameters()}
        for prefix, module in self.named_modules():
            if isinstance(module, Experts):
                for kind in ("up", "down"):
                    names[f"{prefix}.{kind}"] = [
                        (f"{prefix}.{module.first + i}.{kind}", i) for i in range(len(getattr(module, kind)))
                    ]
        return names

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        table = {parameter.name: parameter for parameter in parameter_table(self.spec)}
        parameters = dict(self.named_parameters())
        for local, parts in self.global_names().items():
            for name, index in parts:
                target = parameters[local] if index is None else parameters[local][index]
                _draw(target, table[name].init, seed, name)


def _table(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> nn.Embedding:
    """An embedding whose weight is left to be drawn."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width, device=device, dtype=dtype))


def _draw(target: torch.Tensor, std: float | None, seed: int, name: str) -> None:
    if std is None or std == 0:
        target.fill_(1.0 if std is None else 0.0)
        return
    # A stream per name: the weights do not depend on which rank draws them, nor on the order.
    # (Torch's generator heeds 32 bits of its seed.)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    target.copy_(torch.empty(target.shape).normal_(0.0, std, generator=generator))

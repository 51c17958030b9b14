"""Causal self-attention with grouped key/value heads and rotary positions, cut over heads (TP) and positions (CP).

Heads get their queries, keys and values from the block's input, or from narrow vectors (latent attention). Linear attention
has the same steps (`linear.py`).

Legend: B sequences, s positions of this rank's piece, S positions of its context-parallel shard (s · tp), H hidden, N query
heads and G key/value heads of this rank, D width of a head's queries and keys, V width of its values, R columns of a head that
turn with its position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from foldray.blueprint import AttentionSpec, GrowthSpec, ModelSpec, RopeSpec
from foldray.blueprint.parts import Parts, columns
from foldray.comm import Groups, Pending, gather_sequence, scatter_sequence
from foldray.kernels import fused
from foldray.kernels.attention import takes_fused
from foldray.kernels.autograd import Later, product
from foldray.model.attention_mask import AttentionMask
from foldray.model.context import ContextMode, context_attention
from foldray.model.layers import HeadNorms, LowRank, rms_norm, scaled
from foldray.model.rotary import Rotation, rotate, rotation
from foldray.model.slices import KVCache, slice_attention
from foldray.model.states import Memory


@dataclass(frozen=True, eq=False)
class Place:
    """The positions of a slice that this rank holds (its shard), and the keys that queries see, by the name of the window.

    Slices with the same positions may share their rotations. `within_BS` has the positions in documents, if there are any.
    """

    position_S: torch.Tensor
    masks: Mapping[str, AttentionMask]
    within_BS: torch.Tensor | None = None
    rotations: dict[tuple[RopeSpec, torch.dtype], Rotation] = field(default_factory=dict, repr=False)

    def rotation(self, rope: RopeSpec, dtype: torch.dtype) -> Rotation:
        """Return `rotation` of the positions. It is computed once for all layers and micro-batches."""
        if (rope, dtype) not in self.rotations:
            self.rotations[rope, dtype] = rotation(self.position_S, rope, dtype)
        return self.rotations[rope, dtype]

    def grown(self, q_BSND: torch.Tensor, growth: GrowthSpec | None) -> torch.Tensor:
        """Return queries that have grown with their positions."""
        if growth is None:
            return q_BSND
        position_BS = self.position_S[None] if self.within_BS is None else self.within_BS
        factor_BS = 1 + growth.rate * (position_BS // growth.every).to(torch.float64).log1p()
        return q_BSND * factor_BS.to(q_BSND.dtype)[..., None, None]


class Projected(NamedTuple):
    """What attention takes, each as [B, heads, S, width]. A gate has a column for each head, or one for each of its outputs."""

    q_BNSD: torch.Tensor
    k_BGSD: torch.Tensor
    v_BGSV: torch.Tensor
    gate_BNSE: torch.Tensor | None = None


class Attention(nn.Module, ABC):
    """Attention with this rank's heads: [B, s, H] → [B, s, H].

    If context-parallel ranks share slices, attention of a slice has three steps, so that other ops can run between them:
    `project` and `start_gather`, then `store` and `attend`. In backward, `start_scatter` and `summed` bring the gradient of
    keys and values back.

    Subclasses say what heads compute (`SoftmaxAttention`, `LinearAttention`). `out` is [N·V, H], and `out_bias` [H] or None.

    Args:
        share: this rank's heads.
        context: how keys and values reach the other context-parallel ranks: around a ring, or in one all-gather.
    """

    def __init__(
        self, share: AttentionSpec, model: ModelSpec, groups: Groups, context: ContextMode = "ring", later: Later | None = None
    ):
        super().__init__()
        self.share, self.tensor, self.ring, self.context = share, groups.tensor, groups.context, context
        self.later, self.out_scale = later or Later(), model.residual_scale
        self.out = nn.Parameter(torch.empty(share.outputs, model.hidden))
        self.out_bias = nn.Parameter(self.out.new_empty(model.hidden)) if share.bias == "all" else None
        self._make(model)
        if (adapter := model.adapter) is not None:
            for part in adapter.attention:
                rows, width = (share.outputs, model.hidden) if part == "out" else (model.hidden, share.inputs[part][1])
                self.add_module(f"{part}_lora", LowRank(rows, width, adapter, self.later))

    @abstractmethod
    def memory(self, forgets: bool = False) -> Memory:
        """Make what keeps the slices of a micro-batch so far.

        Args:
            forgets: no slice goes backward, so what no later slice needs may be forgotten.
        """

    @abstractmethod
    def forward(self, x_BsH: torch.Tensor, place: Place, memory: Any = None) -> torch.Tensor:
        """Compute attention of whole sequences, or of one slice to everything up to it: [B, s, H] → [B, s, H].

        The call adds this slice to the memory of earlier ones. Whole sequences do not use it.
        """

    @abstractmethod
    def project(self, x_BsH: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what stays here of a slice, and the block of it that all members need, both with the sequences first."""

    def start_gather(self, block: torch.Tensor) -> Pending:
        """Start to gather the blocks of a slice. Every context-parallel rank must call this."""
        return self.ring.start_all_gather(block)

    @abstractmethod
    def store(self, gathered: torch.Tensor, place: Place, memory: Any) -> None:
        """Store the gathered blocks of a slice."""

    @abstractmethod
    def attend(self, stayed: torch.Tensor, place: Place, memory: Any) -> torch.Tensor:
        """Compute attention of a slice whose blocks are stored, from what `project` has left here: [B, s, H]."""

    @abstractmethod
    def start_scatter(self, place: Place, memory: Any) -> Pending:
        """Start to send the gradient of a slice's blocks to the ranks that hold them.

        The parts of all ranks travel, and `summed` adds them up. That is as many bytes as a reduce-scatter, and gloo's
        reduce-scatter would hold up the host.
        """

    def summed(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's block: [cp · B, …] → [B, …]."""
        return shares.unflatten(0, (self.ring.size, len(shares) // self.ring.size)).sum(0)

    @abstractmethod
    def _make(self, model: ModelSpec) -> None:
        """Make the parameters beside `out`, of its type and on its device."""

    def _adapter(self, part: str) -> nn.Module | None:
        """Return the adapter of a product; None if it has none."""
        return self._modules.get(f"{part}_lora")

    def _left(self, y_BSV: torch.Tensor) -> torch.Tensor:
        """Return the sum over all heads, from their outputs side by side: [B, S, N · V] → [B, s, H]."""
        y_BSH, adapter = product(y_BSV, self.out, self.later), self._adapter("out")
        y_BsH = scatter_sequence(y_BSH if adapter is None else y_BSH + adapter(y_BSV), self.tensor)
        y_BsH = y_BsH if self.out_bias is None else y_BsH + self.out_bias
        return scaled(y_BsH, self.out_scale)


class SoftmaxAttention(Attention):
    """Attention whose queries see the keys of earlier tokens.

    Subclasses say how queries, keys and values are made (`HeadAttention`, `LatentAttention`). `sinks` is [N] or None.
    """

    def _make(self, model: ModelSpec) -> None:
        self.sinks = nn.Parameter(self.out.new_empty(self.share.heads)) if self.share.sinks else None

    def memory(self, forgets: bool = False) -> KVCache:
        return KVCache()

    def forward(self, x_BsH: torch.Tensor, place: Place, memory: KVCache | None = None) -> torch.Tensor:
        q_BNSD, k_BGSD, v_BGSV, gate_BNSE = self._projected(x_BsH, place)
        return self._merged(self._attend(q_BNSD, k_BGSD, v_BGSV, place.masks[self.share.window], memory), gate_BNSE)

    def project(self, x_BsH: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries of a slice [B, N, S, D + E], and its keys and values side by side [B, G, S, D + V].

        Beside queries are the E columns of a gate, if there is one.
        """
        q_BNSD, k_BGSD, v_BGSV, gate_BNSE = self._projected(x_BsH, place)
        beside = q_BNSD if gate_BNSE is None else torch.cat((q_BNSD, gate_BNSE), dim=-1)
        return beside, torch.cat((k_BGSD, v_BGSV), dim=-1)

    def store(self, gathered: torch.Tensor, place: Place, memory: KVCache) -> None:
        mask = place.masks[self.share.window]
        k_BGTD, v_BGTV = mask.in_order(gathered).split((self.share.key_dim, self.share.value_dim), dim=-1)
        memory.put(k_BGTD, v_BGTV, mask)

    def attend(self, q_BNSD: torch.Tensor, place: Place, memory: KVCache) -> torch.Tensor:
        gate_BNSE = None
        if self.share.gates:
            q_BNSD, gate_BNSE = q_BNSD.tensor_split((self.share.key_dim,), dim=-1)
        return self._merged(slice_attention(q_BNSD, memory, place.masks[self.share.window], sink_N=self.sinks), gate_BNSE)

    def start_scatter(self, place: Place, memory: KVCache) -> Pending:
        mask = place.masks[self.share.window]
        share = mask.by_member(memory.take_gradient(mask))
        rows = [len(share) // self.ring.size] * self.ring.size
        return self.ring.start_all_to_all(share, rows, rows)

    @abstractmethod
    def _projected(self, x_BsH: torch.Tensor, place: Place) -> Projected:
        """Return queries, keys, values and a gate."""

    def _merged(self, y_BNSV: torch.Tensor, gate_BNSE: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum over all heads, which a gate may weigh: [B, N, S, V] → [B, s, H]."""
        if gate_BNSE is not None:
            y_BNSV = y_BNSV * torch.sigmoid(gate_BNSE)
        return self._left(y_BNSV.transpose(1, 2).flatten(2))

    def _attend(
        self, q_BNSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, mask: AttentionMask, memory: KVCache | None
    ) -> torch.Tensor:
        if memory is not None and not mask.whole:
            return slice_attention(q_BNSD, memory, mask, k_BGSD, v_BGSV, self.sinks)
        # torch's fused attention has no sinks, one width of heads and no ranges of keys, and may hold all scores of wide types.
        plain = self.sinks is None and self.share.key_dim == self.share.value_dim and takes_fused(q_BNSD, v_BGSV)
        if self.ring.size > 1 or not plain or mask.hides_ranges:
            return context_attention(q_BNSD, k_BGSD, v_BGSV, self.ring, self.context, mask, self.sinks)
        return whole_attention(q_BNSD, k_BGSD, v_BGSV, mask)


def whole_attention(q_BNSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Compute attention of whole sequences that one rank holds: [B, N, S, V].

    Each run of queries is computed with the keys that it may see (`AttentionMask.query_runs`).
    """
    outs, grouped = [], q_BNSD.shape[1] != k_BGSD.shape[1]
    for queries, keys, visible in mask.query_runs:
        given, causal = (visible, False) if isinstance(visible, torch.Tensor) else (None, visible == "causal")
        q, k, v = (x[:, :, run.start : run.stop] for x, run in ((q_BNSD, queries), (k_BGSD, keys), (v_BGSV, keys)))
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=causal, enable_gqa=grouped))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


class HeadAttention(SoftmaxAttention):
    """Attention whose queries, keys and values come from one product with `qkv` [H, N·D + G·(D + V)], as does a gate.

    `qkv_bias` and `norm` are None if the model has none. If several TP ranks have the same key/value head, `qkv` [H, N·D] makes
    queries and the gate alone, and `key` and `value` are those of all heads, [H, …], whose own columns this rank uses.
    """

    def _make(self, model: ModelSpec) -> None:
        super()._make(model)
        share = self.share
        width, biased, copied = share.queries + share.keys + share.values, share.bias != "none", share.copies > 1
        self.qkv = nn.Parameter(self.out.new_empty(model.hidden, (share.queries if copied else width) + share.gates))
        self.qkv_bias = nn.Parameter(self.out.new_empty(share.queries if copied else width)) if biased else None
        if copied:
            widths = self.tensor.size // share.copies * share.keys, self.tensor.size // share.copies * share.values
            self.key, self.value = (nn.Parameter(self.out.new_empty(model.hidden, width)) for width in widths)
            self.key_bias, self.value_bias = (nn.Parameter(self.out.new_empty(width)) if biased else None for width in widths)
        self.norm = HeadNorms(share, model, self.tensor) if share.norm != "none" else None

    def _projected(self, x_BsH: torch.Tensor, place: Place) -> Projected:
        x_BSH, share, gate_BNSE = gather_sequence(x_BsH, self.tensor), self.share, None
        product_BSW = self._adapted(product(x_BSH, self.qkv, self.later), x_BSH)
        qkv_bias: torch.Tensor | None = self.qkv_bias
        if share.gates:
            product_BSW, gate_BSW = product_BSW.tensor_split((product_BSW.shape[-1] - share.gates,), dim=-1)
            gate_BNSE = _by_head(gate_BSW, share.heads).transpose(1, 2)
        if share.copies > 1:
            product_BSW, qkv_bias = self._with_copies(x_BSH, product_BSW)
        if (split := self._split_rotated(product_BSW, qkv_bias, place)) is not None:
            return split
        if qkv_bias is not None:
            product_BSW = product_BSW + qkv_bias
        q_BSND, k_BSGD, v_BSGV = (
            part.unflatten(-1, (part.shape[-1] // width, width))
            for part, width in zip(
                product_BSW.split((share.queries, share.keys, share.values), dim=-1),
                (share.key_dim, share.key_dim, share.value_dim),
                strict=True,
            )
        )
        turns_first = share.norm == "turned_head"
        if not turns_first:
            q_BSND, k_BSGD = self._normed(q_BSND, k_BSGD, place)  # which keeps the whole product for backward
        if share.rope is not None:
            turn = place.rotation(share.rope, product_BSW.dtype)
            q_BSND, k_BSGD = rotate(q_BSND, turn), rotate(k_BSGD, turn)
            if self.norm is None or turns_first:  # as a view, the values would keep the whole product alive until backward
                v_BSGV = v_BSGV.contiguous()
        if turns_first:
            q_BSND, k_BSGD = self._normed(q_BSND, k_BSGD, place)
        return Projected(q_BSND.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGV.transpose(1, 2), gate_BNSE)

    def _normed(self, q_BSND: torch.Tensor, k_BSGD: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        if self.norm is not None:
            q_BSND, k_BSGD = self.norm(q_BSND, k_BSGD)
        return place.grown(scaled(q_BSND, self.share.scale), self.share.growth), k_BSGD

    def _adapted(self, product_BSW: torch.Tensor, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the product with what its adapters add."""
        adapters = {part: self._adapter(part) for part in self.share.inputs}
        if not any(adapters.values()):
            return product_BSW
        none_BS1 = x_BSH.new_zeros(1).expand(*x_BSH.shape[:-1], 1)
        added = (none_BS1.expand(*none_BS1.shape[:-1], self.share.inputs[part][1]) if adapter is None else adapter(x_BSH)
                 for part, adapter in adapters.items())  # fmt: skip
        return product_BSW + torch.cat(list(added), dim=-1)

    def _with_copies(self, x_BSH: torch.Tensor, q_BSW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the products and biases of queries, and of this rank's key/value head, which other ranks have as well."""
        head, share = self.tensor.index // self.share.copies, self.share
        keys, values = (slice(head * width, (head + 1) * width) for width in (share.keys, share.values))
        k_BSW, v_BSW = (
            product(x_BSH, weight, self.later, columns=own) for weight, own in ((self.key, keys), (self.value, values))
        )
        bias = None
        if self.qkv_bias is not None:
            assert self.key_bias is not None
            assert self.value_bias is not None
            bias = torch.cat((self.qkv_bias, self.key_bias[keys], self.value_bias[values]))
        return torch.cat((q_BSW, k_BSW, v_BSW), dim=-1), bias

    def _split_rotated(self, product_BSW: torch.Tensor, qkv_bias: torch.Tensor | None, place: Place) -> Projected | None:
        """Do what follows the product in one kernel for GPUs; None if it cannot."""
        share = self.share
        if share.rope is None or share.rope.interleaved or self.norm is not None or share.key_dim != share.value_dim:
            return None
        if share.growth is not None or share.gates or not fused.fits(product_BSW):
            return None
        heads, turn = fused.Heads(share.heads, share.kv_heads, share.key_dim), place.rotation(share.rope, product_BSW.dtype)
        found = fused.split_rotate(product_BSW, qkv_bias, turn.cos_SR, turn.sin_SR, heads, share.scale)
        return Projected(*(part.transpose(1, 2) for part in found))

    def parts(self) -> Parts:
        own = ("key", "value") if self.share.copies > 1 else ()
        widths = {part: width for part, (_, width) in self.share.inputs.items() if part not in own}
        biases = columns({f"{part}_bias": width for part, width in widths.items() if part != "gate"}, before=())
        names = ("out", "out_bias", "sinks", *own, *(f"{part}_bias" for part in own))
        whole: Parts = {name: [(name, ())] for name in names}
        return {"qkv": columns(widths), "qkv_bias": biases, **whole}


class LatentAttention(SoftmaxAttention):
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    `down` [H, …] makes the narrow vectors of this rank's piece: that of queries, if there is one, that of keys and values, and
    the columns of keys that all heads share. TP gathers these vectors instead of the block's input. From them, `query` and
    `key_value` make the heads of this rank; a head's shared columns come last, and they alone turn.
    """

    def _make(self, model: ModelSpec) -> None:
        super()._make(model)
        share = self.share
        assert share.latent
        made, latent, new = share.inputs, share.latent, self.out.new_empty
        self.latent, self.eps = latent, model.latent_norm_eps or model.norm_eps
        self.down = nn.Parameter(new(model.hidden, sum(share.downs.values())))
        self.query = nn.Parameter(new(made["query"][0] or model.hidden, made["query"][1]))
        self.key_value = nn.Parameter(new(*made["key_value"]))
        self.query_norm = nn.Parameter(new(latent.query_rank)) if latent.query_rank else None
        self.key_value_norm = nn.Parameter(new(latent.rank))

    def _projected(self, x_BsH: torch.Tensor, place: Place) -> Projected:
        share = self.share
        query_BSR, latent_BSR, shared_BSR = self._narrow(x_BsH)
        q_BSND, shared_BSNR = _by_head(product(query_BSR, self.query, self.later), share.heads), shared_BSR.unsqueeze(2)
        if share.rope is not None:
            turn = place.rotation(share.rope, latent_BSR.dtype)
            q_BSND = torch.cat((q_BSND[..., : share.still], rotate(q_BSND[..., share.still :], turn)), dim=-1)
            shared_BSNR = rotate(shared_BSNR, turn)
        made_BSNW = _by_head(product(latent_BSR, self.key_value, self.later), share.heads)
        k_BSND, v_BSNV = made_BSNW.split((share.still, share.value_dim), dim=-1)
        k_BSND = torch.cat((k_BSND, shared_BSNR.expand(-1, -1, share.heads, -1)), dim=-1)
        q_BSND = place.grown(scaled(q_BSND, share.scale), share.growth)
        # As a view, the values would keep the whole product alive until backward.
        return Projected(q_BSND.transpose(1, 2), k_BSND.transpose(1, 2), v_BSNV.contiguous().transpose(1, 2))

    def _narrow(self, x_BsH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return, for the shard, what queries are made from, what keys and values are made from, and the shared columns."""
        latent = self.latent
        widths = (latent.query_rank, latent.rank, latent.shared)
        query_BsR, latent_BsR, shared_BsR = product(x_BsH, self.down, self.later).split(widths, dim=-1)
        latent_BsR = rms_norm(latent_BsR, self.key_value_norm, self.eps)
        if self.query_norm is not None:
            query_BsR = rms_norm(query_BsR, self.query_norm, self.eps)
        if self.tensor.size > 1:
            narrow = gather_sequence(torch.cat((query_BsR, latent_BsR, shared_BsR), dim=-1), self.tensor).split(widths, dim=-1)
            # Copies, so that the products do not copy them again and keep both.
            query_BsR, latent_BsR, shared_BsR = narrow[0].contiguous(), narrow[1].contiguous(), narrow[2]
        return query_BsR if latent.query_rank else gather_sequence(x_BsH, self.tensor), latent_BsR, shared_BsR

    def parts(self) -> Parts:
        names = {name: name for name in ("query", "key_value", "out", "sinks")}
        names |= {"query_norm": "norm.query", "key_value_norm": "norm.key_value"}
        whole: Parts = {own: [(name, ())] for own, name in names.items()}
        return {"down": columns(self.share.downs), **whole}


def _by_head(x_BSW: torch.Tensor, heads: int) -> torch.Tensor:
    """Return columns by head: [B, S, N · D] → [B, S, N, D]. There may be no sequence."""
    return x_BSW.unflatten(-1, (heads, x_BSW.shape[-1] // heads))

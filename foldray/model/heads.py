"""How heads get their queries, keys and values: from the block's input, or from narrow vectors (latent attention).

Legend: B sequences, s positions of this rank's piece, S positions of its context-parallel shard (s · tp), H hidden, N query
heads and G key/value heads of this rank, D width of a head's queries and keys, V width of its values, R of its columns turn.
"""

from __future__ import annotations

import torch
from torch import nn

from foldray.blueprint import ModelSpec
from foldray.blueprint.parts import Parts, columns
from foldray.comm import gather_sequence
from foldray.kernels.later import product
from foldray.model.attention import Attention, Place
from foldray.model.norms import HeadNorms, rms_norm
from foldray.model.rotary import rotate


class HeadAttention(Attention):
    """Attention whose queries, keys and values come from one product with `qkv` [H, N·D + G·(D + V)].

    `qkv_bias` and `norm` are None if the model has none.
    """

    def _make(self, model: ModelSpec) -> None:
        share = self.share
        width = share.queries + share.keys + share.values
        self.qkv = nn.Parameter(self.out.new_empty(model.hidden, width))
        self.qkv_bias = nn.Parameter(self.out.new_empty(width)) if share.bias != "none" else None
        self.norm = HeadNorms(share, model.norm_eps, self.tensor) if share.norm != "none" else None

    def _projected(self, x_BsH: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x_BSH, share = gather_sequence(x_BsH, self.tensor), self.share
        product_BSW = product(x_BSH, self.qkv, self.later)
        if self.qkv_bias is not None:
            product_BSW = product_BSW + self.qkv_bias
        q_BSND, k_BSGD, v_BSGV = (
            part.unflatten(-1, (part.shape[-1] // width, width))
            for part, width in zip(
                product_BSW.split((share.queries, share.keys, share.values), dim=-1),
                (share.key_dim, share.key_dim, share.value_dim),
                strict=True,
            )
        )
        if self.norm is not None:
            q_BSND, k_BSGD = self.norm(q_BSND, k_BSGD)  # which keeps the whole product for backward
        if share.rope is not None:
            turn = place.rotation(share.rope, product_BSW.dtype)
            q_BSND, k_BSGD = rotate(q_BSND, turn), rotate(k_BSGD, turn)
            q_BSND = q_BSND if share.scale == 1 else q_BSND * share.scale
            if self.norm is None:  # as a view, the values would keep the whole product alive until backward
                v_BSGV = v_BSGV.contiguous()
        return q_BSND.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGV.transpose(1, 2)

    def parts(self) -> Parts:
        widths = {part: width for part, (_, width) in self.share.inputs.items()}
        biases = columns({f"{part}_bias": width for part, width in widths.items()}, before=())
        whole: Parts = {name: [(name, ())] for name in ("out", "out_bias", "sinks")}
        return {"qkv": columns(widths), "qkv_bias": biases, **whole}


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    `down` [H, …] makes the narrow vectors of this rank's piece: that of queries, if there is one, that of keys and values, and
    the columns of keys that turn, which all heads share. TP gathers these vectors instead of the block's input. From them,
    `query` and `key_value` make the heads of this rank; a head's columns that turn come last.
    """

    def _make(self, model: ModelSpec) -> None:
        share = self.share
        assert share.latent
        made, latent, new = share.inputs, share.latent, self.out.new_empty
        self.latent, self.eps = latent, model.norm_eps
        self.down = nn.Parameter(new(model.hidden, sum(share.downs.values())))
        self.query = nn.Parameter(new(made["query"][0] or model.hidden, made["query"][1]))
        self.key_value = nn.Parameter(new(*made["key_value"]))
        self.query_norm = nn.Parameter(new(latent.query_rank)) if latent.query_rank else None
        self.key_value_norm = nn.Parameter(new(latent.rank))

    def _projected(self, x_BsH: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        share = self.share
        assert share.rope
        query_BSR, latent_BSR, turning_BSR = self._narrow(x_BsH, share.rope.dim)
        turn = place.rotation(share.rope, latent_BSR.dtype)
        q_BSND = _by_head(product(query_BSR, self.query, self.later), share.heads)
        q_BSND = torch.cat((q_BSND[..., : share.still], rotate(q_BSND[..., share.still :], turn)), dim=-1)
        made_BSNW = _by_head(product(latent_BSR, self.key_value, self.later), share.heads)
        k_BSND, v_BSNV = made_BSNW.split((share.still, share.value_dim), dim=-1)
        turned_BSNR = rotate(turning_BSR.unsqueeze(2), turn).expand(-1, -1, share.heads, -1)
        k_BSND = torch.cat((k_BSND, turned_BSNR), dim=-1)
        q_BSND = q_BSND if share.scale == 1 else q_BSND * share.scale
        # As a view, the values would keep the whole product alive until backward.
        return q_BSND.transpose(1, 2), k_BSND.transpose(1, 2), v_BSNV.contiguous().transpose(1, 2)

    def _narrow(self, x_BsH: torch.Tensor, turning: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return, for the shard, what queries are made from, what keys and values are made from, and the columns that turn."""
        latent = self.latent
        widths = (latent.query_rank, latent.rank, turning)
        query_BsR, latent_BsR, turning_BsR = product(x_BsH, self.down, self.later).split(widths, dim=-1)
        latent_BsR = rms_norm(latent_BsR, self.key_value_norm, self.eps)
        if self.query_norm is not None:
            query_BsR = rms_norm(query_BsR, self.query_norm, self.eps)
        if self.tensor.size > 1:
            narrow = gather_sequence(torch.cat((query_BsR, latent_BsR, turning_BsR), dim=-1), self.tensor).split(widths, dim=-1)
            # Copies, so that the products do not copy them again and keep both.
            query_BsR, latent_BsR, turning_BsR = narrow[0].contiguous(), narrow[1].contiguous(), narrow[2]
        return query_BsR if latent.query_rank else gather_sequence(x_BsH, self.tensor), latent_BsR, turning_BsR

    def parts(self) -> Parts:
        names = {name: name for name in ("query", "key_value", "out", "sinks")}
        names |= {"query_norm": "norm.query", "key_value_norm": "norm.key_value"}
        whole: Parts = {own: [(name, ())] for own, name in names.items()}
        return {"down": columns(self.share.downs), **whole}


def _by_head(x_BSW: torch.Tensor, heads: int) -> torch.Tensor:
    """Return columns by head: [B, S, N · D] → [B, S, N, D]. There may be no sequence."""
    return x_BSW.unflatten(-1, (heads, x_BSW.shape[-1] // heads))

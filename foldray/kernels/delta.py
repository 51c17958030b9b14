"""The gated delta rule: linear attention whose state forgets, and corrects what it remembers (arXiv:2412.06464).

The state of a head is a matrix from keys to values. Token t first lets it decay, then replaces a share of what the state has for
its key by its value, and then reads it with its query:

    S_t = α_t · S_{t−1} + k_t · β_t · (v_t − (α_t · S_{t−1})ᵀ · k_t)ᵀ        o_t = S_tᵀ · q_t

Tokens are computed in chunks of 64 (section 3.3 of the paper, and the WY form of arXiv:2406.06484). With c_i the sum of log α up
to token i of a chunk, the corrections u_i = β_i · (v_i − …) of all its tokens solve one triangular system. Everything else is
products:

    (I + L) · U = β · (V − e^c · K · S)        L_ij = β_i · e^(c_i − c_j) · k_i · k_j for j < i
    O = e^c · Q · S + (e^(c_i − c_j) · q_i · k_j for j ≤ i) · U        S' = e^c_last · S + (e^(c_last − c) · K)ᵀ · U

U = U_0 − W · S, so a chunk maps its first state to its last one by S' = A · S + B. So do many chunks together (`transition`).
Ranks with parts of a sequence can then exchange A and B in place of tokens.

A document begins with a state of zeros. Tokens of different documents in a chunk do not see each other.

Legend: B sequences, S tokens, K heads of queries and keys, V heads of values (a multiple of K; V/K neighbours share a head of
keys), D width of queries and keys, E width of values, N chunks of C tokens, T tokens that a convolution sees and P = T − 1, W
columns that it mixes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens


def delta_rule(
    q_BSKD: Tensor,
    k_BSKD: Tensor,
    v_BSVE: Tensor,
    decay_BSV: Tensor,
    write_BSV: Tensor,
    state_BVDE: Tensor,
    within_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what queries read, [B, S, V, E], and the state after the last token, [B, V, D, E].

    Args:
        decay_BSV: log α, at most 0.
        write_BSV: β.
        state_BVDE: the state before the first token.
        within_BS: positions of tokens in their documents, int64; None if no document begins here.
    """
    chunks = _Chunks.of(k_BSKD, v_BSVE, decay_BSV, write_BSV, within_BS)
    q_BKGNCD = _chunked(q_BSKD, chunks.size).unsqueeze(2)
    score_BKGNCC = (q_BKGNCD @ chunks.k_BKGNCD.mT) * chunks.ratio_BKGNCC
    state, outs = state_BVDE.unflatten(1, chunks.heads), []
    reads = (q_BKGNCD * chunks.carried_BKGNC.unsqueeze(-1)).unbind(3), score_BKGNCC.unbind(3)
    for step, q_BKGCD, score_BKGCC in zip(chunks.steps(), *reads, strict=True):
        made = step.made(state)
        outs.append(score_BKGCC @ made + q_BKGCD @ state)
        state = step.after(state, made)
    out_BKGSE = torch.cat(outs, dim=3)[:, :, :, : q_BSKD.shape[1]]
    return out_BKGSE.flatten(1, 2).transpose(1, 2), state.flatten(1, 2)


def transition(k_BSKD: Tensor, v_BSVE: Tensor, decay_BSV: Tensor, write_BSV: Tensor, within_BS: Tensor | None = None) -> Tensor:
    """Return the matrices A and B, side by side, that map the state before the first token to A · S + B: [B, V, D, D + E]."""
    width = k_BSKD.shape[-1]
    chunks = _Chunks.of(k_BSKD, F.pad(v_BSVE, (width, 0)), decay_BSV, write_BSV, within_BS)
    one_DD = torch.eye(width, dtype=v_BSVE.dtype, device=v_BSVE.device)
    first_DW = F.pad(one_DD, (0, v_BSVE.shape[-1]))
    state = first_DW.expand(len(k_BSKD), *chunks.heads, *first_DW.shape)
    for step in chunks.steps():
        state = step.after(state, step.made(state))
    return state.flatten(1, 2)


class _Step(NamedTuple):
    """What leads from the state before a chunk to that behind it: U_0, W, e^(c_last − c) · K, and e^c_last."""

    made_BKGCE: Tensor
    read_BKGCD: Tensor
    k_BKGCD: Tensor
    kept_BKG11: Tensor

    def made(self, state_BKGDE: Tensor) -> Tensor:
        """Return U."""
        return self.made_BKGCE - self.read_BKGCD @ state_BKGDE

    def after(self, state_BKGDE: Tensor, made_BKGCE: Tensor) -> Tensor:
        return self.kept_BKG11 * state_BKGDE + self.k_BKGCD.mT @ made_BKGCE


class _Chunks(NamedTuple):
    """What the tokens of all chunks have without a state. Heads of values are [K, G], G heads for each head of keys.

    Args:
        size, heads: tokens of a chunk, (K, G).
        ratio_BKGNCC: e^(c_i − c_j), 0 where token i does not see token j.
        carried_BKGNC: e^c, 0 where the document began within the chunk.
        left_BKGNC: e^(c_last − c), 0 where the document ended within the chunk.
        made_BKGNCE, read_BKGNCD: U_0 and W.
    """

    size: int
    heads: tuple[int, int]
    k_BKGNCD: Tensor
    ratio_BKGNCC: Tensor
    carried_BKGNC: Tensor
    left_BKGNC: Tensor
    made_BKGNCE: Tensor
    read_BKGNCD: Tensor

    @classmethod
    def of(cls, k_BSKD: Tensor, v_BSVE: Tensor, decay_BSV: Tensor, write_BSV: Tensor, within_BS: Tensor | None) -> _Chunks:
        length, keys = k_BSKD.shape[1:3]
        size, heads = min(CHUNK, length), (keys, v_BSVE.shape[2] // keys)
        k = _chunked(k_BSKD, size).unsqueeze(2)
        v, decay, write = (_chunked(x, size).unflatten(1, heads) for x in (v_BSVE, decay_BSV, write_BSV))
        total = decay.cumsum(-1)
        sees = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
        carried, left = total.exp(), (total[..., -1:] - total).exp()
        if within_BS is not None:
            same, first, last = (x[:, None, None] for x in _documents(within_BS, size))
            sees, carried, left = sees & same, carried * first, left * last
        # The difference first: e^−c_j alone may be too large for a number.
        ratio = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~sees, -torch.inf).exp()
        lower = (write.unsqueeze(-1) * ratio * (k @ k.mT)).tril(-1)
        given = torch.cat((v, k.expand(*v.shape[:-1], k.shape[-1]) * carried.unsqueeze(-1)), dim=-1) * write.unsqueeze(-1)
        solved = torch.linalg.solve_triangular(lower, given, upper=False, unitriangular=True)
        made, read = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
        return cls(size, heads, k, ratio, carried, left, made, read)

    def steps(self) -> list[_Step]:
        # `unbind` and not an index for each chunk, whose gradients would each be as large as all chunks.
        k_BKGNCD, kept_BKGN11 = self.k_BKGNCD * self.left_BKGNC.unsqueeze(-1), self.carried_BKGNC[..., -1:].unsqueeze(-1)
        parts = (x.unbind(3) for x in (self.made_BKGNCE, self.read_BKGNCD, k_BKGNCD, kept_BKGN11))
        return [_Step(*step) for step in zip(*parts, strict=True)]


def _chunked(x_BSK: Tensor, size: int) -> Tensor:
    """Return tokens in chunks, by head: [B, S, K, …] → [B, K, N, C, …]. Zeros, which change nothing, fill the last one."""
    lacking = -x_BSK.shape[1] % size
    if lacking:
        x_BSK = torch.cat((x_BSK, x_BSK.new_zeros((len(x_BSK), lacking, *x_BSK.shape[2:]))), dim=1)
    return x_BSK.transpose(1, 2).unflatten(2, (x_BSK.shape[1] // size, size))


def _documents(within_BS: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens of a chunk share a document, [B, N, C, C], and which tokens are in that of the token before the chunk,
    and in that of the chunk's last token, [B, N, C]."""
    number_BS = F.pad(within_BS == 0, (0, -within_BS.shape[1] % size)).cumsum(1)
    number_BNC = number_BS.unflatten(1, (number_BS.shape[1] // size, size))
    before_BN = F.pad(number_BNC[:, :-1, -1], (1, 0))
    same_BNCC = number_BNC.unsqueeze(-1) == number_BNC.unsqueeze(-2)
    return same_BNCC, number_BNC == before_BN.unsqueeze(-1), number_BNC == number_BNC[..., -1:]


def convolved(x_BSW: Tensor, before_BPW: Tensor, filter_TW: Tensor, within_BS: Tensor | None = None) -> Tensor:
    """Return a causal convolution of each column by itself over T tokens, with the SiLU behind it: [B, S, W].

    Args:
        before_BPW: the T − 1 tokens before the first one; zeros where a sequence begins.
        filter_TW: the factor of the token itself is the last one.
        within_BS: as in `delta_rule`. A document begins behind zeros.
    """
    length, taps = x_BSW.shape[1], len(filter_TW)
    all_BSW = torch.cat((before_BPW, x_BSW), dim=1)
    y_BSW = all_BSW[:, taps - 1 :] * filter_TW[-1]
    for back in range(1, taps):
        part_BSW = all_BSW[:, taps - 1 - back : taps - 1 - back + length] * filter_TW[-1 - back]
        y_BSW = y_BSW + (part_BSW if within_BS is None else part_BSW * (within_BS >= back).unsqueeze(-1))
    return F.silu(y_BSW)


def unit(x: Tensor) -> Tensor:
    """Return vectors along the last axis of length 1, or shorter if they are short."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

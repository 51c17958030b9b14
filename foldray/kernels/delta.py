"""The gated delta rule: linear attention whose state forgets, and corrects what it remembers (arXiv:2412.06464).

The state of a head is a matrix from keys to values. Token t first lets it decay, then replaces a share of what the state has for
its key by its value, and then reads it with its query:

    S_t = α_t · S_{t−1} + k_t · β_t · (v_t − (α_t · S_{t−1})ᵀ · k_t)ᵀ        o_t = S_tᵀ · q_t

α_t is one number for a head, or one for each column of its keys, which multiplies a row of the state (Kimi Delta Attention,
arXiv:2510.26692, section 3).

Tokens are computed in chunks of 64 (section 3.3 of the paper, and the WY form of arXiv:2406.06484). With c_i the sum of log α up
to token i of a chunk, the corrections u_i = β_i · (v_i − …) of all its tokens solve one triangular system. Everything else is
products:

    (I + L) · U = β · (V − (e^c · K) · S)        L_ij = β_i · (k_i, k_j) for j < i
    O = (e^c · Q) · S + ((q_i, k_j) for j ≤ i) · U        S' = e^c_last · S + (e^(c_last − c) · K)ᵀ · U

Here (x_i, k_j) is the sum of x · e^(c_i − c_j) · k over the columns of keys. Its exponents are at most 0, but e^−c_j alone may be
too large for a number. So with a decay of each column, the product is one of two factors of at most 1, which meet at a token
between both (`_by_halves`).

U = U_0 − W · S, so a chunk maps its first state to its last one by S' = A · S + B. So do many chunks together (`transition`).
Ranks with parts of a sequence can then exchange A and B in place of tokens.

A document begins with a state of zeros. Tokens of different documents in a chunk do not see each other.

Legend: B sequences, S tokens, K heads of queries and keys, V heads of values (a multiple of K; V/K neighbours share a head of
keys), D width of queries and keys, E width of values, R numbers of a decay: 1 or D, N chunks of C tokens, T tokens that a
convolution sees and P = T − 1, W columns that it mixes.
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
    decay_BSVR: Tensor,
    write_BSV: Tensor,
    state_BVDE: Tensor,
    within_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what queries read, [B, S, V, E], and the state after the last token, [B, V, D, E].

    Args:
        decay_BSVR: log α, at most 0: a number for each head, or for each column of its keys.
        write_BSV: β.
        state_BVDE: the state before the first token.
        within_BS: positions of tokens in their documents, int64; None if no document begins here.
    """
    chunks = _Chunks.of(k_BSKD, v_BSVE, decay_BSVR, write_BSV, within_BS, q_BSKD)
    state, outs = state_BVDE.unflatten(1, chunks.heads), []
    reads = (x.unbind(3) for x in chunks.reads)
    for step, q_BKGCD, score_BKGCC in zip(chunks.steps(), *reads, strict=True):
        made = step.made(state)
        outs.append(score_BKGCC @ made + q_BKGCD @ state)
        state = step.after(state, made)
    out_BKGSE = torch.cat(outs, dim=3)[:, :, :, : q_BSKD.shape[1]]
    return out_BKGSE.flatten(1, 2).transpose(1, 2), state.flatten(1, 2)


def transition(k_BSKD: Tensor, v_BSVE: Tensor, decay_BSVR: Tensor, write_BSV: Tensor, within_BS: Tensor | None = None) -> Tensor:
    """Return the matrices A and B, side by side, that map the state before the first token to A · S + B: [B, V, D, D + E]."""
    width = k_BSKD.shape[-1]
    chunks = _Chunks.of(k_BSKD, F.pad(v_BSVE, (width, 0)), decay_BSVR, write_BSV, within_BS)
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
    kept_BKGR1: Tensor

    def made(self, state_BKGDE: Tensor) -> Tensor:
        """Return U."""
        return self.made_BKGCE - self.read_BKGCD @ state_BKGDE

    def after(self, state_BKGDE: Tensor, made_BKGCE: Tensor) -> Tensor:
        return self.kept_BKGR1 * state_BKGDE + self.k_BKGCD.mT @ made_BKGCE


class _Chunks(NamedTuple):
    """What the tokens of all chunks have without a state. Heads of values are [K, G], G heads for each head of keys.

    Args:
        heads: (K, G).
        k_BKGNCD: e^(c_last − c) · K, 0 where the document ended within the chunk.
        kept_BKGNR1: e^c_last, 0 if a document began within the chunk.
        made_BKGNCE, read_BKGNCD: U_0 and W.
        reads: e^c · Q, and the scores of queries; empty without queries.
    """

    heads: tuple[int, int]
    k_BKGNCD: Tensor
    kept_BKGNR1: Tensor
    made_BKGNCE: Tensor
    read_BKGNCD: Tensor
    reads: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        k_BSKD: Tensor,
        v_BSVE: Tensor,
        decay_BSVR: Tensor,
        write_BSV: Tensor,
        within_BS: Tensor | None,
        q_BSKD: Tensor | None = None,
    ) -> _Chunks:
        heads = k_BSKD.shape[2], v_BSVE.shape[2] // k_BSKD.shape[2]
        size = _chunk(k_BSKD.shape[1], halves=decay_BSVR.shape[-1] > 1)
        given = [k_BSKD] if q_BSKD is None else [k_BSKD, q_BSKD]
        x_XBKGNCD = torch.stack([_chunked(x, size).unsqueeze(2) for x in given])
        v, decay, write = (_chunked(x, size).unflatten(1, heads) for x in (v_BSVE, decay_BSVR, write_BSV.unsqueeze(-1)))
        k, sees = x_XBKGNCD[0], torch.ones(size, size, dtype=torch.bool, device=k_BSKD.device).tril()
        documents = None if within_BS is None else [x[:, None, None] for x in _documents(within_BS, size)]
        sees = sees if documents is None else sees & documents[0]
        score_XBKGNCC, carried, left = (_by_halves if decay.shape[-1] > 1 else _by_ratio)(x_XBKGNCD, k, decay, sees)
        if documents is not None:
            carried, left = carried * documents[1].unsqueeze(-1), left * documents[2].unsqueeze(-1)
        read_XBKGNCD = x_XBKGNCD * carried
        wanted = torch.cat((v, read_XBKGNCD[0]), dim=-1) * write
        lower = (write * score_XBKGNCC[0]).tril(-1)
        solved = torch.linalg.solve_triangular(lower, wanted, upper=False, unitriangular=True)
        made, read = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
        reads = () if q_BSKD is None else (read_XBKGNCD[1], score_XBKGNCC[1])
        return cls(heads, k * left, carried[..., -1:, :].mT, made, read, reads)

    def steps(self) -> list[_Step]:
        # `unbind` and not an index for each chunk, whose gradients would each be as large as all chunks.
        parts = (x.unbind(3) for x in (self.made_BKGNCE, self.read_BKGNCD, self.k_BKGNCD, self.kept_BKGNR1))
        return [_Step(*step) for step in zip(*parts, strict=True)]


def _chunk(length: int, halves: bool) -> int:
    """Return the tokens of a chunk: no more than there are, or with `halves` the next power of two."""
    return min(CHUNK, 1 << (length - 1).bit_length() if halves else length)


def _by_ratio(x: Tensor, k: Tensor, decay: Tensor, sees: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x_i, k_j) where token i sees token j, and 0 elsewhere, e^c, and e^(c_last − c), for a decay of each head.

    Tensors are […, C, D]; `decay` is […, C, 1].
    """
    total = decay.cumsum(-2)
    # The difference first: e^−c_j alone may be too large for a number.
    score = (x @ k.mT) * (total - total.mT).masked_fill(~sees, -torch.inf).exp()
    return score, total.exp(), (total[..., -1:, :] - total).exp()


def _by_halves(x: Tensor, k: Tensor, decay: Tensor, sees: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_by_ratio` returns, for a decay of each column: […, C, D]. C must be a power of two.

    Tokens of the second half of a block see keys of the first half through the border between them, with
    e^(c_i − c) · e^(c − c_j) for its c. Both factors are at most 1, and what is between them is a product. Halves are blocks as
    well, down to one token.
    """
    size, half = x.shape[-2], 1
    # By block: scores, c up to each token, and c from behind it to the end.
    score = (x * k).sum(-1).expand(*x.shape[:-4], *decay.shape[-4:-1])[..., None, None]
    since, until = decay.unsqueeze(-2), torch.zeros_like(decay).unsqueeze(-2)
    while half < size:
        pairs = size // (2 * half), 2
        early, late = k.unflatten(-2, (*pairs, half)).select(-3, 0), x.unflatten(-2, (*pairs, half)).select(-3, 1)
        above, right = score.unflatten(-3, pairs).unbind(-3)
        (since_0, since_1), (until_0, until_1) = (y.unflatten(-3, pairs).unbind(-3) for y in (since, until))
        below = (late * since_1.exp()) @ (early * until_0.exp()).mT
        score = torch.cat((F.pad(above, (0, half)), torch.cat((below, right), dim=-1)), dim=-2)
        since, until = (
            torch.cat((since_0, since_0[..., -1:, :] + since_1), dim=-2),
            torch.cat((until_0 + since_1[..., -1:, :], until_1), dim=-2),
        )
        half *= 2
    return score.squeeze(-3).masked_fill(~sees, 0.0), since.squeeze(-3).exp(), until.squeeze(-3).exp()


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

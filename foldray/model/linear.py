"""Linear attention with the gated delta rule (Gated Delta Networks, arXiv:2412.06464), cut over heads (TP) and positions (CP).

One product makes queries, keys, values, a gate of outputs, and two numbers of each head: how much a token writes, and how much of
the state it keeps. A short convolution mixes queries, keys and values over tokens. The heads' outputs go through an RMSNorm, and
the gate weighs them. Qwen3-Next has such blocks in transformers.

Kimi Delta Attention (arXiv:2510.26692, section 3) keeps a share of each column of keys. Its gates and shares come from narrow
vectors, which every TP rank makes of its piece of the tokens.

Context-parallel ranks exchange two things that do not grow with the sequence. The last tokens of each chunk are the ones that the
convolution of the next chunk sees. Then every chunk's map from its first state to its last one, S' = A · S + B, is gathered, and
each rank goes through the maps of all chunks before its own. So the zigzag of the layout needs nothing else: a rank has two
chunks, which begin at two states.

The op keeps its inputs only. Backward computes again what is between two exchanges.

Legend: B sequences, s positions of this rank's piece, S positions of its context-parallel shard (s · tp), H hidden, K heads of
queries and keys and V heads of values of this rank, D width of queries and keys, E width of values, W columns that the
convolution mixes, T its taps, P = T − 1, I all columns of the product; M members, C chunks of a member, t tokens of a tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foldray.blueprint import AttentionSpec, ModelSpec
from foldray.blueprint.parts import Parts, columns
from foldray.comm import Communicator, Pending, gather_sequence
from foldray.comm.exchange import mirrored
from foldray.kernels import fla
from foldray.kernels.autograd import all_keeping_inputs, at_least_float32, keeping_inputs, product
from foldray.kernels.delta import convolved, delta_rule, transition, unit
from foldray.model.attention import Attention, Place
from foldray.model.attention_mask import AttentionMask
from foldray.model.states import Carry, StateCache, handed_on, taken


class LinearAttention(Attention):
    """Linear attention with this rank's heads.

    `inputs` is [H, I], `filter` [T, W], `decay_rate` and `time_step` [V], and `norm` [E]. A head's state keeps the share
    exp(−exp(decay_rate) · softplus(x + time_step)) at a token, with x from the product. In Kimi Delta Attention, `time_step` is
    [V · D], and x and the gate come from the narrow vectors of `down` [H, 2 · E] by `decay` [E, V · D] and `gate` [E, V · E].
    """

    def _make(self, model: ModelSpec) -> None:
        share, new = self.share, self.out.new_empty
        assert share.linear
        self.taps, self.eps = share.linear.taps, model.norm_eps
        self.inputs = nn.Parameter(new(model.hidden, sum(self._direct.values())))
        self.narrow = bool(share.downs)
        if self.narrow:
            self.down = nn.Parameter(new(model.hidden, sum(share.downs.values())))
            self.gate, self.decay = (nn.Parameter(new(*share.inputs[part])) for part in ("gate", "decay"))
        self.filter = nn.Parameter(new(self.taps, sum(share.mixed.values())))
        self.decay_rate, self.time_step = nn.Parameter(new(share.heads)), nn.Parameter(new(share.decays))
        self.norm = nn.Parameter(new(share.value_dim))

    def memory(self, forgets: bool = False) -> StateCache:
        return StateCache(forgets)

    def forward(self, x_BsH: Tensor, place: Place, memory: StateCache | None = None) -> Tensor:
        made_BSI, mask = self._made(x_BsH), place.masks[self.share.window]
        if memory is None or mask.whole:
            first = self._first(made_BSI)
            y_BSV, _ = self._computed(made_BSI, first, self._gathered(made_BSI, mask), place, hands_on=False)
            return self._left(y_BSV)
        made_BSI, *carry = taken(made_BSI, self._first(made_BSI), memory, mask, tails=False)
        return self._sliced(made_BSI, Carry(*carry), self._gathered(made_BSI, mask), place, memory)

    def project(self, x_BsH: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Return the product of a slice [B, S, I], and the tails of its chunks [B, C, t, W]."""
        made_BSI = self._made(x_BsH)
        return made_BSI, self._tails(made_BSI, place.masks[self.share.window])

    def store(self, gathered: Tensor, place: Place, memory: StateCache) -> None:
        memory.put_tails(place.masks[self.share.window].tokens.start, gathered)

    def attend(self, made_BSI: Tensor, place: Place, memory: StateCache) -> Tensor:
        mask = place.masks[self.share.window]
        made_BSI, state_BVDE, before_BPW, tails = taken(made_BSI, self._first(made_BSI), memory, mask, tails=True)
        return self._sliced(made_BSI, Carry(state_BVDE, before_BPW), tails, place, memory)

    def start_scatter(self, place: Place, memory: StateCache) -> Pending:
        share = memory.take_tails(place.masks[self.share.window].tokens.start)
        rows = [len(share) // self.ring.size] * self.ring.size
        return self.ring.start_all_to_all(share, rows, rows)

    def parts(self) -> Parts:
        filters = columns({f"{part}_filter": width for part, width in self.share.mixed.items()})
        whole: Parts = {name: [(name, ())] for name in ("out", "decay_rate", "time_step", "gate", "decay")}
        cut = {"inputs": columns(self._direct), "down": columns(self.share.downs), "filter": filters}
        return {**cut, "norm": [("norm.output", ())], **whole}

    @property
    def _direct(self) -> dict[str, int]:
        """Widths of the parts that the first product makes."""
        return {part: width for part, (rows, width) in self.share.inputs.items() if not rows}

    def _made(self, x_BsH: Tensor) -> Tensor:
        """Return all parts of `share.inputs` side by side: [B, S, I]."""
        made_BSI = product(gather_sequence(x_BsH, self.tensor), self.inputs, self.later)
        if not self.narrow:
            return made_BSI
        narrow_BSR = gather_sequence(product(x_BsH, self.down, self.later), self.tensor)
        gate_BSE, decay_BSE = (part.contiguous() for part in narrow_BSR.chunk(2, dim=-1))
        mixed_BSW, write_BSV = made_BSI.tensor_split((made_BSI.shape[-1] - self.share.heads,), dim=-1)
        gate_BSG, decay_BSG = product(gate_BSE, self.gate, self.later), product(decay_BSE, self.decay, self.later)
        return torch.cat((mixed_BSW, gate_BSG, write_BSV, decay_BSG), dim=-1)

    def _first(self, made_BSI: Tensor) -> Carry:
        """Return what sequences begin with."""
        share, rows = self.share, len(made_BSI)
        state = made_BSI.new_zeros((rows, share.heads, share.key_dim, share.value_dim), dtype=at_least_float32(made_BSI))
        return Carry(state, made_BSI.new_zeros((rows, self.taps - 1, self.filter.shape[1])))

    def _tails(self, made_BSI: Tensor, mask: AttentionMask) -> Tensor:
        """Return the last tokens of this rank's chunks that the convolution may see from later ones: [B, C, t, W]."""
        chunks = [_last(chunk[..., : self.filter.shape[1]], self.taps - 1) for chunk in _chunks(made_BSI, mask)]
        return torch.stack(chunks, dim=1)

    def _gathered(self, made_BSI: Tensor, mask: AttentionMask) -> Tensor:
        return _gathered(self._tails(made_BSI, mask), self.ring)

    def _sliced(self, made_BSI: Tensor, carry: Carry, tails: Tensor, place: Place, memory: StateCache) -> Tensor:
        """Return the output of a slice, and hand a carry to the next one. Sequences that grow may go on behind their length."""
        mask = place.masks[self.share.window]
        hands_on = memory.forgets or mask.tokens.stop < mask.length
        y_BSV, carry = self._computed(made_BSI, carry, tails, place, hands_on)
        return self._left(handed_on(y_BSV, carry, memory, mask) if hands_on else y_BSV)

    def _computed(self, made_BSI: Tensor, carry: Carry, tails: Tensor, place: Place, hands_on: bool) -> tuple[Tensor, Carry]:
        """Return the heads' outputs side by side, [B, S, V · E], and what the next slice begins with if this one `hands_on`."""
        mask = place.masks[self.share.window]
        order = sorted(
            (chunk.start, member, number) for member, held in enumerate(mask.shards) for number, chunk in enumerate(held)
        )
        own = [at for at, (_, member, _) in enumerate(order) if member == mask.index]
        tail_MBCtW = tails.unflatten(0, (self.ring.size, len(made_BSI)))
        before = [carry.before_BPW, *(tail_MBCtW[member, :, number] for _, member, number in order)]
        befores = [_newest(before[: at + 1], self.taps - 1) for at in own]
        last = _newest(before, self.taps - 1) if hands_on else carry.before_BPW
        chunks = _chunks(made_BSI, mask)
        within = [None] * len(chunks) if place.within_BS is None else place.within_BS.chunk(len(chunks), dim=1)
        if mask.alone:
            y_BSV, state = all_keeping_inputs(
                self._with(_outputs, within[0]), *chunks, *befores, *self._vectors, self.norm, carry.state_BVDE
            )
            return y_BSV, Carry(state, last)
        maps = [
            keeping_inputs(self._with(_map, seen), chunk, tokens, *self._vectors)
            for chunk, tokens, seen in zip(chunks, befores, within, strict=True)
        ]
        map_MBCVDW = _gathered(torch.stack(maps, dim=1), self.ring).unflatten(0, (self.ring.size, len(made_BSI)))
        states = _states(carry.state_BVDE, [map_MBCVDW[member, :, number] for _, member, number in order])
        outs = [
            all_keeping_inputs(self._with(_outputs, seen), chunk, tokens, *self._vectors, self.norm, states[at])[0]
            for chunk, tokens, seen, at in zip(chunks, befores, within, own, strict=True)
        ]
        return torch.cat(outs, dim=1), Carry(states[-1], last)

    @property
    def _vectors(self) -> tuple[Tensor, ...]:
        return self.filter, self.decay_rate, self.time_step

    def _with(self, compute: Callable[..., Any], within_BS: Tensor | None) -> Callable[..., Any]:
        return partial(compute, share=self.share, eps=self.eps, within_BS=within_BS)


def _chunks(made_BSI: Tensor, mask: AttentionMask) -> Sequence[Tensor]:
    return made_BSI.chunk(len(mask.held), dim=1)


def _last(x_BTW: Tensor, tokens: int) -> Tensor:
    """Return the last tokens, or all if there are fewer."""
    return x_BTW[:, max(0, x_BTW.shape[1] - tokens) :]


def _newest(parts: Sequence[Tensor], tokens: int) -> Tensor:
    """Return the last tokens of several parts that follow each other. All parts together have as many."""
    found = [_last(parts[-1], tokens)]
    for part in reversed(parts[:-1]):
        if (lacking := tokens - sum(each.shape[1] for each in found)) > 0:
            found.insert(0, _last(part, lacking))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _gathered(x: Tensor, ring: Communicator) -> Tensor:
    """Gather every member's tensor along the first axis: [B, …] → [M · B, …]. Its gradient is summed at its owner."""
    if ring.size == 1:
        return x
    if not x.numel():  # of a convolution over one token, or of no sequences
        return x.repeat(ring.size, *[1] * (x.dim() - 1))
    return mirrored(x, ring.all_gather, ring.reduce_scatter)


def _states(state_BVDE: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """Return the states before each chunk and after the last one, from the first state and the maps of all chunks."""
    states, width = [state_BVDE], state_BVDE.shape[2]
    for map_BVDW in maps:
        a_BVDD, b_BVDE = map_BVDW.tensor_split((width,), dim=-1)
        states.append(a_BVDD @ states[-1] + b_BVDE)
    return states


def _mixed(inputs: Sequence[Tensor], share: AttentionSpec, within_BS: Tensor | None) -> tuple[Tensor, ...]:
    """Return queries and keys [B, S, K, D], values [B, S, V, E], log decays [B, S, V, 1 or D], shares that are written [B, S, V],
    and what weighs outputs [B, S, V, E], in at least float32.

    Args:
        inputs: the product of the chunk, the last tokens before it, the filter, and each head's rate and time step.
    """
    made_BSI, before_BPW, filter_TW, decay_rate_V, time_step = inputs
    wide = at_least_float32(made_BSI)
    widths = [width for _, width in share.inputs.values()]
    queries, keys, values, gate, write, decay = made_BSI.to(wide).split(widths, dim=-1)
    mixed = torch.cat((queries, keys, values), dim=-1)
    y_BSW = convolved(mixed, before_BPW.to(wide), filter_TW.to(wide), within_BS)
    q, k, v = y_BSW.split(widths[:3], dim=-1)
    q, k = (x.unflatten(-1, (share.kv_heads, share.key_dim)) for x in (q, k))
    v, gate = (x.unflatten(-1, (share.heads, share.value_dim)) for x in (v, gate))
    step = F.softplus(decay + time_step.to(wide)).unflatten(-1, (share.heads, share.decays // share.heads))
    log_decay = -decay_rate_V.to(wide).exp().unsqueeze(-1) * step
    assert share.linear
    weight = F.silu(gate) if share.linear.kind == "gated_delta" else torch.sigmoid(gate)
    return unit(q) * share.key_dim**-0.5, unit(k), v, log_decay, torch.sigmoid(write), weight


def _map(*inputs: Tensor, share: AttentionSpec, eps: float, within_BS: Tensor | None) -> Tensor:
    """Return a chunk's map of states (`transition`), from all inputs of `_mixed`."""
    _, k, v, decay, write, _ = _mixed(inputs, share, within_BS)
    return transition(k, v, decay, write, within_BS)


def _outputs(*inputs: Tensor, share: AttentionSpec, eps: float, within_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a chunk's outputs side by side, [B, S, V · E], and its last state.

    The inputs are those of `_mixed`, the weight of the norm, and the first state.
    """
    *mixed, norm_E, state_BVDE = inputs
    q, k, v, decay, write, weight = _mixed(mixed, share, within_BS)
    if fla.fits(mixed[0], share.key_dim, within_BS):
        out_BSVE, state = fla.delta_rule(q, k, v, decay, write, state_BVDE, mixed[0].dtype)
    else:
        out_BSVE, state = delta_rule(q, k, v, decay, write, state_BVDE, within_BS)
    normed = F.rms_norm(out_BSVE.to(weight.dtype), norm_E.shape, norm_E.to(weight.dtype), eps) * weight
    return normed.flatten(2).to(mixed[0].dtype), state

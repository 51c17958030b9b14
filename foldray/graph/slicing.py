"""The cuts of a sequence (slices for attention, micro-batches for MoE layers), and the cost of a slice of causal attention.

FoldMoE (section 4.2) cuts attention and MoE layers separately, with a token buffer between them. The slices of attention may
have any lengths as long as the buffer never runs empty. This is the paper's constraint (2): the first j slices have at least
as many tokens as the first j micro-batches.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from foldray.blueprint import ModelSpec
from foldray.errors import UserError, multiples_near
from foldray.windows import FULL, find_window

SLICINGS = ("token_uniform", "time_uniform", "algorithm1")


class Slicing(NamedTuple):
    """Lengths of the pieces of a sequence, in tokens. Both tuples sum to the length of the sequence.

    Args:
        attention: lengths of the slices, for attention and everything else outside the MoE layers. There may be fewer of them
            than MoE micro-batches.
        moe: lengths of the MoE micro-batches.
    """

    attention: tuple[int, ...]
    moe: tuple[int, ...]

    @property
    def length(self) -> int:
        return sum(self.moe)

    @property
    def degree(self) -> int:
        """Number of MoE micro-batches: FoldMoE's d."""
        return len(self.moe)

    @property
    def cuts_attention(self) -> bool:
        return len(self.attention) > 1

    def shared(self, ranks: int) -> Slicing:
        """Return the lengths on one rank if `ranks` ranks share the sequence evenly."""
        return Slicing(*(tuple(tokens // ranks for tokens in lengths) for lengths in self))

    @property
    def in_units(self) -> Slicing:
        """The lengths in the largest unit that divides all of them. Pieces share units as they share tokens."""
        unit = math.gcd(*self.attention, *self.moe)
        return Slicing(*(tuple(tokens // unit for tokens in lengths) for lengths in self))

    def supplies(self) -> bool:
        """Whether the token buffer never runs empty (FoldMoE's constraint (2))."""
        return all(made >= used for made, used in zip(accumulate(self.attention), accumulate(self.moe), strict=False))


class SliceCost(NamedTuple):
    """The cost of a slice of l tokens that ends after c tokens: quadratic · l · (c − (l − 1) / 2) + linear · l.

    This counts causal attention exactly: token i of the slice (i = 0 … l − 1) sees c − l + i + 1 keys. FoldMoE's formula (5)
    counts c keys for every token. Blocks with a window see fewer pairs.

    Args:
        quadratic: cost per pair of a query and a key that it sees.
        windows: (name of a window, share of the blocks that have it), for all windows; empty is `full` in all blocks.
    """

    quadratic: float
    linear: float
    windows: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of_model(cls, hidden: int, heads: int) -> SliceCost:
        """Return the cost in FLOPs, with the coefficients of FoldMoE's formula (5): H is `hidden`, h is `heads`."""
        return cls(4 * hidden + 3 * heads, 8 * hidden * hidden)

    @classmethod
    def of(cls, model: ModelSpec) -> SliceCost:
        """Return the mean cost in FLOPs of the model's blocks: of their products, and of the scores of the pairs that they see.

        With as many key and value heads as query heads, and heads that are together as wide as the model, it is `of_model`.
        """
        every = Counter(model.block(layer).attention for layer in range(model.layers))
        linear = 0.0
        for spec, count in every.items():
            products = sum(width * (inside or model.hidden) for inside, width in spec.inputs.values())
            products += model.hidden * (spec.outputs + sum(spec.downs.values()))
            linear += count * (2 * products + 6 * spec.state) / model.layers
        found = [2 * (spec.queries + spec.outputs) + 3 * spec.heads for spec in every if not spec.linear]
        quadratic = found[0] if found else 0.0  # all blocks with keys have as many heads
        windows = sorted((spec.window, count) for spec, count in every.items() if set(model.windows) != {FULL.name})
        return cls(quadratic, linear, tuple((name, count / model.layers) for name, count in windows))

    @classmethod
    def measured(cls, timings: Sequence[tuple[int, int, float]]) -> SliceCost:
        """Fit the cost to measured slices. No coefficient becomes negative.

        Args:
            timings: (length of the slice, tokens up to its end, seconds). Lengths are in tokens.

        Raises:
            ValueError: fewer than two timings.
        """
        from scipy.optimize import nnls

        if len(timings) < 2:
            raise ValueError(f"{len(timings)} timings cannot tell two coefficients")
        # The fit has a constant per slice, too. The cost leaves it out, because it does not depend on a slice's length.
        rows = [(length * (context - (length - 1) / 2), length, 1.0) for length, context, _ in timings]
        quadratic, linear, _ = nnls(rows, [seconds for _, _, seconds in timings])[0]
        return cls(float(quadratic), float(linear))

    def before(self, context: int) -> float:
        """Return the cost of the first `context` tokens of a sequence."""
        pairs: float = context * (context + 1) // 2
        if self.windows:
            pairs = sum(share * find_window(name).pairs(range(context)) for name, share in self.windows)
        return self.quadratic * pairs + self.linear * context

    def slices(self, lengths: Sequence[int]) -> list[float]:
        """Return the cost of each slice of a sequence."""
        ends = list(accumulate(lengths))
        return [self.before(end) - self.before(end - length) for end, length in zip(ends, lengths, strict=True)]


def slice_sequence(
    kind: str, length: int, degree: int, cost: SliceCost, multiple_of: int = 1, attention_degree: int | None = None
) -> Slicing:
    """Cut a sequence into slices of attention, and into `degree` equal micro-batches.

    Args:
        kind: how attention is cut, one of `SLICINGS`.
        cost: cost of a slice, for `algorithm1` and `time_uniform`.
        multiple_of: every length is a multiple of this number of tokens, so that ranks can share each slice.
        attention_degree: number of slices, at most `degree`. They are those of a sequence with this degree, so the token buffer
            never runs empty. None is `degree`.
    """
    if kind not in SLICINGS:
        raise UserError("schedule.slicing", kind, "is no kind of slicing", SLICINGS)
    for field, value in (("data.seq_len", length), ("schedule.degree", degree), ("multiple_of", multiple_of)):
        if value < 1:
            raise UserError(field, value, "must be at least 1")
    if length % multiple_of:
        raise UserError(
            "data.seq_len",
            length,
            f"must be a multiple of {multiple_of}, the smallest slice that ranks can share",
            multiples_near(length, multiple_of),
        )
    units = length // multiple_of
    if degree > units:
        rule = f"a sequence of {length} tokens has at most {units} slices" + f" of {multiple_of}" * (multiple_of > 1)
        raise UserError("schedule.degree", degree, rule, [f"1…{units}"])
    slices = attention_degree or degree
    if slices > degree:
        rule = f"must be at most degree={degree}: more slices than pieces hide nothing more"
        raise UserError("schedule.attention_degree", slices, rule, [f"1…{degree}"])
    even, groups = (tuple(multiple_of * n for n in token_uniform(units, count)) for count in (degree, slices))
    if kind == "token_uniform" or slices == 1:
        return Slicing(groups, even)
    make = algorithm1 if kind == "algorithm1" else time_uniform
    return Slicing(make(groups, cost, multiple_of), even)


def token_uniform(length: int, degree: int) -> tuple[int, ...]:
    """Return lengths that differ by at most one token, longer ones first."""
    return tuple(length // degree + (i < length % degree) for i in range(degree))


def algorithm1(micro_batches: Sequence[int], cost: SliceCost, multiple_of: int = 1) -> tuple[int, ...]:
    """Cut attention with FoldMoE's Algorithm 1 as printed: a first slice of ⌈L/d⌉, then slices close to the mean cost.

    The mean cost is the cost of the whole sequence divided by d. The cost of a slice is that of formula (5), in which every
    token of a slice sees all of the slice's context. Unlike the printed listing, this function clamps the ends of slices, so
    for any length and degree every slice has a token, and constraint (2) holds.

    Args:
        micro_batches: lengths of the MoE micro-batches, in tokens.
    """

    def flops(tokens: int, context: int) -> float:
        return cost.quadratic * tokens * context + cost.linear * tokens

    length, degree, first = sum(micro_batches), len(micro_batches), micro_batches[0]
    ideal = cost.before(length) / degree
    slices, start = [first], first
    for number in range(1, degree):
        last = length - (degree - 1 - number) * multiple_of  # every later slice keeps at least one unit
        least = min((number + 1) * first, last)
        ends = range(least, last + 1, multiple_of) if number < degree - 1 else range(last, last + 1)
        # A bisection, because there may be millions of ends.
        above = bisect_left(ends, ideal, key=lambda end: flops(end - start, end))
        near = ends[max(above - 1, 0) : above + 1] or ends[-1:]
        end = min(near, key=lambda end: abs(flops(end - start, end) - ideal))
        slices.append(end - start)
        start = end
    return tuple(slices)


def time_uniform(micro_batches: Sequence[int], cost: SliceCost, multiple_of: int = 1) -> tuple[int, ...]:
    """Cut attention so that the slowest slice is as fast as possible: the goal of FoldMoE's section 4.2.

    The first slice is as long as a micro-batch and does not count. For a given limit on the cost of a slice, slices that are
    as long as the limit allows reach furthest. Constraint (2) and the end of the sequence require only that slices reach far
    enough. So bisection finds the smallest limit that suffices.

    Args:
        micro_batches: lengths of the MoE micro-batches, in tokens.
    """
    needed = [tokens // multiple_of for tokens in accumulate(micro_batches)]

    def before(unit: int) -> float:
        return cost.before(unit * multiple_of)

    low, high = 0.0, float(before(needed[-1]))
    best = _furthest(needed, before, high)  # the cost of the whole sequence is always a sufficient limit
    while low < (middle := (low + high) / 2) < high:
        slices = _furthest(needed, before, middle)
        low, high, best = (middle, high, best) if slices is None else (low, middle, slices)
    return tuple(units * multiple_of for units in best or ())


def _furthest(needed: Sequence[int], before: Callable[[int], float], limit: float) -> list[int] | None:
    """Return the longest slices within a limit on the cost of every slice but the first; None if they do not suffice.

    Args:
        needed: units that the first j slices must have at least, for j = 1, 2, …
        before: unit → cost of the sequence before this unit.

    Returns:
        Lengths of the slices, in units of `multiple_of` tokens.
    """
    slices, start, count = [needed[0]], needed[0], len(needed)
    for number in range(1, count):
        end = bisect_right(range(needed[-1] + 1), before(start) + limit, start, key=before) - 1
        end = min(end, needed[-1] - (count - 1 - number))  # every later slice keeps at least one unit
        if end <= start or end < needed[number]:
            return None
        slices.append(end - start)
        start = end
    return slices

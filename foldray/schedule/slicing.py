"""How a sequence is cut: slices for attention, micro-batches for the MoE layers, and what a slice of causal attention costs.

FoldMoE (section 4.2) cuts the two apart, joined by a token buffer: attention's slices may have any lengths, as long as the buffer
never runs dry, which is the paper's constraint (2): behind its first j slices, attention has made the tokens of j micro-batches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from foldray.errors import UserError, multiples_near

SLICINGS = ("token_uniform", "algorithm1", "time_uniform")


class Slicing(NamedTuple):
    """Lengths in tokens; both sum to the sequence's.

    Args:
        attention: slices of attention, and of everything else outside the MoE layers.
        moe: micro-batches of the MoE layers.
    """

    attention: tuple[int, ...]
    moe: tuple[int, ...]

    @property
    def length(self) -> int:
        return sum(self.moe)

    @property
    def degree(self) -> int:
        """Into how many pieces communication is cut, the paper's d."""
        return len(self.moe)

    def shared(self, ranks: int) -> Slicing:
        """Each rank's part, when so many share the sequence evenly."""
        return Slicing(*(tuple(tokens // ranks for tokens in lengths) for lengths in self))

    def supplies(self) -> bool:
        """Whether the token buffer never runs dry (constraint (2))."""
        return all(made >= used for made, used in zip(accumulate(self.attention), accumulate(self.moe), strict=False))


class SliceCost(NamedTuple):
    """What a slice costs that ends at token c and has l of them: quadratic · l · (c − (l − 1) / 2) + linear · l.

    Its token number i sees i + 1 − l + c keys: causal attention, exactly (the paper's formula (5) counts c for all of them).
    """

    quadratic: float
    linear: float

    @classmethod
    def of_model(cls, hidden: int, heads: int) -> SliceCost:
        """FLOPs of FoldMoE's formula (5): H the model's width, h its attention heads."""
        return cls(4 * hidden + 3 * heads, 8 * hidden * hidden)

    @classmethod
    def measured(cls, timings: Sequence[tuple[int, int, float]]) -> SliceCost:
        """Fit the cost to measured (length, context with the slice itself, seconds), neither coefficient negative.

        Raises:
            ValueError: fewer than two timings.
        """
        from scipy.optimize import nnls

        if len(timings) < 2:
            raise ValueError(f"{len(timings)} timings cannot tell two coefficients")
        # A constant per slice is fitted too, and left out: whatever the cut, every slice has it.
        rows = [(length * (context - (length - 1) / 2), length, 1.0) for length, context, _ in timings]
        quadratic, linear, _ = nnls(rows, [seconds for _, _, seconds in timings])[0]
        return cls(float(quadratic), float(linear))

    def before(self, context: int) -> float:
        """Cost of everything before this token."""
        return self.quadratic * (context * (context + 1) // 2) + self.linear * context

    def slices(self, lengths: Sequence[int]) -> list[float]:
        """Cost of each slice of a sequence."""
        ends = list(accumulate(lengths))
        return [self.before(end) - self.before(end - length) for end, length in zip(ends, lengths, strict=True)]


def slice_sequence(kind: str, length: int, degree: int, cost: SliceCost, multiple_of: int = 1) -> Slicing:
    """Slices of attention by `kind`, one of `SLICINGS`, and as many equal micro-batches.

    Args:
        cost: what algorithm1 and time_uniform go by.
        multiple_of: every length is a multiple of this, which is what ranks that share a sequence need.

    Raises:
        UserError: unknown kind; length or degree below 1; length no multiple of `multiple_of`, or too short for `degree` slices.
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
    even = tuple(multiple_of * n for n in token_uniform(units, degree))
    if kind == "token_uniform":
        return Slicing(even, even)
    make = algorithm1 if kind == "algorithm1" else time_uniform
    return Slicing(make(even, cost, multiple_of), even)


def token_uniform(length: int, degree: int) -> tuple[int, ...]:
    """Lengths that differ by one at most, longer ones first."""
    return tuple(length // degree + (i < length % degree) for i in range(degree))


def algorithm1(micro_batches: Sequence[int], cost: SliceCost, multiple_of: int = 1) -> tuple[int, ...]:
    """FoldMoE's Algorithm 1 as printed: a first slice of ⌈L/d⌉, then each slice as near as can be to the mean time.

    Times are those of formula (5), which lets every token of a slice see all of its context. Ends are clamped, so that every
    slice keeps a token and constraint (2) holds for any length and degree, where the listing stops short of both.
    """

    def flops(tokens: int, context: int) -> float:
        return cost.quadratic * tokens * context + cost.linear * tokens

    length, degree, first = sum(micro_batches), len(micro_batches), micro_batches[0]
    ideal = cost.before(length) / degree
    slices, start = [first], first
    for number in range(1, degree):
        last = length - (degree - 1 - number) * multiple_of  # each of the others keeps something
        least = min((number + 1) * first, last)
        ends = range(least, last + 1, multiple_of) if number < degree - 1 else range(last, last + 1)
        above = bisect_left(
            ends, ideal, key=lambda end: flops(end - start, end)
        )  # nobody looks at all ends: there may be millions
        near = ends[max(above - 1, 0) : above + 1] or ends[-1:]
        end = min(near, key=lambda end: abs(flops(end - start, end) - ideal))
        slices.append(end - start)
        start = end
    return tuple(slices)


def time_uniform(micro_batches: Sequence[int], cost: SliceCost, multiple_of: int = 1) -> tuple[int, ...]:
    """The goal of FoldMoE's section 4.2: after a first slice as long as a micro-batch, the slowest slice as fast as can be.

    For a limit on the time of a slice, taking as much as the limit allows each time reaches furthest; constraint (2) and the end
    of the sequence ask for reach alone. So the smallest limit that suffices is found by bisection.
    """
    needed = [tokens // multiple_of for tokens in accumulate(micro_batches)]

    def before(unit: int) -> float:
        return cost.before(unit * multiple_of)

    low, high = 0.0, float(before(needed[-1]))
    best = _furthest(needed, before, high)  # a limit of the whole suffices
    while low < (middle := (low + high) / 2) < high:
        found = _furthest(needed, before, middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return tuple(units * multiple_of for units in best or ())


def _furthest(needed: Sequence[int], before: Callable[[int], float], limit: float) -> list[int] | None:
    """Slices none of which but the first costs more than the limit, each as long as can be; None if they fall short."""
    slices, start, count = [needed[0]], needed[0], len(needed)
    for number in range(1, count):
        end = bisect_right(range(needed[-1] + 1), before(start) + limit, start, key=before) - 1
        end = min(end, needed[-1] - (count - 1 - number))  # each of the others keeps something
        if end <= start or end < needed[number]:
            return None
        slices.append(end - start)
        start = end
    return slices

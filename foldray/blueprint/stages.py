"""The stages of a pipeline, and their positions. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from foldray.errors import UserError


@dataclass(frozen=True)
class Stage:
    """A run of blocks that one pipeline position computes in one go. The last one has the head, and blocks of further tokens."""

    number: int
    position: int
    layers: range
    first: bool
    last: bool


def stage_positions(stages: int, pp: int) -> tuple[int, ...]:
    """Return the position of every stage: s mod pp, as in Megatron-LM's interleaving (arXiv:2104.04473, section 2.2).

    Graphs, ownership and planner all take positions from here.
    """
    return tuple(stage % pp for stage in range(stages))


def even_sizes(layers: int, count: int, first: int = 0, last: int = 0) -> list[int]:
    """Return the numbers of blocks of `count` stages, as even as can be, longer stages first.

    Args:
        first, last: how many blocks the embedding counts as in the first stage, and the head in the last one. They may leave a
            stage without a block.
    """
    least, longer = divmod(layers + first + last, count)
    sizes = [least + (number < longer) for number in range(count)]
    sizes[0] -= first
    sizes[-1] -= last
    return sizes


def make_stages(
    layers: int, pp: int, virtual_stages: int = 1, sizes: Sequence[int] | None = None, further: int = 0
) -> tuple[Stage, ...]:
    """Cut `layers` blocks into pp · virtual_stages stages, in order.

    Args:
        sizes: number of blocks of each stage; None cuts evenly, longer stages first.
        further: number of blocks of multi-token prediction. They come after the others, in the last stage.
    """
    count = pp * virtual_stages
    if count > layers:
        rule = f"makes {count} stages (pp={pp} × {virtual_stages}) of {layers} blocks; every stage needs one at least"
        if virtual_stages == 1:
            raise UserError("fold.pp", pp, rule, [f"1…{layers}"])
        raise UserError("schedule.virtual_stages", virtual_stages, rule, [f"1…{max(1, layers // pp)}"])
    even = even_sizes(layers, count)
    sizes = even if sizes is None else sizes
    if len(sizes) != count or sum(sizes) != layers or min(sizes) < 1:
        rule = f"must be {count} numbers of blocks (pp={pp} × {virtual_stages} virtual stages), each at least 1, {layers} in sum"
        raise UserError("schedule.stage_layers", list(sizes), rule, ["null", even])
    ends = list(accumulate(sizes))
    return tuple(
        Stage(number, position, range(end - size, end + further * (number == count - 1)), number == 0, number == count - 1)
        for number, (position, end, size) in enumerate(zip(stage_positions(count, pp), ends, sizes, strict=True))
    )

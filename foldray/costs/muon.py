"""What Muon costs a rank in time and memory, as `runtime/muon.py` works.

One of the ranks that hold pieces of a matrix gathers all of it: by an all-to-all over the ranks that shard the optimizer, and by
another one over the ranks among which TP or ETP cuts the matrix. The pieces travel in bfloat16, and the update goes back in
float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from foldray.blueprint import hidden_matrices
from foldray.costs.candidate import FAMILY
from foldray.costs.device import FLOAT32
from foldray.costs.layout import Content
from foldray.costs.rank import RankCosts, kinds_with_weights

_HALF, _WIDE = 2, FLOAT32  # bytes of an element of bfloat16, and of float32
_ROUND = 2**24  # about the number of elements that a rank gathers in a round (`runtime/muon.py`)


class Matrices(NamedTuple):
    """The matrices of one gradient class of which a rank holds all or a piece.

    Args:
        family: the group family over which their gradients are summed.
        cutters: the group family among which each of them is cut; None for whole ones.
        shapes: (inputs, outputs) of a whole matrix → number of such matrices.
    """

    family: str
    cutters: str | None
    shapes: Mapping[tuple[int, int], float]

    def cut(self, rank: RankCosts) -> int:
        """Return the number of ranks among which each matrix is cut."""
        return rank.fold.group_size(self.cutters) if self.cutters else 1

    def elements(self, rank: RankCosts) -> float:
        """Return the number of elements of a rank's pieces."""
        return sum(count * rows * columns for (rows, columns), count in self.shapes.items()) / self.cut(rank)


def matrices(rank: RankCosts, content: Content) -> list[Matrices]:
    """Return the matrices of stages that Muon updates, by gradient class. Without Muon, there are none."""
    if not rank.job.iterations:
        return []
    shapes: dict[str, Counter] = {}
    for block, count in content.blocks:
        for kind in kinds_with_weights(block):
            for (name, *shape), number in hidden_matrices(rank.model).get((kind, block), {}).items():
                local = number / (rank.fold.ep if name == "expert" else 1)
                shapes.setdefault(name, Counter())[tuple(shape)] += count * local  # type: ignore[assignment]
    cutters = {"dense": "tp", "replicated": None, "expert": "etp"}
    return [Matrices(FAMILY[name], cutters[name], counts) for name, counts in shapes.items()]


def elements(rank: RankCosts, content: Content) -> dict[str, float]:
    """Return the number of a rank's elements that Muon updates, by group family."""
    return {of_class.family: of_class.elements(rank) for of_class in matrices(rank, content)}


def seconds(rank: RankCosts, of_class: Matrices) -> float:
    """Return the seconds in which matrices are gathered, made orthogonal, and sent back, beyond a pass over weights.

    Ranks share the work evenly, but no rank takes less than one matrix.
    """
    fold, network, cut, count = rank.fold, rank.network, of_class.cut(rank), of_class.elements(rank)
    ranks = fold.group_size(of_class.family)
    takes = {shape: rank.job.iterations * _iteration(rank, *sorted(shape)) for shape in of_class.shapes}
    computed = max(sum(takes[shape] * number for shape, number in of_class.shapes.items()) / (ranks * cut), max(takes.values()))
    travels = 0.0
    if rank.zero:
        travels += sum(network.exchange(of_class.family, size * count / ranks).seconds for size in (_HALF, _WIDE))
    else:
        travels += network.gather(of_class.family, _WIDE * count).seconds
    if of_class.cutters:
        travels += sum(network.exchange(of_class.cutters, size * count / ranks).seconds for size in (_HALF, _WIDE))
    return computed + travels


def _iteration(rank: RankCosts, short: int, long: int) -> float:
    """Return the seconds of one iteration of Newton-Schulz: 4 · short² · long + 2 · short³ FLOPs in three products."""
    product = rank.device.product
    return product(short, long, short, True) + product(short, short, short, True) + product(short, short, long, True)


def moment(rank: RankCosts, content: Content) -> float:
    """Return the bytes that a rank needs while it makes matrices orthogonal, in the fullest round."""
    return max((round_bytes(rank, of_class) for of_class in matrices(rank, content)), default=0.0)


def round_bytes(rank: RankCosts, of_class: Matrices) -> float:
    """Return the bytes of the fullest round of a gradient class."""
    ranks, cut, count = rank.fold.group_size(of_class.family), of_class.cut(rank), of_class.elements(rank)
    shared = rank.zero > 0 and ranks > 1
    rows, columns = max(of_class.shapes, key=lambda shape: shape[0] * shape[1])
    piece, short = rows * columns / cut, min(rows, columns)
    together = min(count, max(_ROUND * (ranks if shared else 1), piece * ranks * cut) + piece)
    # The matrix while it is iterated, and its product with itself; its update in float32, scaled.
    largest = _HALF * (3 * rows * columns + 2 * short**2) + 2 * _WIDE * rows * columns
    # Ranks are assigned whole matrices, up to two side by side, so a rank may have more than its share.
    assigned = min(together, together / ranks + 2 * piece * (ranks > 1))
    joined = min(together * cut, assigned + 2 * piece * cut * (cut > 1))
    # Updates go back in the reverse order: first to the ranks of TP or ETP, then to the ranks that shard the optimizer, or to all
    # replicas. In both steps, a rank holds what it sends and what it receives.
    updates = max(2 * joined + assigned, 2 * assigned + together / ranks if shared else assigned + 2 * together)
    return _WIDE * updates + largest

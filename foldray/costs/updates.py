"""Updates of weights: the seconds after the backward of a stage, and what Muon costs.

Gradients are reduced, weights are updated and, under ZeRO, gathered. Muon works as `runtime/muon.py` does. One of the ranks that
hold pieces of a matrix gathers all of it: by an all-to-all over the ranks that shard the optimizer, and by another one over the
ranks among which TP or ETP cuts the matrix. The pieces travel in bfloat16, and the update goes back in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from foldray.blueprint import hidden_matrices
from foldray.costs.candidate import FAMILY, Content, Positions
from foldray.costs.device import FLOAT32
from foldray.costs.offload import host_seconds
from foldray.costs.rank import RankCosts, kinds_with_weights, shared_by_fold
from foldray.graph import Reduction

WHOLE = Reduction("end")
"""The reduction with the fewest messages. Optimizer and gather of weights are the same for all reductions."""
_HALF, _WIDE = 2, FLOAT32  # bytes of an element of bfloat16, and of float32
_ROUND = 2**24  # about the number of elements that a rank gathers in a round (`runtime/muon.py`)


class Update(NamedTuple):
    """The update of those parameters of a stage whose gradients are summed over one group family.

    Args:
        family: the name for its seconds in reports: `edp` for experts, `dp_cp` for all others.
        lane: the lane of its messages.
        chunks: number of chunks of gradients.
        reduce, gather, optimizer: seconds of the reduction, of the gather of weights, and of the optimizer.
    """

    family: str
    lane: str
    chunks: float
    reduce: float
    gather: float
    optimizer: float


@shared_by_fold
def stage_updates(rank: RankCosts, content: Content, reduction: Reduction) -> tuple[Update, ...]:
    """Return the updates of a stage, one per group family of its parameters."""
    hidden = {of_class.family: of_class for of_class in matrices(rank, content)}
    counts = rank.elements(content).items()
    return tuple(_update(rank, family, count, hidden.get(family), reduction) for family, count in counts)


def _update(rank: RankCosts, family: str, count: float, hidden: Matrices | None, reduction: Reduction) -> Update:
    """Return the update of `count` parameters of a group family, and of the matrices among them that Muon updates.

    ZeRO-3 has already reduced the gradients during backward. The optimizer reads and writes float32 weights and two moments,
    reads a gradient, and writes a weight in the dtype of computation; or it does so on the host (`offload.py`). With Muon,
    matrices of hidden layers have one moment, and an update besides.
    """
    network, zero, device = rank.network, rank.zero, rank.device
    owners = rank.fold.group_size(family) if zero else 1
    software = rank.job.software
    gradients = software.gradients * count  # bytes
    chunks = max(1.0, gradients / size) if (size := reduction.most) else 1.0
    lane, seconds = rank.scatter(family, gradients)
    travel = seconds + (chunks - 1) * rank.scatter(family, 0).seconds
    reduce = 0.0 if zero == 3 else travel * (1 if zero else 2)
    gather = network.gather(family, device.bytes * count).seconds if zero in (1, 2) else 0.0
    bandwidth = device.hardware.memory_gb_s * 1e9 * device.share["optimizer"]
    optimizer = count / owners * (2 * FLOAT32 + 4 * software.moments + software.gradients + device.bytes) / bandwidth
    if rank.job.offload:
        optimizer = host_seconds(rank, count / owners)
    elif hidden:
        optimizer += muon_seconds(rank, hidden) - hidden.elements(rank) / owners * FLOAT32 / bandwidth
    return Update("edp" if family == "edp" else "dp_cp", lane, chunks, reduce, gather, optimizer)


class Departure(NamedTuple):
    """How the gradients of a stage leave while its last backward runs.

    Gradients may share a link with all-to-alls, and use it while no all-to-all does. Where nothing computes during an
    all-to-all, every second that the all-to-all waits for gradients is lost. If gradients give way (`chunks`), an all-to-all
    waits for half a chunk on average. Otherwise both share the link evenly, so the all-to-all takes up to twice as long. In a
    block that drains, nothing computes during its first all-to-all.

    Args:
        whole: seconds of all its gradients.
        ready: seconds of the gradients that are complete before the pass ends: those of all blocks but the last one.
        span: seconds from the end of the first block's backward to the end of the pass.
        idle: share of the span in which the link is free.
        waited: slowdown of all-to-alls: seconds that they wait, per second in which gradients use the link within the span.
        most: upper limit of the seconds that all-to-alls wait.
    """

    whole: float
    ready: float
    span: float
    idle: float
    waited: float
    most: float


def least_behind(rank: RankCosts, positions: Positions) -> list[float]:
    """Return, for every different content of positions, a lower bound of the seconds after the last backward.

    It holds for every reduction, and has the crowding by the one with the fewest messages. The bound takes all stages of a
    position together. This never takes longer than the stages one by one.
    """
    crowding, contents = rank.device.share["crowding"], [stage_updates(rank, each, WHOLE) for each in positions.different]
    return [sum([crowding * update.reduce + update.gather + update.optimizer for update in updates]) for updates in contents]


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
    every = hidden_matrices(rank.model, rank.model.copies_keys(rank.fold.tp))
    for block, count in content.blocks:
        for kind in kinds_with_weights(block):
            for (name, *shape), number in every.get((kind, block), {}).items():
                local = number / (rank.fold.ep if name == "expert" else 1)
                shapes.setdefault(name, Counter())[tuple(shape)] += count * local  # type: ignore[assignment]
    cutters = {"dense": "tp", "replicated": None, "expert": "etp"}
    return [Matrices(FAMILY[name], cutters[name], counts) for name, counts in shapes.items()]


def elements(rank: RankCosts, content: Content) -> dict[str, float]:
    """Return the number of a rank's elements that Muon updates, by group family."""
    return {of_class.family: of_class.elements(rank) for of_class in matrices(rank, content)}


def muon_seconds(rank: RankCosts, of_class: Matrices) -> float:
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

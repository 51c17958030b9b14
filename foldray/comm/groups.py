"""Process groups, made from a fold's tables and handed on as one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from foldray.comm.communicator import Communicator, Traffic
from foldray.fold import Fold

# One communicator per class of traffic: a process group is one queue, so a small message behind a large reduction waits.
TRAFFIC = {
    "tokens": "ep",
    "counts": "etp_ep",
    "expert_slices": "etp",
    "tensor": "tp",
    "context": "cp",
    "sequence": "tp_cp",
    "activations": "pp",
    "output_gradients": "pp",
    "dense_gradients": "dp_cp",
    "replicated_gradients": "tp_dp_cp",
    "expert_gradients": "edp",
    "tied_gradients": "embedding",
    "control": "world",
}


@dataclass(frozen=True)
class Groups:
    """All communicators of one rank of a fold; `close` gives up their connections and threads.

    Attributes:
        tokens, counts, expert_slices: the MoE layer's: all-to-all over EP, row counts over ETP×EP, activations over ETP.
        tensor, context, sequence: attention's: activations over TP, keys and values over CP, statistics of whole sequences.
        activations, output_gradients: between pipeline stages, forward and backward.
        dense_gradients, replicated_gradients, expert_gradients, tied_gradients: one for each gradient class, and for the
            embedding that first and last stage share.
        control: losses, norms and counts over all ranks.
        traffic: what this rank has sent over all of them.
    """

    fold: Fold
    rank: int
    tokens: Communicator
    counts: Communicator
    expert_slices: Communicator
    tensor: Communicator
    context: Communicator
    sequence: Communicator
    activations: Communicator
    output_gradients: Communicator
    dense_gradients: Communicator
    replicated_gradients: Communicator
    expert_gradients: Communicator
    tied_gradients: Communicator
    control: Communicator
    traffic: Traffic
    _made: list[dist.ProcessGroup]

    @classmethod
    def create(
        cls, fold: Fold, rank: int = 0, timeout: timedelta | None = None, node: Callable[[int], int] | None = None
    ) -> Groups:
        """Make the process groups; every rank of the fold calls this. A fold of one rank needs none and talks to nobody.

        Args:
            timeout: of every collective; None is the process group's default.
            node: rank → its node, to tell traffic inside a node from traffic between nodes; None counts all as inside.

        Raises:
            ValueError: the process group's world is too small for the fold, or the rank lies outside of it.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if fold.world_size > 1 and fold.offset + fold.world_size > world:
            raise ValueError(f"the fold has ranks {fold.offset}…{fold.offset + fold.world_size - 1}, the process group {world}")
        if rank not in range(fold.offset, fold.offset + fold.world_size):
            raise ValueError(f"rank {rank} is not in the fold's {fold.offset}…{fold.offset + fold.world_size - 1}")
        made: dict[str, Communicator] = {}
        traffic = Traffic()
        for name, family in TRAFFIC.items():
            group, ranks = _process_group(fold, rank, family, timeout, singles=False)
            nodes = tuple(map(node, ranks)) if node else ()
            made[name] = Communicator(name, ranks, ranks.index(rank), group, nodes, traffic)
        own = [communicator.group for communicator in made.values() if communicator.group]
        return cls(fold, rank, **made, traffic=traffic, _made=own)

    def process_group(self, family: str) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """One more group of a family, and its members, for those who must have a group even of one; every rank calls this."""
        group, ranks = _process_group(self.fold, self.rank, family, None, singles=True)
        assert group is not None
        self._made.append(group)
        return group, ranks

    def close(self) -> None:
        """Destroy the process groups: each keeps threads and sockets, which a process that goes on would gather."""
        while self._made:
            dist.destroy_process_group(self._made.pop())

    @cached_property
    def coordinate(self) -> dict[str, dict[str, int]]:
        """This rank's place in both views: {"attention": {"tp", …}, "moe": {"etp", …}}."""
        return self.fold.coordinate(self.rank)

    @property
    def dp_rank(self) -> int:
        return self.coordinate["attention"]["dp"]


def host_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """A gloo group of the whole world, for objects and files; safe to use from another thread. None without a process group."""
    return dist.new_group(backend="gloo", timeout=timeout, group_desc="host") if dist.is_initialized() else None


def _process_group(
    fold: Fold, rank: int, family: str, timeout: timedelta | None, singles: bool
) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    mine: tuple[dist.ProcessGroup | None, tuple[int, ...]] = (
        None,
        (rank,),
    )  # a family may leave ranks out: a middle stage shares no embedding
    for ranks in fold.groups(family):
        # Every rank names every group, in one order; those outside of it return at once.
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=family) if singles or len(ranks) > 1 else None
        if rank in ranks:
            mine = group, ranks
    return mine

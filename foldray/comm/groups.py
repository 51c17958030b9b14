"""Makes the process groups of a fold from its rank tables, and collects their communicators in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import chain

import torch.distributed as dist

from foldray.comm import nccl
from foldray.comm.activity import Activity
from foldray.comm.communicator import Communicator, Traffic
from foldray.comm.dispatch_queue import DispatchQueue
from foldray.fold import Fold

# Each class of traffic has its own communicator. A process group is one queue, so small messages would wait for large ones.
TRAFFIC = {
    "tokens": "ep_across",
    "tokens_inside": "ep_inside",
    "counts": "etp_ep",
    "expert_slices": "etp",
    "tensor": "tp",
    "context": "cp",
    "sequence": "tp_cp",
    "handovers_up": "pp",
    "handovers_down": "pp",
    "dense_gradients": "dp_cp",
    "replicated_gradients": "tp_dp_cp",
    "expert_gradients": "edp",
    "tied_gradients": "embedding",
    "control": "world",
}
GRADIENTS = ("dense_gradients", "replicated_gradients", "expert_gradients")
"""Classes whose messages take the same links if they have the same members. Queues of their own then gain nothing."""
APART = {"rows_up": "world", "rows_down": "world", "row_counts": "world", "expert_stage": "expert_stage"}
"""Further classes of traffic, if the experts have ranks of their own."""


@dataclass(frozen=True)
class Groups:
    """All communicators of one rank of a fold. `close` ends their connections and threads.

    Attributes:
        tokens, counts, expert_slices: for the MoE layer: all-to-alls over EP, row counts over ETP×EP, activations over ETP.
        tokens_inside: all-to-alls among the EP ranks of a node, if tokens travel once to each node (`Fold.ep_inside`). Then
            `tokens` has one rank of each node.
        tensor, context, sequence: for attention: activations over TP, keys and values over CP, statistics of whole sequences
            over TP×CP.
        handovers_up, handovers_down: for handovers between pipeline stages, to a higher and to a lower position.
        dense_gradients, replicated_gradients, expert_gradients: for the gradients of each gradient class.
        tied_gradients: for the gradient of an embedding that the first and the last stage share.
        control: for losses, norms and counts over all ranks.
        rows_up, rows_down, row_counts: if the experts have ranks of their own: rows to experts, rows to attention, and how many
            rows come. Otherwise, and for `expert_stage` on ranks of attention, they have no other member.
        expert_stage: the ranks of a position of such experts.
        tokens_queue, tokens_inside_queue: the queues in which all-to-alls of tokens start.
        rows_queue: the queue in which this rank begins to receive rows, if the experts have ranks of their own.
        timeout: timeout of every collective; None is the default of the process group.
    """

    fold: Fold
    rank: int
    tokens: Communicator
    tokens_inside: Communicator
    counts: Communicator
    expert_slices: Communicator
    tensor: Communicator
    context: Communicator
    sequence: Communicator
    handovers_up: Communicator
    handovers_down: Communicator
    dense_gradients: Communicator
    replicated_gradients: Communicator
    expert_gradients: Communicator
    tied_gradients: Communicator
    control: Communicator
    rows_up: Communicator
    rows_down: Communicator
    row_counts: Communicator
    expert_stage: Communicator
    traffic: Traffic
    activity: Activity
    timeout: timedelta | None
    _process_groups: list[dist.ProcessGroup]
    _node: Callable[[int], int] | None = None
    tokens_queue: DispatchQueue = field(default_factory=DispatchQueue, init=False)
    tokens_inside_queue: DispatchQueue = field(init=False)
    rows_queue: DispatchQueue = field(default_factory=DispatchQueue, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_inside_queue", DispatchQueue(self.tokens_queue))

    @classmethod
    def create(
        cls,
        fold: Fold,
        rank: int = 0,
        timeout: timedelta | None = None,
        node: Callable[[int], int] | None = None,
        activity: Activity | None = None,
        share: bool | None = None,
    ) -> Groups:
        """Make the process groups. Every rank of the fold must call this. A fold of one rank needs no process group.

        Args:
            node: rank → the node of the rank, to count traffic inside a node and between nodes separately. None counts all
                traffic as inside a node.
            share: whether classes of gradients with the same members share a process group. None shares over NCCL, where each one
                takes memory of the GPU.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if fold.world_size > 1 and fold.offset + fold.world_size > world:
            last = fold.offset + fold.world_size - 1
            raise ValueError(f"the fold has ranks {fold.offset}…{last}, but the process group has only {world}")
        if rank not in range(fold.offset, fold.offset + fold.world_size):
            raise ValueError(f"rank {rank} is not in the fold's ranks {fold.offset}…{fold.offset + fold.world_size - 1}")
        share = nccl.is_used() if share is None else share
        communicators: dict[str, Communicator] = {}
        made: dict[object, tuple[dist.ProcessGroup | None, tuple[int, ...]]] = {}  # all ranks find the same keys
        traffic, activity = Traffic(), activity or Activity()
        for name, family in {**TRAFFIC, **APART}.items():
            used = name in TRAFFIC or fold.disjoint
            key = fold.groups(family) if share and name in GRADIENTS else name
            if key not in made:
                made[key] = _process_group(fold, rank, family, timeout, traffic=name) if used else (None, (rank,))
            group, ranks = made[key]
            nodes = tuple(map(node, ranks)) if node else ()
            communicators[name] = Communicator(name, ranks, ranks.index(rank), group, nodes, traffic, activity)
        groups = [group for group, _ in made.values() if group]
        return cls(
            fold, rank, **communicators, traffic=traffic, activity=activity, timeout=timeout, _process_groups=groups, _node=node
        )

    def process_group(self, family: str) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
        """Make another process group of a family, even for a single member, and return it with its members.

        A rank without a place in the family's grid gets a group of its own. Every rank of the fold must call this.
        """
        group, ranks = _process_group(self.fold, self.rank, family, self.timeout)
        assert group is not None
        self._process_groups.append(group)
        return group, ranks

    def communicator(self, name: str, family: str) -> Communicator:
        """Make the communicator of a further class of traffic. Every rank of the fold must call this."""
        group, ranks = _process_group(self.fold, self.rank, family, self.timeout, traffic=name)
        if group is not None:
            self._process_groups.append(group)
        nodes = tuple(map(self._node, ranks)) if self._node else ()
        return Communicator(name, ranks, ranks.index(self.rank), group, nodes, self.traffic, self.activity)

    def close(self) -> None:
        """Destroy the process groups. Otherwise threads and sockets would pile up in a process that makes new groups."""
        self.tokens_queue.close()
        self.tokens_inside_queue.close()
        self.rows_queue.close()
        while self._process_groups:
            dist.destroy_process_group(self._process_groups.pop())

    @cached_property
    def coordinate(self) -> dict[str, dict[str, int]]:
        """This rank's place in both grids: {"attention": {"tp", …}, "moe": {"etp", …}}."""
        return self.fold.coordinate(self.rank)

    @property
    def dp_rank(self) -> int:
        return self.coordinate["attention"]["dp"]

    @property
    def owns_tokens(self) -> bool:
        """Whether this rank has a place in attention's grid."""
        return "attention" in self.coordinate

    @property
    def stage(self) -> Communicator:
        """The ranks of this rank's pipeline position. They run the same list."""
        return self.replicated_gradients if self.owns_tokens else self.expert_stage

    @property
    def position(self) -> int:
        """This rank's pipeline position. Experts with positions of their own come after those of attention."""
        if self.owns_tokens:
            return self.coordinate["attention"]["pp"]
        return self.fold.pp + self.coordinate["moe"]["pp"]


def host_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Make a gloo group of all ranks, for objects and files. Another thread may use it safely.

    Returns None if torch.distributed is not initialized.
    """
    return dist.new_group(backend="gloo", timeout=timeout, group_desc="host") if dist.is_initialized() else None


def _process_group(
    fold: Fold, rank: int, family: str, timeout: timedelta | None, traffic: str | None = None
) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    """Make the process groups of a family, and return this rank's with its members.

    A single member gets no group for a class of traffic, which needs none. Without a class, it gets one.
    """
    # A family may leave out ranks: a middle stage has no part in a tied embedding.
    mine: tuple[dist.ProcessGroup | None, tuple[int, ...]] = (None, (rank,))
    tables = fold.groups(family)
    if traffic is None:
        covered = set(chain(*tables))
        tables += tuple((other,) for other in range(fold.offset, fold.offset + fold.world_size) if other not in covered)
    for ranks in tables:
        # torch.distributed requires every rank to make all groups in the same order, also the groups of other ranks.
        group = None
        if traffic is None or len(ranks) > 1:
            options = nccl.options(traffic, timeout) if traffic else None
            group = dist.new_group(list(ranks), timeout=timeout, pg_options=options, group_desc=family)
        if rank in ranks:
            mine = group, ranks
    return mine

"""Process groups, made from a fold's tables and handed on as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from foldray.fold import Fold

# One communicator per class of traffic: a process group is one queue, so a small message behind a large reduction waits.
_TRAFFIC = {"tokens": "ep", "counts": "ep", "expert_gradients": "edp", "dense_gradients": "dp_cp", "control": "dp_cp"}


@dataclass(frozen=True)
class Communicator:
    """Ranks that exchange one class of traffic.

    Args:
        name: what travels.
        ranks: members, in the order of the fold's table.
        index: this process's place among them.
        group: None for a single member, which needs no network.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the members, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def all_to_all(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Send `sent[i]` leading rows of x to member i and return the rows that came, member by member.

        Shapes: x [Σ sent, …] → [Σ received, …].
        """
        if self.group is None:
            return x
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=self.group)
        return out


@dataclass(frozen=True)
class Groups:
    """All communicators of one rank of a fold; `close` gives up their connections and threads."""

    fold: Fold
    rank: int
    tokens: Communicator
    counts: Communicator
    expert_gradients: Communicator
    dense_gradients: Communicator
    control: Communicator
    _made: list[dist.ProcessGroup]

    @classmethod
    def create(cls, fold: Fold, rank: int = 0, timeout: timedelta | None = None) -> Groups:
        """Make the process groups; every rank of the world calls this. A fold of one rank needs none and talks to nobody.

        Raises:
            ValueError: the process group's world is not the fold's.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if fold.world_size not in (1, world):
            raise ValueError(f"the fold has {fold.world_size} ranks, the process group {world}")
        made: dict[str, Communicator] = {}
        for name, family in _TRAFFIC.items():
            group, ranks = _process_group(fold, rank, family, timeout, singles=False)
            made[name] = Communicator(name, ranks, ranks.index(rank), group)
        return cls(fold, rank, **made, _made=[communicator.group for communicator in made.values() if communicator.group])

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

    @property
    def coordinate(self) -> dict[str, dict[str, int]]:
        return self.fold.coordinate(self.rank)

    @property
    def dp_rank(self) -> int:
        return self.coordinate["attention"]["dp"]

    @property
    def ep_rank(self) -> int:
        return self.coordinate["moe"]["ep"]


def host_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """A gloo group of the whole world, for objects and files; safe to use from another thread. None without a process group."""
    return dist.new_group(backend="gloo", timeout=timeout, group_desc="host") if dist.is_initialized() else None


def _process_group(
    fold: Fold, rank: int, family: str, timeout: timedelta | None, singles: bool
) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    mine = None
    for ranks in fold.groups(family):
        # Every rank takes part in making every group, in one order.
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=family) if singles or len(ranks) > 1 else None
        if rank in ranks:
            mine = group, ranks
    assert mine is not None, f"rank {rank} is in no {family} group of {fold}"
    return mine

"""The space of a search: all legal folds of a cluster, and the schedules of each fold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from foldray.blueprint import ModelSpec, smallest_slice
from foldray.costs.candidate import Job
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.network import Network
from foldray.fold import Fold, divisors
from foldray.graph import Reduction, SliceCost
from foldray.kinds import ATTENTION, EXPERT, FFN
from foldray.orders import OVERLAPS, Ordering, Overlap, Sequences, overlap_kind

DEGREES = (2, 4, 8)
BATCH_DEGREES = (1, 2)
RECOMPUTE: tuple[tuple[str, ...], ...] = ((), (EXPERT,), (ATTENTION, FFN, EXPERT))
MICRO_BATCHES = (1, 2, 4, 8, 16)
KINDS = tuple(name for name, row in OVERLAPS.items() if row.of_stages)
"""Kinds whose steps the search puts together from passes of stages."""
REDUCTIONS = (*(Reduction("chunks", size << 20) for size in (64, 16, 4, 1)), Reduction("buckets"), Reduction("end"))


@dataclass(frozen=True)
class Space:
    """The space of a search.

    Args:
        pins: axis → size, for axes with a fixed size.
        zero: stage of ZeRO: 1 or 3.
        micro_batches: sizes of micro-batches to try, in sequences.
        degrees: numbers of pieces of a sequence to try; for attention, every smaller one beside it.
        batch_degrees: numbers of parts of a micro-batch to try.
        recompute: sets of kinds of ops to recompute.
        kinds: overlap kinds to try.
        reductions: times and sizes of reductions to try; each candidate has the best of them.
        imbalance: rows of the fullest rank over the mean, for the memory.
    """

    job: Job
    hardware: Hardware
    gpus: int
    pins: Mapping[str, int] = field(default_factory=dict)
    zero: int = 1
    micro_batches: Sequence[int] = MICRO_BATCHES
    degrees: Sequence[int] = DEGREES
    batch_degrees: Sequence[int] = BATCH_DEGREES
    recompute: Sequence[tuple[str, ...]] = RECOMPUTE
    kinds: Sequence[str] = KINDS
    reductions: Sequence[Reduction] = REDUCTIONS
    imbalance: float = 1.0

    def folds(self) -> Iterator[Fold]:
        """Yield every legal fold with the fixed sizes.

        If tokens travel once to each rank, a fold whose expert-parallel groups have several ranks on each of several nodes comes
        again, with tokens that travel once to each node first.
        """
        if self.job.dispatch != "rank":
            yield from self._one_level()
            return
        device = Device.of(self.job, self.hardware)
        for fold in self._one_level():
            yield fold
            size, together, nodes = Network(fold, device).shape("ep")
            if nodes > 1 and together > 1 and size == together * nodes:
                yield replace(fold, ep_inside=together)

    def _one_level(self) -> Iterator[Fold]:
        for fold in legal_folds(self.job.model, self.job.seq_len, self.gpus, self.pins):
            if self.job.global_batch % fold.dp == 0:
                yield fold

    def orderings(self, smallest: int, travels: bool, batch_degree: int) -> Iterator[Ordering]:
        """Yield the schedules of folds, without recomputation.

        Args:
            smallest: the smallest slice of such a fold.
            travels: whether rows travel. If not (EP1), there is only `sequential`.
        """
        if batch_degree == 1:
            yield Ordering()
        if not travels:
            return
        sequences = Sequences(self.job.seq_len, SliceCost.of(self.job.model), smallest)
        for kind, degree in itertools.product(self._kinds(batch_degree), self._degrees(batch_degree)):
            if sequences.length // sequences.multiple_of < degree:
                continue
            fewer = [count for count in self.degrees if count < degree] if overlap_kind(kind).cuts_attention else []
            for cut in (sequences.cut_for(kind, degree, attention_degree=count) for count in (None, *fewer)):
                yield Ordering(Overlap(kind, 1), Overlap(kind, 1), cut, batch_degree=batch_degree)

    def _kinds(self, batch_degree: int) -> Iterable[str]:
        """Return the kinds that cut; of kinds with the same order, the one that is meant for this number of parts."""
        rows = {kind: overlap_kind(kind) for kind in self.kinds}
        cutting = [(kind, row) for kind, row in rows.items() if row.cuts and row.batch_degree <= batch_degree]
        cutting.sort(key=lambda named: named[1].batch_degree)
        return {(row.order, row.cuts_attention, row.drains): kind for kind, row in cutting}.values()

    def _degrees(self, batch_degree: int) -> list[int]:
        """Return the numbers of pieces of a sequence. With several parts, sequences may be whole."""
        whole = [1] if batch_degree > 1 else []
        return [*whole, *(degree for degree in self.degrees if degree * batch_degree <= max(self.degrees))]


def legal_folds(model: ModelSpec, seq_len: int, gpus: int, pins: Mapping[str, int] = MappingProxyType({})) -> Iterator[Fold]:
    """Yield every fold of `gpus` ranks that divides a model and its sequences."""

    def sizes(axis: str, among: int, legal: Callable[[int], bool]) -> list[int]:
        return [n for n in divisors(among) if legal(n) and n == pins.get(axis, n)]

    def cuts_heads(tp: int) -> bool:
        dense = model.ffn_hidden if model.has_dense else 0
        return not any(size % tp for size in (model.heads, model.kv_heads, dense, model.shared_hidden, model.vocab))

    for pp in sizes("pp", gpus, lambda n: n <= model.layers):
        place = gpus // pp
        moe = [
            (ep, etp)
            for ep in sizes("ep", place, lambda n: model.experts % n == 0)
            for etp in sizes("etp", place // ep, lambda n: model.expert_hidden % n == 0 and not (model.expert_bias and n > 1))
        ]
        for tp in sizes("tp", place, cuts_heads):
            for cp in sizes("cp", place // tp, lambda n, tp=tp: seq_len % smallest_slice(n, tp) == 0):  # type: ignore[misc]
                yield from (Fold(gpus, tp, cp, pp, ep, etp) for ep, etp in moe)

"""The keys that a rank's queries see: no later keys, no keys outside of the window, no keys of another document.

Slices and context parallelism cut sequences into runs of positions. For both, this module finds the runs of keys that a run
of queries must be computed with, and their masks: bools on a CPU, ranges of keys on a GPU.

Legend: B sequences, G key/value heads, S queries (of this rank's shard), T keys, L positions of the whole sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foldray.kernels.attention import Mask
from foldray.kernels.key_ranges import KeyRanges
from foldray.kernels.transfer import to_device
from foldray.model.batch import document_starts
from foldray.windows import FULL, Window

_SHORTEST_RUN = 128  # queries; starting a kernel takes as long as computing this many


class Part(NamedTuple):
    """A run of keys that a run of queries is computed with at once: indices in the tensor that holds the keys, and the mask."""

    keys: slice
    mask: Mask


class QueryRun(NamedTuple):
    """A run of queries, the keys that it may see, and their mask."""

    queries: range
    keys: range
    mask: Mask


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The keys that this rank's queries of a slice see. The slice may be the whole sequence of `length` tokens.

    Args:
        tokens: positions of the slice.
        shards: for each context-parallel member, positions of the chunks of the slice that it holds.
        index: this rank's index among the members.
        segment_BL: document numbers of the whole sequences, on the host; None is one document.
    """

    tokens: range
    length: int
    shards: Sequence[Sequence[range]]
    index: int = 0
    segment_BL: Tensor | None = None
    window: Window = FULL
    device: torch.device | None = None
    _firsts: dict[tuple[range, range], int] = field(default_factory=dict, repr=False)
    _numbers: dict[range, list[int] | None] = field(default_factory=dict, repr=False)
    _ranges: dict[tuple[range, range], KeyRanges] = field(default_factory=dict, repr=False)

    @property
    def held(self) -> Sequence[range]:
        """Chunks of this rank."""
        return self.shards[self.index]

    @property
    def whole(self) -> bool:
        """Whether the slice is the whole sequence."""
        return len(self.tokens) == self.length

    @property
    def alone(self) -> bool:
        """Whether this rank holds all of the slice."""
        return len(self.shards) == 1

    @property
    def ranged(self) -> bool:
        """Whether masks are ranges of keys, because the device's kernels take no bools."""
        return self.device is not None and self.device.type == "cuda"

    @cached_property
    def hides_ranges(self) -> bool:
        """Whether queries of the whole sequence need ranges of keys."""
        return self.ranged and any(self._hiding(range(self.length), [range(self.length)]))

    @property
    def sequence(self) -> list[range]:
        """All members' chunks in the order of positions."""
        return sorted((chunk for shard in self.shards for chunk in shard), key=lambda chunk: chunk.start)

    @cached_property
    def parts(self) -> list[list[Part]]:
        """The parts for each of this rank's chunks, if one tensor holds all keys of the sequence up to the slice's end."""
        return [list(self.visible_parts(queries, (range(queries.start), queries))) for queries in self.held]

    def in_order(self, gathered: Tensor) -> Tensor:
        """Sort the blocks of all members by position: [cp · B, G, S, D] → [B, G, cp · S, D]."""
        held = {
            chunk.start: part
            for shard, block in zip(self.shards, gathered.chunk(len(self.shards)), strict=True)
            for chunk, part in zip(shard, block.chunk(len(shard), dim=-2), strict=True)
        }
        return torch.cat([held[chunk.start] for chunk in self.sequence], dim=-2)

    def by_member(self, share: Tensor) -> Tensor:
        """Sort a tensor of the slice by the members that hold its positions: [B, G, cp · S, D] → [cp · B, G, S, D]."""
        first = self.tokens.start
        return torch.cat(
            [
                torch.cat([share[..., chunk.start - first : chunk.stop - first, :] for chunk in shard], dim=-2)
                for shard in self.shards
            ]
        )

    def visible_parts(self, queries: range, runs: Sequence[range]) -> Iterator[Part]:
        """Yield the parts that these queries see. One tensor holds the runs of keys one after another, in ascending order."""
        offsets = list(accumulate(map(len, runs), initial=0))
        firsts = [self._first(queries, keys) if keys.stop <= queries.start else keys.stop for keys in runs]
        visible = [number for number, keys in enumerate(runs) if firsts[number] < keys.stop]
        keys, own = [], [queries] if queries in runs else []
        if visible:  # keys from the first visible one on, to the end of the last run that has one
            first, last = visible[0], visible[-1]
            keys = [range(firsts[first], runs[first].stop), *runs[first + 1 : last + 1]]
        if self.ranged and (keys or own) and any(self._hiding(queries, [*keys, *own])):
            yield from self._ranged_parts(queries, runs)
            return
        if keys:
            begin = offsets[first] + firsts[first] - runs[first].start
            yield Part(slice(begin, offsets[last + 1]), self.mask(queries, keys))
        if own:
            begin = offsets[runs.index(queries)]
            yield Part(slice(begin, begin + len(queries)), self.mask(queries, own))

    def _ranged_parts(self, queries: range, runs: Sequence[range]) -> Iterator[Part]:
        """Yield a part for each stretch of runs that lie side by side in the sequence, up to the queries themselves."""
        first, begin = int(self._first_BL[:, queries.start].min()), 0
        for keys in _joined(runs):
            seen = range(max(keys.start, first), min(keys.stop, queries.stop))
            if seen:
                start = begin + seen.start - keys.start
                yield Part(slice(start, start + len(seen)), self._key_ranges(queries, seen))
            begin += len(keys)

    def _key_ranges(self, queries: range, keys: range) -> KeyRanges:
        """Return which of these keys each query sees. All layers share the answer."""
        if (queries, keys) not in self._ranges:
            first_BS = self._first_BL[:, queries.start : queries.stop]
            stop_BS = np.broadcast_to(np.arange(queries.start + 1, queries.stop + 1), first_BS.shape)
            first_BS, stop_BS = ((x - keys.start).clip(0, len(keys)) for x in (first_BS, stop_BS))
            self._ranges[queries, keys] = KeyRanges(first_BS, stop_BS, len(keys), self.device)
        return self._ranges[queries, keys]

    def mask(self, queries: range, runs: Sequence[range]) -> Mask:
        """Return the mask: which keys of these runs each query sees. The last run may be that of the queries themselves."""
        causal = runs[-1].stop > queries.start
        windowed, several = self._hiding(queries, runs)
        if not windowed and not several:
            return ("causal" if runs[0] == queries else self._positions(queries, runs)) if causal else None
        seen_B1ST = self._positions(queries, runs) if windowed or causal else None
        if several:
            assert self.segment_BL is not None
            keys_BT = torch.cat([self.segment_BL[:, keys.start : keys.stop] for keys in runs], dim=1)
            same_B1ST = _same(self.segment_BL[:, queries.start : queries.stop], keys_BT)
            seen_B1ST = same_B1ST if seen_B1ST is None else same_B1ST & seen_B1ST
        return seen_B1ST

    def _hiding(self, queries: range, runs: Sequence[range]) -> tuple[bool, bool]:
        """Whether the window, and whether documents, hide earlier keys of these runs from some of the queries."""
        windowed = self.window.first is not None and int(self._begin_BL[:, queries[-1]].max()) > runs[0].start
        return windowed, not self._one_document([queries, *runs])

    @cached_property
    def query_runs(self) -> list[QueryRun]:
        """Runs of queries of a whole sequence that one rank holds.

        There is one run, unless the window hides most keys and the device takes bools. All layers share the masks.
        """
        if self.hides_ranges:
            ((part,),) = self.parts
            return [QueryRun(range(self.length), range(self.length), part.mask)]
        widest = max(query + 1 - begin for query, begin in enumerate(self._begin_L)) if self.window.first else self.length
        size = max(widest, _SHORTEST_RUN) if 2 * max(widest, _SHORTEST_RUN) < self.length else self.length
        runs = []
        for start in range(0, self.length, size):
            queries = range(start, min(start + size, self.length))
            keys = range(self._begin_L[start], queries.stop)
            before = [range(keys.start, start)] if keys.start < start else []
            runs.append(QueryRun(queries, keys, self.mask(queries, [*before, queries])))
        return runs

    def _positions(self, queries: range, runs: Sequence[range]) -> Tensor:
        """Return which keys are within the window and not later than the query: bool [B, 1, S, T], or [1, 1, S, T]."""
        key_T = torch.cat([torch.arange(keys.start, keys.stop, device=self.device) for keys in runs])
        begin_BS = to_device(self._begin_BL[:, queries.start : queries.stop].tolist(), self.device, torch.int64)
        query_S = torch.arange(queries.start, queries.stop, device=self.device)
        return ((key_T >= begin_BS.unsqueeze(2)) & (key_T <= query_S.unsqueeze(1))).unsqueeze(1)

    @cached_property
    def _begin_BL(self) -> np.ndarray:
        """For every query, the first key that its window has: int64 [B, L], or [1, L]. A window is that of a document alone."""
        return np.zeros((1, self.length), dtype=np.int64) if self.window.first is None else self._first_BL

    @cached_property
    def _first_BL(self) -> np.ndarray:
        """For every query, the first key that its window and its document have: int64 [B, L], or [1, L]."""
        begin_L = np.asarray(self.window.begins(self.length))
        if self.segment_BL is None or not len(self.segment_BL):
            return begin_L[None]
        start_BL = document_starts(self.segment_BL).numpy()
        pairs = zip(start_BL, self.segment_BL.numpy(), strict=True)
        if self.ranged and any(len(np.unique(start_L)) > len(np.unique(number_L)) for start_L, number_L in pairs):
            raise ValueError("a document number comes again behind another document; GPUs need a number for each document")
        return start_BL + begin_L[np.arange(self.length) - start_BL]

    @cached_property
    def _begin_L(self) -> list[int]:
        return self._begin_BL.min(axis=0).tolist()

    def _first(self, queries: range, keys: range) -> int:
        """Return the position of the first of these keys that a query sees; `keys.stop` if there is none."""
        first = min(max(keys.start, self._begin_L[queries.start]), keys.stop)
        if self.segment_BL is None or first == keys.stop:
            return first
        if (queries, keys) not in self._firsts:
            near = range(first, keys.stop)
            indices = (_first_shared(segment_L, queries, near) for segment_L in self.segment_BL)
            self._firsts[queries, keys] = first + min(indices, default=len(near))  # there may be no sequence
        return self._firsts[queries, keys]

    def _one_document(self, runs: Sequence[range]) -> bool:
        """Whether each sequence has one document number in all of these runs."""
        if self.segment_BL is None:
            return True
        numbers = [self._number(run) for run in runs]
        return numbers[0] is not None and all(number == numbers[0] for number in numbers)

    def _number(self, run: range) -> list[int] | None:
        """Return the document number of a run in each sequence; None if a sequence has several documents in the run."""
        assert self.segment_BL is not None
        if run not in self._numbers:
            low_B, high_B = self.segment_BL[:, run.start : run.stop].aminmax(dim=1)
            self._numbers[run] = low_B.tolist() if torch.equal(low_B, high_B) else None
        return self._numbers[run]


def _first_shared(segment_L: Tensor, queries: range, keys: range) -> int:
    """Return the index of the first of these keys that shares a document with a query; `len(keys)` if there is none."""
    shared_T = torch.isin(segment_L[keys.start : keys.stop], segment_L[queries.start : queries.stop].unique())
    return int(shared_T.int().argmax()) if bool(shared_T.any()) else len(keys)


def _joined(runs: Sequence[range]) -> list[range]:
    """Join runs that lie side by side."""
    joined: list[range] = []
    for run in runs:
        beside = joined and joined[-1].stop == run.start
        joined[-1:] = [range(joined[-1].start, run.stop)] if beside else [*joined[-1:], run]
    return joined


def _same(queries_BS: Tensor, keys_BT: Tensor) -> Tensor:
    return (queries_BS.unsqueeze(2) == keys_BT.unsqueeze(1)).unsqueeze(1)

"""Mixtures: which source gives each sample of a training, as a pure function of the sample's global index.

Source i has the share w_i of all samples. After N samples, it has given n_i(N) of them, with ⌊N·w_i⌋ ≤ n_i(N) ≤ ⌈N·w_i⌉ for
every N. So shares are within one sample of the weights at any moment. Sample j of source i may come in a window: not before
its share exceeds j − 1, and not after it reaches j. Whoever takes, of the samples whose window has begun, the one whose window
ends first, misses none (Baruah, Cohen, Plaxton, Varvel: *Proportionate progress*, Algorithmica 15, 1996; Liu and Layland,
*Scheduling algorithms for multiprogramming*, JACM 20, 1973). With whole-number weights, windows repeat after as many
samples as the sum of the weights. So a table has the answer for every index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field, TypeAdapter

from foldray.errors import UserError
from trainers.data.baselines import Baselines
from trainers.data.identity import digest
from trainers.data.order import NEWEST, SampleOrder
from trainers.data.packed import PackedData, Split
from trainers.folders import Checked, DamagedFile, Folder, read_json

FORMAT = 1
FILE = "mixture.json"
_LEAST = 4096  # samples in a table: ties are broken at random, so that sources and ranks do not go in step


class Shares:
    """Which source gives the sample at each global position, and how many samples it gave before.

    The seed decides between samples whose windows end together.
    """

    def __init__(self, weights: Sequence[int], seed: int):
        rounds = -(-_LEAST // sum(weights))
        self._sources = deal(weights, rounds, seed)
        self._totals = np.asarray(weights, np.int64) * rounds
        self._numbers = np.empty(len(self._sources), np.int64)
        for source, count in enumerate(self._totals):
            self._numbers[self._sources == source] = np.arange(count)

    def __call__(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources of positions [start, stop) and the samples that each has given before: both int64 [stop - start]."""
        table, within = np.divmod(np.arange(start, stop), len(self._sources))
        sources = self._sources[within]
        return sources, table * self._totals[sources] + self._numbers[within]


def deal(weights: Sequence[int], rounds: int, seed: int) -> np.ndarray:
    """Return the source of each of `rounds` · sum(weights) samples: int64. Every prefix keeps to the weights.

    The seed decides between samples whose windows end together.
    """
    total = sum(weights)
    numbers = [np.arange(weight * rounds, dtype=np.int64) for weight in weights]
    begins = np.concatenate([number * total // weight for number, weight in zip(numbers, weights, strict=True)])
    ends = np.concatenate([-(-(number + 1) * total // weight) for number, weight in zip(numbers, weights, strict=True)])
    sources = np.repeat(np.arange(len(weights)), [len(number) for number in numbers])
    ties = np.random.Philox([seed, len(begins)]).random_raw(len(begins))
    order = np.argsort(begins, kind="stable")
    waiting = zip(*(column[order].tolist() for column in (begins, ends, ties, sources)), strict=True)
    dealt, open_windows = np.empty(len(begins), np.int64), list[tuple[int, int, int]]()
    following = next(waiting, None)
    for position in range(len(dealt)):
        while following is not None and following[0] <= position:
            heappush(open_windows, following[1:])
            following = next(waiting, None)
        dealt[position] = heappop(open_windows)[2]
    return dealt


class MixedOrder:
    """The sequence at each global sample position of a mixture.

    A source whose sequences (`counts`) are used up begins a new epoch, in a new order. The other sources go on.
    """

    def __init__(self, seed: int, counts: Sequence[int], weights: Sequence[int], version: int = NEWEST):
        self._shares = Shares(weights, seed)
        self._orders = [SampleOrder(seed, count, source, version) for source, count in enumerate(counts)]
        self._first = np.cumsum([0, *counts])

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Return the sequences at positions [start, stop): int64 [stop - start], as indices of `MixedSplit`."""
        sources, numbers = self._shares(start, stop)
        indices = np.empty(len(sources), np.int64)
        for source in np.unique(sources):
            places = sources == source
            first, last = numbers[places][[0, -1]]  # the samples of a source come in order, and without gaps
            indices[places] = self._first[source] + self._orders[source](int(first), int(last) + 1)
        return indices


class MixedSplit:
    """The training sequences of all sources, those of the first source first. It has the methods of `Split`."""

    def __init__(self, splits: Sequence[Split], weights: Sequence[int]):
        self._splits, self._weights = list(splits), tuple(weights)
        self._first = np.cumsum([0, *map(len, splits)])
        self.seq_len = splits[0].seq_len

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def masked(self) -> bool:
        return any(split.masked for split in self._splits)

    def order(self, seed: int, version: int = NEWEST) -> MixedOrder:
        return MixedOrder(seed, [len(split) for split in self._splits], self._weights, version)

    def tokens(self, indices: ArrayLike) -> torch.Tensor:
        return self._gather(indices, Split.tokens)

    def trained(self, indices: ArrayLike) -> torch.Tensor:
        return self._gather(indices, Split.trained)

    def segments(self, indices: ArrayLike) -> torch.Tensor:
        return self._gather(indices, Split.segments)

    def _gather(self, indices: ArrayLike, read: Callable[[Split, ArrayLike], torch.Tensor]) -> torch.Tensor:
        places = np.asarray(indices, np.int64).reshape(-1)
        if len(places) and not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"sequence {places.min()}…{places.max()} of {len(self)}")
        sources = np.searchsorted(self._first, places, side="right") - 1
        rows = torch.cat([
            read(split, places[sources == source] - self._first[source]) for source, split in enumerate(self._splits)
        ])  # fmt: skip
        gathered = torch.empty_like(rows)
        gathered[torch.from_numpy(np.argsort(sources, kind="stable"))] = rows
        return gathered


class Mixture:
    """The packed data of several sources, and how much of each makes up a training.

    Attributes:
        folder: the folder of the mixture. Its name depends on the data and the weights of all sources, not on their names.
        parts: the data of each source, by its name.
        weights: whole numbers, one for each source.
        train: the training sequences of all sources.
    """

    def __init__(self, folder: Path, parts: dict[str, PackedData], weights: Sequence[int]):
        self.folder, self.parts, self.weights = folder, parts, tuple(weights)
        self.train = MixedSplit([part.train for part in parts.values()], self.weights)

    @property
    def content(self) -> str | None:
        """As `PackedData.content`, of all sources with their weights."""
        return self._content([part.content for part in self.parts.values()])

    def hashed(self) -> str:
        """As `PackedData.hashed`."""
        return str(self._content([part.hashed() for part in self.parts.values()]))

    def _content(self, parts: list[str | None]) -> str | None:
        return digest({"weights": self.weights, "parts": parts}) if all(parts) else None


def document(parts: Iterable[PackedData], weights: Sequence[int]) -> dict[str, Any]:
    """Return the content of a mixture's file."""
    return {
        "format": FORMAT,
        "parts": [{"data": part.folder.name, "weight": weight} for part, weight in zip(parts, weights, strict=True)],
    }


class _Part(Checked):
    data: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    weight: Annotated[int, Field(ge=1)]


class _Document(Checked):
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    parts: Annotated[list[_Part], Field(min_length=1)]


def opened(folder: str | Path, names: Sequence[str]) -> PackedData | Mixture:
    """Open packed data, or a mixture with the packed data of its sources, whose names these are, beside it."""
    folder = Path(folder)
    if not (folder / FILE).exists():
        return PackedData.open(folder)
    try:
        content = read_json(Folder(str(folder)), FILE, TypeAdapter(_Document))
    except DamagedFile as error:
        rule = f"holds a mixture whose {error}; delete it, and the next run writes it again"
        raise UserError("data.cache", folder, rule) from None
    parts = [PackedData.open(folder.parent / part.data) for part in content.parts]
    return Mixture(folder, dict(zip(names, parts, strict=True)), [part.weight for part in content.parts])


def is_whole(folder: Path, content: dict[str, Any]) -> bool:
    """Whether a folder holds a mixture with this content."""
    try:
        return json.loads((folder / FILE).read_text()) == content
    except (OSError, ValueError, RecursionError):
        return False


def baselines(data: PackedData | Mixture, sequences: int | None) -> tuple[Baselines | None, float | None]:
    """Return the byte models' bits per byte, and the mean bytes of a token, on the validation sequences that training measures.

    These are the first `sequences` of each source; None takes all. Each source has byte models of its own. Their bits and bytes
    are averaged by weight, as losses are. If a source has no byte models, both values are None.
    """
    lengths, bits = list[float](), list[tuple[float, float]]()
    for part in data.parts.values():
        split = part.validation
        count = min(len(split), sequences or len(split))
        if (models := part.baselines(count)) is None:
            return None, None
        length = split.bytes(count) / (count * split.seq_len)
        lengths.append(length)
        bits.append((models.unigram * length, models.bigram * length))
    mean_length = float(np.average(lengths, weights=data.weights))
    unigram, bigram = (float(np.average(column, weights=data.weights)) for column in zip(*bits, strict=True))
    return Baselines(unigram / mean_length, bigram / mean_length), mean_length


def counts_by_source(data: PackedData | Mixture) -> dict[str, Any]:
    """Return counts of the data of each source, for `run.json`."""
    keys = ("documents", "bytes", "tokens", "sequences")
    counts = dict[str, Any]()
    for name, part in data.parts.items():
        splits = {split: {key: part.meta[split][key] for key in keys} for split in ("train", "validation")}
        counts[name] = {**splits, "unfit": part.meta["unfit"]}
    return counts

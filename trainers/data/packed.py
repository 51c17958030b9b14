"""Packed sequences on disk, which are read by index, and the order in which training takes them.

A split is one stream of tokens. A separator precedes each document. Sequence i consists of the tokens [i·S, (i + 1)·S] of
the stream, both ends included (S = seq_len). The first S tokens are its inputs, and the last S tokens are its targets. So
neighbours share one token, and every token except the first one is a target exactly once. The tokens at the end that do not
fill a sequence are left out.

Of a split with masks, only some tokens count in the loss when they are targets. A byte beside each token says which.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field, TypeAdapter

from foldray.errors import UserError
from trainers.data.baselines import Baselines
from trainers.folders import Checked, Count, DamagedFile, Folder, read_json

FORMAT = 2
"""Version of the files on disk."""


class PackedData:
    """The packed data in a folder that `prepare` wrote.

    Attributes:
        folder: the folder.
        meta: counts, tokenizer and inputs, as in `meta.json`.
        train: sequences in the order of the files.
        validation: sequences in a fixed random order, so the first n are a sample of all files.
        parts: the data itself, as the only part (`mixture.Mixture`).
    """

    weights = (1,)

    def __init__(self, folder: Path, meta: dict[str, Any]):
        self.folder, self.meta = folder, meta
        self.train = Split(folder, "train", meta)
        self.validation = Split(folder, "validation", meta)
        masked = self.validation.masked
        self.parts = {"": self}
        self._bits = None if masked else _mapped(folder, "validation-bits", "f", (2, len(self.validation) + 1))

    @classmethod
    def open(cls, folder: str | Path) -> PackedData:
        """Map the folder's files into memory.

        Raises:
            UserError: the folder holds no packed data, or a file is missing or damaged.
        """
        if not is_intact(Path(folder)):
            raise UserError("data.cache", folder, "holds no complete packed data; prepare it again")
        try:
            return cls(Path(folder), json.loads((Path(folder) / "meta.json").read_text()))
        except (OSError, ValueError) as error:
            rule = f"holds packed data that cannot be read ({error}); delete it, and the next run prepares it again"
            raise UserError("data.cache", folder, rule) from None

    def baselines(self, sequences: int | None = None) -> Baselines | None:
        """Return the byte models' bits per byte on the targets of the first `sequences` validation sequences (None: all).

        Conversations have none, because byte models know nothing of the tokens between messages.
        """
        if self._bits is None:
            return None
        sequences = len(self.validation) if sequences is None else sequences
        unigram, bigram = self._bits[:, sequences] / self.validation.bytes(sequences)
        return Baselines(float(unigram), float(bigram))


class Split:
    """The sequences of one split, mapped into memory. `len()` returns their number.

    Args:
        folder: the packed data's folder.
        name: train or validation.
        meta: content of `meta.json`.
    """

    def __init__(self, folder: Path, name: str, meta: dict[str, Any]):
        self.seq_len: int = meta["seq_len"]
        self._count: int = meta[name]["sequences"]
        self._per_shard: int = meta[name]["shard_sequences"]
        self._shards = self._mapped_shards(folder, meta[name]["shards"])
        self._masks = self._mapped_shards(folder, meta[name].get("masks", []))
        if len(self._masks) not in (0, len(self._shards)):
            raise ValueError(f"{name} has {len(self._shards)} shards, but {len(self._masks)} masks")
        self._starts = _mapped(folder, f"{name}-starts", "i", (meta[name]["documents"],))
        self._bytes = _mapped(folder, f"{name}-bytes", "i", (self._count + 1,))
        self._order = _mapped(folder, f"{name}-order", "i", (self._count,)) if meta[name]["shuffled"] else None

    def __len__(self) -> int:
        return self._count

    @property
    def masked(self) -> bool:
        """Whether some tokens do not count in the loss."""
        return bool(self._masks)

    def order(self, seed: int) -> SampleOrder:
        """Return the order in which training takes the sequences."""
        return SampleOrder(seed, len(self))

    def tokens(self, indices: ArrayLike) -> torch.Tensor:
        """Return the tokens of n sequences: int64 [n, seq_len + 1]. The targets are the inputs, shifted by one."""
        return torch.from_numpy(self._read(self._shards, indices, np.dtype(np.int64)))

    def trained(self, indices: ArrayLike) -> torch.Tensor:
        """Return whether each target of n sequences counts in the loss: bool [n, seq_len]."""
        if not self.masked:
            return torch.ones((len(self._places(indices)), self.seq_len), dtype=torch.bool)
        return torch.from_numpy(self._read(self._masks, indices, np.dtype(bool))[:, 1:])

    def segments(self, indices: ArrayLike) -> torch.Tensor:
        """Return the document's number at each input position: int64 [n, seq_len]. The separator belongs to its document."""
        positions = self._places(indices)[:, None] * self.seq_len + np.arange(self.seq_len)
        return torch.from_numpy(np.searchsorted(self._starts, positions, side="right") - 1)

    def bytes(self, sequences: int | None = None) -> int:
        """Return the bytes of text in the targets of the first `sequences` sequences (None: all). A separator has none."""
        return int(self._bytes[self._count if sequences is None else sequences])

    def _read(self, shards: list[np.ndarray], indices: ArrayLike, dtype: np.dtype) -> np.ndarray:
        """Return what shards have of n sequences: [n, seq_len + 1]."""
        places = self._places(indices)
        out = np.empty((len(places), self.seq_len + 1), dtype)
        for row, place in enumerate(places):
            shard, within = divmod(int(place), self._per_shard)
            out[row] = shards[shard][within * self.seq_len : (within + 1) * self.seq_len + 1]
        return out

    def _mapped_shards(self, folder: Path, files: list[str]) -> list[np.ndarray]:
        shapes = ((self._in_shard(number) * self.seq_len + 1,) for number in range(len(files)))
        return [_mapped(folder, file.removesuffix(".npy"), "u", shape) for file, shape in zip(files, shapes, strict=True)]

    def _in_shard(self, number: int) -> int:
        return min(self._per_shard, self._count - number * self._per_shard)

    def _places(self, indices: ArrayLike) -> np.ndarray:
        places = np.asarray(indices, np.int64).reshape(-1)
        if len(places) and not 0 <= places.min() <= places.max() < self._count:
            raise IndexError(f"sequence {places.min()}…{places.max()} of {self._count}")
        return places if self._order is None else self._order[places]


class SampleOrder:
    """The order of sequences: which sequence is at each global sample position. Every epoch is a new permutation of all
    sequences.

    The sequence at a position depends only on (seed, position). A permutation sorts raw Philox numbers, because NumPy
    promises the same raw numbers in every version, but not the same shuffles.

    Args:
        seed: seed of the training.
        count: sequences in an epoch.
        source: number of the source in a mixture. Sources have orders of their own, also if they have equally many sequences.
    """

    def __init__(self, seed: int, count: int, source: int = 0):
        if count < 1:
            raise ValueError(f"count={count} sequences cannot be ordered")
        self._seed, self._count, self._source = seed, count, source
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Return the sequence indices at global sample positions [start, stop): int64 [stop - start]."""
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            epoch, within = divmod(start, self._count)
            pieces.append(self._of_epoch(epoch)[within : within + stop - start])
            start += len(pieces[-1])
        return np.concatenate(pieces)

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            keys = np.random.Philox([self._seed, epoch, self._source]).random_raw(self._count)
            self._epoch, self._permutation = epoch, np.argsort(keys, kind="stable")
        return self._permutation


def sample_order(seed: int, count: int, start: int, stop: int) -> np.ndarray:
    """Return `SampleOrder(seed, count)(start, stop)`, for a single use."""
    return SampleOrder(seed, count)(start, stop)


class Sequences(Protocol):
    """Sequences that training takes: those of a split, or of several (`mixture.MixedSplit`). They have the methods of `Split`."""

    def __len__(self) -> int: ...

    @property
    def masked(self) -> bool: ...

    def order(self, seed: int) -> Callable[[int, int], np.ndarray]: ...

    def tokens(self, indices: ArrayLike) -> torch.Tensor: ...

    def trained(self, indices: ArrayLike) -> torch.Tensor: ...

    def segments(self, indices: ArrayLike) -> torch.Tensor: ...


class Batches:
    """The sequences that each data-parallel place trains on, in the seeded order.

    Args:
        split: usually `PackedData.train`.
        seed: seed of the order.
    """

    def __init__(self, split: Sequences, seed: int):
        self._order = split.order(seed)

    def indices(
        self, step: int, accumulation_index: int, dp_rank: int, dp: int, micro_batch: int, global_batch: int
    ) -> np.ndarray:
        """Return the sequences of one micro-batch: int64 [micro_batch]. Steps count from 0.

        Their positions in the order are step·B + (m·dp + r)·b + [0, b), with global batch B, micro-batch size b, micro-batch
        m of the step, and data-parallel place r. If the places do not share B evenly, the last micro-batch has fewer
        sequences on some places, or none.
        """
        first = (accumulation_index * dp + dp_rank) * micro_batch
        start, stop = (step * global_batch + min(each, global_batch) for each in (first, first + micro_batch))
        return self._order(start, stop)


class _SplitMeta(Checked):
    documents: Count
    sequences: Annotated[int, Field(ge=1)]
    shard_sequences: Annotated[int, Field(ge=1)]
    shards: list[Annotated[str, Field(pattern=r"^[\w-]+\.npy$")]]
    masks: Annotated[list[Annotated[str, Field(pattern=r"^[\w-]+\.npy$")]], Field(default_factory=list)]
    shuffled: bool


class _File(Checked):
    file: str
    documents: Count
    bytes: Count
    at: str


class _Unfit(Checked):
    rule: str
    documents: Count
    bytes: Count
    files: Count
    first: list[_File]


class _Meta(Checked):
    """The keys of `meta.json` that `is_intact` needs."""

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    seq_len: Annotated[int, Field(ge=1)]
    sizes: dict[Annotated[str, Field(pattern=r"^[\w-]+\.(npy|json)$")], Count]
    train: _SplitMeta
    validation: _SplitMeta
    unfit: _Unfit


def is_intact(folder: Path) -> bool:
    """Whether the folder holds packed data of this format, with every file at its full size."""
    files = Folder(str(folder))
    try:
        meta = read_json(files, "meta.json", TypeAdapter(_Meta))
        return all(files.size(name) == size for name, size in meta.sizes.items())
    except (DamagedFile, OSError):
        return False


def _mapped(folder: Path, name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Map the array in a file into memory."""
    try:
        array = np.load(folder / f"{name}.npy", mmap_mode="r")
    except ValueError:  # NumPy's own message is long, and advises to unpickle the file
        raise ValueError(f"{name}.npy holds no array") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind != kind or array.shape != shape:
        raise ValueError(f"{name}.npy holds another array than it should")
    return array

"""Packed sequences on disk, which are read by index.

A split is one stream of tokens. A separator precedes each document. Sequence i consists of the tokens [i·S, (i + 1)·S] of
the stream, both ends included (S = seq_len). The first S tokens are its inputs, and the last S tokens are its targets. So
neighbours share one token, and every token except the first one is a target exactly once. The tokens at the end that do not
fill a sequence are left out.

Of a split with masks, only some tokens count in the loss when they are targets. A byte beside each token says which.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field, TypeAdapter

from foldray.errors import UserError
from trainers.data.baselines import Baselines
from trainers.data.identity import Chain, digest
from trainers.data.order import NEWEST, SampleOrder
from trainers.data.shards import file_of
from trainers.folders import Checked, Count, DamagedFile, Folder, read_json

FORMAT = 2
"""Version of the files on disk."""
_MOST_OPEN = 1024  # files of a split that are mapped into memory; a process may have some 65 000 maps


class PackedData:
    """The packed data in a folder that `prepare` wrote.

    Attributes:
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
        self.parts = {"": self}
        self._bits = None if self.validation.masked else _mapped(folder, "validation-bits", "f", (2, len(self.validation) + 1))

    @classmethod
    def open(cls, folder: str | Path) -> PackedData:
        """Map the folder's files into memory."""
        path = Path(folder)
        if not is_intact(path):
            raise UserError("data.cache", folder, "holds no complete packed data; prepare it again")
        try:
            return cls(path, json.loads((path / "meta.json").read_text()))
        except (OSError, ValueError) as error:
            rule = f"holds packed data that cannot be read ({error}); delete it, and the next run prepares it again"
            raise UserError("data.cache", folder, rule) from None

    @property
    def content(self) -> str | None:
        """What tells these sequences from others, wherever they come from. None if an earlier version prepared them."""
        return self._content([self.meta[split.name].get("content") for split in (self.train, self.validation)])

    def hashed(self) -> str:
        """Return `content`. What an earlier version prepared is read whole for it."""
        return self.content or str(self._content([split.hashed() for split in (self.train, self.validation)]))

    def _content(self, splits: list[str | None]) -> str | None:
        return digest({"seq_len": self.meta["seq_len"], "splits": splits}) if all(splits) else None

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
    """The sequences of one split. `len()` returns their number."""

    def __init__(self, folder: Path, name: str, meta: dict[str, Any]):
        self.name = name
        self.seq_len: int = meta["seq_len"]
        counts = meta[name]
        self._count: int = counts["sequences"]
        self.masked: bool = counts["masked"]
        index = _mapped(folder, f"{name}-index", "i", (2, counts["works"]))
        token_ends, document_ends = (np.cumsum([0, *row]) for row in np.asarray(index))
        if token_ends[-1] != counts["tokens"] or document_ends[-1] != counts["documents"] or index.min(initial=0) < 0:
            raise ValueError(f"{name}-index.npy has other counts than meta.json")
        self._works = _Works(folder, name, token_ends, document_ends, np.dtype(meta["dtype"]))
        self._order = _mapped(folder, f"{name}-order", "i", (self._count,)) if counts["shuffled"] else None
        has_bytes = counts["shuffled"] and not self.masked
        self._bytes = _mapped(folder, f"{name}-bytes", "i", (self._count + 1,)) if has_bytes else None

    def __len__(self) -> int:
        return self._count

    def order(self, seed: int, version: int = NEWEST) -> SampleOrder:
        """Return the order in which training takes the sequences."""
        return SampleOrder(seed, len(self), version=version)

    def tokens(self, indices: ArrayLike) -> torch.Tensor:
        """Return the tokens of n sequences: int64 [n, seq_len + 1]. The targets are the inputs, shifted by one."""
        read = partial(self._works.values, "tokens")
        return torch.from_numpy(self._read(indices, read, self.seq_len + 1).astype(np.int64))

    def trained(self, indices: ArrayLike) -> torch.Tensor:
        """Return whether each target of n sequences counts in the loss: bool [n, seq_len]."""
        if not self.masked:
            return torch.ones((len(self._places(indices)), self.seq_len), dtype=torch.bool)
        read = partial(self._works.values, "trained")
        return torch.from_numpy(self._read(indices, read, self.seq_len + 1)[:, 1:].astype(bool))

    def segments(self, indices: ArrayLike) -> torch.Tensor:
        """Return the document's number at each input position: int64 [n, seq_len]. The separator belongs to its document."""
        return torch.from_numpy(self._read(indices, self._works.documents, self.seq_len).astype(np.int64))

    def bytes(self, sequences: int | None = None) -> int:
        """Return the bytes of text in the targets of the first `sequences` sequences (None: all). A separator has none.

        Only validation text has these counts.
        """
        assert self._bytes is not None
        return int(self._bytes[self._count if sequences is None else sequences])

    def hashed(self) -> str:
        """Return the hash of all documents, as preparation makes it (`identity.Chain`)."""
        return str(self._works.chain(self.masked))

    def _read(self, indices: ArrayLike, read: Callable[[int, int], np.ndarray], length: int) -> np.ndarray:
        """Return what the works have of n sequences: [n, length]."""
        rows = [read(start, start + length) for start in (self._places(indices) * self.seq_len).tolist()]
        return np.stack(rows) if rows else np.zeros((0, length))

    def _places(self, indices: ArrayLike) -> np.ndarray:
        places = np.asarray(indices, np.int64).reshape(-1)
        if len(places) and not 0 <= places.min() <= places.max() < self._count:
            raise IndexError(f"sequence {places.min()}…{places.max()} of {self._count}")
        return places if self._order is None else self._order[places]


class _Works:
    """The files of a split's works, read as one stream. Few of them are mapped into memory at a time.

    Args:
        token_ends: tokens before each work and before the end, int64 [works + 1].
        document_ends: the same for documents.
    """

    def __init__(self, folder: Path, name: str, token_ends: np.ndarray, document_ends: np.ndarray, dtype: np.dtype):
        self._folder, self._name, self._tokens, self._documents = folder, name, token_ends, document_ends
        self._dtypes = {"tokens": dtype, "starts": np.dtype(np.int64), "trained": np.dtype(np.uint8)}
        self._open: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()

    def values(self, ending: str, start: int, stop: int) -> np.ndarray:
        """Return the tokens at positions [start, stop) of the stream, or whether they count (`trained`)."""
        return np.concatenate([self._of(ending, work)[first:last] for work, first, last in self._inside(start, stop)])

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers of the documents at positions [start, stop)."""
        return np.concatenate([
            self._documents[work] + np.searchsorted(self._of("starts", work), np.arange(first, last), side="right") - 1
            for work, first, last in self._inside(start, stop)
        ])  # fmt: skip

    def chain(self, masked: bool) -> Chain:
        """Return the hash of all documents."""
        documents = Chain()
        for work in range(len(self._tokens) - 1):
            trained = self._of("trained", work) if masked else None
            documents.add_documents(self._of("tokens", work), self._of("starts", work), trained)
        return documents

    def _inside(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the works that have positions [start, stop), with the positions inside each."""
        work = int(np.searchsorted(self._tokens, start, side="right")) - 1
        while start < stop:
            begin, end = int(self._tokens[work]), int(self._tokens[work + 1])
            if end > start:
                yield work, start - begin, min(stop, end) - begin
            start, work = max(start, min(stop, end)), work + 1

    def _of(self, ending: str, work: int) -> np.ndarray:
        key = ending, work
        if key not in self._open:
            count = np.diff((self._documents if ending == "starts" else self._tokens)[work : work + 2])
            path = file_of(self._folder, self._name, work, ending)
            self._open[key] = np.memmap(path, self._dtypes[ending], mode="r", shape=(int(count[0]),))
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]


class Sequences(Protocol):
    """Sequences that training takes: those of a split, or of several (`mixture.MixedSplit`). They have the methods of `Split`."""

    def __len__(self) -> int: ...

    @property
    def masked(self) -> bool: ...

    def order(self, seed: int, version: int = ...) -> Callable[[int, int], np.ndarray]: ...

    def tokens(self, indices: ArrayLike) -> torch.Tensor: ...

    def trained(self, indices: ArrayLike) -> torch.Tensor: ...

    def segments(self, indices: ArrayLike) -> torch.Tensor: ...


class Batches:
    """The sequences that each data-parallel place trains on, in the seeded order of a version (`order.py`)."""

    def __init__(self, split: Sequences, seed: int, version: int = NEWEST):
        self.version, self._order = version, split.order(seed, version)

    def indices(
        self, step: int, accumulation_index: int, dp_rank: int, dp: int, micro_batch: int, global_batch: int
    ) -> np.ndarray:
        """Return the sequences of one micro-batch: int64 [micro_batch]. Steps count from 0.

        Their positions in the order are step·B + (m·dp + r)·b + [0, b), with global batch B, micro-batch size b, micro-batch
        m of the step, and data-parallel place r. If the places do not share B evenly, the last micro-batch has fewer
        sequences on some places, or none.
        """
        places = places_in_step(accumulation_index, dp_rank, dp, micro_batch, global_batch)
        return self._order(step * global_batch + places.start, step * global_batch + places.stop)


def places_in_step(accumulation_index: int, dp_rank: int, dp: int, micro_batch: int, global_batch: int) -> range:
    """Return the places of a micro-batch's sequences in the global batch of its step."""
    first = (accumulation_index * dp + dp_rank) * micro_batch
    return range(min(first, global_batch), min(first + micro_batch, global_batch))


class _SplitMeta(Checked):
    documents: Count
    tokens: Count
    sequences: Annotated[int, Field(ge=1)]
    works: Annotated[int, Field(ge=1)]
    masked: bool
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
    dtype: Literal["uint16", "uint32"]
    sizes: dict[Annotated[str, Field(pattern=r"^[\w-]+\.(npy|json)$")], Count]
    train: _SplitMeta
    validation: _SplitMeta
    unfit: _Unfit


def is_intact(folder: Path) -> bool:
    """Whether the folder holds packed data of this format, with every file at its full size."""
    files = Folder(str(folder))
    try:
        meta = read_json(files, "meta.json", TypeAdapter(_Meta))
        whole = all(files.size(name) == size for name, size in meta.sizes.items())
        splits = {"train": meta.train, "validation": meta.validation}
        return whole and all(_has_works(files, folder, name, split, meta.dtype) for name, split in splits.items())
    except (DamagedFile, OSError, ValueError):
        return False


def _has_works(files: Folder, folder: Path, name: str, split: _SplitMeta, dtype: str) -> bool:
    """Whether all files of a split's works have their full sizes."""
    index = _mapped(folder, f"{name}-index", "i", (2, split.works))
    endings = {"tokens": np.dtype(dtype).itemsize, **({"trained": 1} if split.masked else {})}
    for work, (tokens, documents) in enumerate(index.T.tolist()):
        expected = {ending: tokens * size for ending, size in endings.items()} | {"starts": documents * 8}
        if any(files.size(file_of(folder, name, work, ending).name) != size for ending, size in expected.items()):
            return False
    return True


def _mapped(folder: Path, name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Map the array in a file into memory."""
    try:
        array = np.load(folder / f"{name}.npy", mmap_mode="r")
    except ValueError:  # NumPy's own message is long, and advises to unpickle the file
        raise ValueError(f"{name}.npy holds no array") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind != kind or array.shape != shape:
        raise ValueError(f"{name}.npy holds another array than it should")
    return array

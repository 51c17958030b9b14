"""Files of packed data. A task writes those of its own work; the driver gathers counts, and writes one index.

The files of work 7 of a split are, in NumPy's raw form:

| file | holds |
|---|---|
| `train-000007.tokens` | the tokens, uint16 or uint32 |
| `train-000007.starts` | the positions of documents in these tokens, int64 |
| `train-000007.trained` | with masks: whether each token counts as a target, uint8 |
| `train-000007.lengths`, `.pairs` | of validation text, until they are summed: bytes per token, and byte pairs, uint32 |
| `train-000007.counts` | of training text, until they are summed: how often each byte pair occurs, int64 |
| `train-000007.done` | written last: what the driver gathers, as JSON |

The tokens of all works, one after another, are the split's stream. So the sequences do not depend on how works are dealt.
"""

from __future__ import annotations

import os
import platform
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from trainers.data.baselines import PAIRS, count_pairs
from trainers.data.identity import LINK, Chain
from trainers.data.order import SampleOrder
from trainers.data.unfit import Found
from trainers.folders import Checked, Count, DamagedFile, Folder, read_json

_PASSING = {"lengths": np.dtype(np.uint32), "pairs": np.dtype(np.uint32)}
_UNIT = 2.0**-30  # of bits: whole numbers have the same sum in every order
_BYTES = 1 << 20  # whose costs are summed at once


@dataclass(frozen=True)
class Piece:
    """Consecutive documents of a work: N tokens of D documents with T bytes of text. A separator precedes each document.

    Conversations have no separators, lengths or pairs, but a mask (`conversations.encode`).

    Args:
        tokens: ids, uint16 or uint32 [N].
        lengths: bytes of text that each token stands for, uint32 [N]; 0 for a separator.
        starts: positions of the documents' first tokens, int64 [D].
        pairs: the byte pairs in order, uint32 [T]; None for conversations.
        trained: whether each token counts in the loss when it is a target, uint8 [N]; None if all count.
        counts: further numbers for `meta.json`, which are summed over works.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    pairs: np.ndarray | None
    trained: np.ndarray | None = None
    counts: dict[str, int] | None = None


class Written(Checked):
    """What a work has written.

    Args:
        counts: sums of the pieces' counts.
        unfit: documents that cannot be used as they are (`unfit.Unfit`).
        content: hash of its documents (`identity.Chain`).
        sizes: sizes of the files that stay or are read once more, by the ending of their names.
    """

    tokens: Count
    documents: Count
    bytes: Count
    counts: dict[str, Count]
    unfit: dict[str, tuple[Count, Count, str]]
    content: Annotated[str, Field(pattern=LINK)]
    sizes: dict[Annotated[str, Field(pattern=r"^[a-z]+$")], Count]
    node: str
    mark: str


def file_of(folder: Path, split: str, work: int, ending: str) -> Path:
    """Return the path of a file of a work."""
    return folder / f"{split}-{work:06d}.{ending}"


def write(folder: Path, split: str, work: int, pieces: Iterable[Piece], unfit: Found, mark: str = "") -> Written:
    """Write the files of a work, and return what the driver gathers. Reading the pieces fills `unfit`."""
    tokens, documents, bytes_, has_pairs = 0, 0, 0, False
    counts, pair_counts, content, sizes = Counter[str](), np.zeros(PAIRS, np.int64), Chain(), dict[str, int]()
    with _appending(folder, split, work, sizes) as append:
        for piece in pieces:
            append("tokens", piece.tokens)
            append("starts", piece.starts + tokens)
            if piece.trained is not None:
                append("trained", piece.trained)
            content.add_documents(piece.tokens, piece.starts, piece.trained)
            has_pairs |= piece.pairs is not None
            if piece.pairs is not None and split == "validation":
                append("lengths", piece.lengths)
                append("pairs", piece.pairs)
            elif piece.pairs is not None:
                pair_counts += count_pairs(piece.pairs)
            tokens, documents = tokens + len(piece.tokens), documents + len(piece.starts)
            bytes_ += int(piece.lengths.sum(dtype=np.int64))
            counts.update(piece.counts or {})
        if has_pairs and split == "train":
            append("counts", pair_counts)
    done = Written(
        tokens=tokens, documents=documents, bytes=bytes_, counts=counts, unfit=unfit, content=str(content), sizes=sizes,
        node=platform.node(), mark=mark,
    )  # fmt: skip
    with _appending(folder, split, work, {}) as append:
        append("done", np.frombuffer(done.model_dump_json().encode(), np.uint8))
    return done


def written(folder: Path, split: str, work: int, mark: str) -> Written | None:
    """Return what a work has written earlier; None if it is not there, not whole, or of another work."""
    try:
        done = read_json(Folder(str(folder)), file_of(folder, split, work, "done").name, TypeAdapter(Written))
    except (DamagedFile, OSError):
        return None
    return done if done.mark == mark and is_seen(folder, split, work, done) else None


def is_seen(folder: Path, split: str, work: int, done: Written) -> bool:
    """Whether this machine sees all files of a work, at their full sizes."""
    try:
        return all(file_of(folder, split, work, ending).stat().st_size == size for ending, size in done.sizes.items())
    except OSError:
        return False


@contextmanager
def _appending(folder: Path, split: str, work: int, sizes: dict[str, int]) -> Iterator[Callable[[str, np.ndarray], None]]:
    """Yield a function that appends values to the file of a work with an ending.

    The files appear at the end, and `sizes` gets their sizes. Other processes may write the same files meanwhile.
    """
    files, mark = dict[str, IO[bytes]](), uuid.uuid4().hex[:8]
    with ExitStack() as stack:

        def append(ending: str, values: np.ndarray) -> None:
            if ending not in files:
                draft = folder / f".{split}-{work:06d}.{ending}.{mark}"
                stack.callback(draft.unlink, missing_ok=True)
                files[ending] = stack.enter_context(draft.open("wb"))
            files[ending].write(np.ascontiguousarray(values).data)

        yield append
        for ending, file in files.items():
            file.close()
            sizes[ending] = os.stat(file.name).st_size
            os.replace(file.name, file_of(folder, split, work, ending))


@dataclass(frozen=True)
class Costs:
    """What the bytes of some sequences cost: those from `first` on.

    Args:
        bytes: bytes in the targets of each, int64 [n].
        units: cost under both byte models, in units of 2⁻³⁰ bits, int64 [2, n].
    """

    first: int
    bytes: np.ndarray
    units: np.ndarray


def costs(folder: Path, work: int, offset: int, seq_len: int, table: np.ndarray) -> Costs:
    """Return what the text of a work of validation costs, by sequence.

    Token p of the stream is a target of sequence (p − 1) // S. Token 0 is a separator, which has no bytes.

    Args:
        offset: position of the work's first token in the stream.
        seq_len: S, number of targets of a sequence.
        table: bits that each pair costs, float64 [2, PAIRS] (`baselines.fit`).
    """
    lengths, pairs = (read(file_of(folder, "validation", work, name), dtype) for name, dtype in _PASSING.items())
    begin, end = max(offset, 1), offset + len(lengths)
    if begin >= end:
        return Costs(0, np.zeros(0, np.int64), np.zeros((2, 0), np.int64))
    first = (begin - 1) // seq_len
    begins = np.asarray([begin, *range((first + 1) * seq_len + 1, end, seq_len)]) - offset
    bytes_ = np.add.reduceat(lengths, begins, dtype=np.int64)
    whole, ends = np.round(table / _UNIT).astype(np.int64), np.cumsum(bytes_)
    sums, running = np.zeros((2, len(ends)), np.int64), np.zeros((2, 1), np.int64)
    for start in range(0, len(pairs), _BYTES):
        cost = running + np.cumsum(whole[:, pairs[start : start + _BYTES]], axis=1)
        inside = np.flatnonzero((ends > start) & (ends <= start + cost.shape[1]))
        sums[:, inside], running = cost[:, ends[inside] - start - 1], cost[:, -1:]
    return Costs(first, bytes_, np.diff(sums, axis=1, prepend=0))


def read(path: Path, dtype: np.dtype) -> np.ndarray:
    """Map a file into memory. An empty file, or none, is an empty array."""
    if not path.exists() or not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


def passing(folder: Path) -> Iterator[Path]:
    """Yield the files that only preparation needs."""
    for ending in (*_PASSING, "counts", "done"):
        yield from folder.glob(f"*.{ending}")
    yield from folder.glob(".*")  # of tasks that were killed


class Index:
    """What the driver gathers of a split: counts of its works, in order."""

    def __init__(self, seq_len: int):
        self.seq_len = seq_len
        self._tokens, self._documents = array("q"), array("q")
        self.tokens = self._bytes = 0
        self._counts: Counter[str] = Counter()
        self._content = Chain()
        self._costs: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, work: Written) -> None:
        """Add the next work."""
        self._tokens.append(work.tokens)
        self._documents.append(work.documents)
        self.tokens, self._bytes = self.tokens + work.tokens, self._bytes + work.bytes
        self._counts.update(work.counts)
        self._content.extend(Chain.parse(work.content))

    @property
    def sequences(self) -> int:
        """Number of sequences that the tokens fill."""
        return max(self.tokens - 1, 0) // self.seq_len

    @property
    def offsets(self) -> list[int]:
        """The position of each work's first token in the stream."""
        return [*accumulate(self._tokens, initial=0)][:-1]

    def add_costs(self, works: Iterable[Costs]) -> None:
        """Take what the text of all works costs. The works of a sequence that is in several are summed."""
        bytes_, units = np.zeros(self.sequences + 1, np.int64), np.zeros((2, self.sequences + 1), np.int64)
        for work in works:  # what fills no sequence is behind the last one
            place = slice(work.first, work.first + len(work.bytes))
            bytes_[place] += work.bytes
            units[:, place] += work.units
        self._costs = bytes_[:-1], units[:, :-1]

    def finish(self, folder: Path, split: str, masked: bool) -> dict[str, Any]:
        """Write the index, and return the counts for `meta.json`. The validation sequences get a fixed random order."""
        np.save(folder / f"{split}-index.npy", np.asarray([self._tokens, self._documents], np.int64))
        if shuffled := split == "validation":
            order = SampleOrder(0, self.sequences, version=1)(0, self.sequences)  # as in all folders so far
            np.save(folder / f"{split}-order.npy", order)
            if self._costs is not None:
                bytes_, units = self._costs
                np.save(folder / f"{split}-bytes.npy", _sums(bytes_[order]))
                np.save(folder / f"{split}-bits.npy", _sums(units[:, order] * _UNIT))
        return {
            "documents": sum(self._documents),
            "bytes": self._bytes,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "works": len(self._tokens),
            "masked": masked,
            "shuffled": shuffled,
            "counts": dict(self._counts),
            "content": str(self._content),
        }


def _sums(values: np.ndarray) -> np.ndarray:
    """Return the sums of the first 0, 1, … n values: [… , n + 1]."""
    return np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)

"""The workers' share of data preparation: parts of files become tokens, lengths and byte pairs."""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray.data
from ray.data import DataContext

from foldray.errors import UserError
from trainers.data.baselines import byte_pairs
from trainers.data.rows import Part, read_documents
from trainers.data.shards import Piece
from trainers.data.tokenizers import Tokenizer
from trainers.data.unfit import Unfit


@dataclass(frozen=True)
class Work:
    """Consecutive parts of one split. One task encodes them, and writes their files."""

    parts: list[Part]
    validation: bool

    @property
    def split(self) -> str:
        return "validation" if self.validation else "train"

    @property
    def files(self) -> int:
        """Number of files whose last part is in this work."""
        return sum(part.last for part in self.parts)

    @property
    def mark(self) -> str:
        """A hash of what is in the work."""
        spans = [(part.file.path, part.file.name, part.start, part.stop) for part in self.parts]
        return hashlib.sha256(repr(spans).encode()).hexdigest()[:16]


_PIECE = 4 << 20  # characters of text that are encoded before they are written


def deal(parts: Iterable[Part], validation: bool, least: int = 1 << 20, most: int = 32 << 20) -> list[Work]:
    """Group parts into works of about 1/256 of the text, of `least` to `most` bytes. The works depend only on the parts."""
    parts = list(parts)
    target = min(max(sum(part.size for part in parts) // 256, least), most)
    works, group, size = [], [], 0
    for part in parts:
        group.append(part)
        size += part.size
        if size >= target:
            works.append(Work(group, validation))
            group, size = [], 0
    return works + ([Work(group, validation)] if group else [])


def encode(work: Work, unfit: Unfit, tokenizer: Tokenizer, text_field: str) -> Iterator[Piece]:
    """Read and tokenize the documents of a work, and yield them piece by piece.

    A document without tokens is left out, also from the byte pairs.

    Args:
        unfit: takes the documents that cannot be used.

    Raises:
        UserError: as `read_documents`.
    """
    found, size = list[tuple[np.ndarray, np.ndarray, bytes]](), 0
    for part in work.parts:
        for text in read_documents(part, text_field, unfit):
            ids, id_bytes = tokenizer.measure(text)
            if len(ids):
                found.append((ids, id_bytes, text.encode()))
                size += len(text)
            if size >= _PIECE:
                yield _piece(found, tokenizer)
                found, size = [], 0
    yield _piece(found, tokenizer)


def _piece(found: list[tuple[np.ndarray, np.ndarray, bytes]], tokenizer: Tokenizer) -> Piece:
    dtype = token_dtype(tokenizer.vocab_size)
    separator, no_bytes = np.asarray([tokenizer.separator], dtype), np.zeros(1, np.uint32)
    tokens, lengths, sizes = [np.zeros(0, dtype)], [np.zeros(0, np.uint32)], [0]
    for ids, id_bytes, _ in found:
        tokens += [separator, ids.astype(dtype)]
        lengths += [no_bytes, id_bytes]
        sizes.append(len(ids) + 1)
    pairs = byte_pairs([text for *_, text in found])
    return Piece(np.concatenate(tokens), np.concatenate(lengths), np.cumsum(sizes)[:-1], pairs)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds all ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def run_all(calls: list[Any], task: Callable[[Any], Any]) -> Generator[Any, None, None]:
    """Call a function with each of some values, in parallel with Ray Data, and yield the results in the order of the values.

    Args:
        calls: the values. Each is pickled and sent to a worker.
        task: the function. It is pickled as well.

    Raises:
        UserError: a worker raised it; the first such error in the order of the values. The error travels as a result, so Ray
            does not wrap it into an error of its own.
    """
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    rows = [{"call": pickle.dumps(call)} for call in calls]
    with quiet_console(), DataContext.current(context):
        # With one block per value, Ray Data runs one task per value for any number of CPUs.
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(_Call(task))
        for row in dataset.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, UserError):
                raise result
            yield result


@dataclass(frozen=True)
class _Call:
    task: Callable[[Any], Any]

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        try:
            result = self.task(pickle.loads(row["call"]))
        except UserError as error:
            result = error
        return {"result": pickle.dumps(result)}


@contextmanager
def quiet_console() -> Iterator[None]:
    """Keep Ray Data's progress messages off the terminal. Its log file still gets them."""
    consoles = [handler for handler in logging.getLogger("ray.data").handlers if isinstance(handler, logging.StreamHandler)]
    levels = [handler.level for handler in consoles]
    for handler in consoles:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in zip(consoles, levels, strict=True):
            handler.setLevel(level)

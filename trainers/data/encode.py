"""The workers' share of data preparation: parts of files become tokens, lengths and byte pairs."""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import ray.data
from ray.data import DataContext

from foldray.errors import UserError
from trainers.data.baselines import byte_pairs
from trainers.data.rows import Part, read_documents
from trainers.data.shards import Piece
from trainers.data.tokenizers import Tokenizer
from trainers.data.unfit import Unfit

_PIECE = 4 << 20  # characters of text that are encoded before they are written
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Work:
    """Consecutive parts of one split. One task encodes them, and writes their files."""

    parts: list[Part]
    split: str

    @property
    def files(self) -> int:
        """Number of files whose last part is in this work."""
        return sum(part.last for part in self.parts)

    @property
    def mark(self) -> str:
        """A hash of what is in the work."""
        spans = [(part.file.path, part.file.name, part.start, part.stop) for part in self.parts]
        return hashlib.sha256(repr(spans).encode()).hexdigest()[:16]


def deal(parts: Iterable[Part], split: str, least: int = 1 << 20, most: int = 32 << 20) -> list[Work]:
    """Group parts into works of about 1/256 of the text, of `least` to `most` bytes. The works depend only on the parts."""
    parts = list(parts)
    target = min(max(sum(part.size for part in parts) // 256, least), most)
    return [Work(group, split) for group in grouped(parts, lambda part: part.size, target)]


def grouped(items: Iterable[_Item], size: Callable[[_Item], int], least: int) -> Iterator[list[_Item]]:
    """Yield consecutive items in groups. The sizes of a group sum to at least `least`, except for the last group."""
    group, total = list[_Item](), 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= least:
            yield group
            group, total = [], 0
    if group:
        yield group


def encode(work: Work, unfit: Unfit, tokenizer: Tokenizer, text_field: str) -> Iterator[Piece]:
    """Read and tokenize the documents of a work, and yield them piece by piece.

    A document without tokens is left out, also from the byte pairs.
    """
    documents, size = list[tuple[np.ndarray, np.ndarray, bytes]](), 0
    for part in work.parts:
        for text in read_documents(part, text_field, unfit):
            ids, id_bytes = tokenizer.measure(text)
            if len(ids):
                documents.append((ids, id_bytes, text.encode()))
                size += len(text)
            if size >= _PIECE:
                yield _piece(documents, tokenizer)
                documents, size = [], 0
    yield _piece(documents, tokenizer)  # it may be empty: every work has files


def _piece(documents: list[tuple[np.ndarray, np.ndarray, bytes]], tokenizer: Tokenizer) -> Piece:
    dtype = token_dtype(tokenizer.vocab_size)
    separator, no_bytes = np.asarray([tokenizer.separator], dtype), np.zeros(1, np.uint32)
    tokens, lengths, sizes = [np.zeros(0, dtype)], [np.zeros(0, np.uint32)], [0]
    for ids, id_bytes, _ in documents:
        tokens += [separator, ids.astype(dtype)]
        lengths += [no_bytes, id_bytes]
        sizes.append(len(ids) + 1)
    pairs = byte_pairs([text for *_, text in documents])
    return Piece(np.concatenate(tokens), np.concatenate(lengths), np.cumsum(sizes)[:-1], pairs)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds all ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def run_all(calls: list[Any], task: Callable[[Any], Any]) -> Generator[Any, None, None]:
    """Call a function with each of some values, in parallel with Ray Data, and yield the results in the order of the values.

    A UserError travels as a result, so Ray does not wrap it. The first one in the order of the values is raised.
    """

    def call(row: dict[str, bytes]) -> dict[str, bytes]:
        try:
            result = task(pickle.loads(row["call"]))
        except UserError as error:
            result = error
        return {"result": pickle.dumps(result)}

    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    rows = [{"call": pickle.dumps(value)} for value in calls]
    with quiet_console(), DataContext.current(context):
        # With one block per value, Ray Data runs one task per value for any number of CPUs.
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(call)
        for row in dataset.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, UserError):
                raise result
            yield result


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

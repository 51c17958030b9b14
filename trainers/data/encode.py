"""The workers' share of data preparation: parts of files become tokens, lengths and byte pairs."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import ray.data
from ray.data import DataContext

from foldray.errors import UserError
from foldray.recipe.data import Invalid
from trainers.data.baselines import byte_pairs, count_pairs
from trainers.data.rows import Part, read_documents
from trainers.data.tokenizers import Tokenizer
from trainers.data.unfit import Found, Unfit


@dataclass(frozen=True)
class Work:
    """Consecutive parts of one split. One task encodes them."""

    parts: list[Part]
    validation: bool


@dataclass(frozen=True)
class Encoded:
    """The result of one `Work`: N tokens of D documents with T bytes of text. A separator precedes each document.

    Conversations have no separators, lengths or pairs, but a mask (`conversations.encode`).

    Args:
        tokens: ids, uint16 or uint32 [N].
        lengths: bytes of text that each token stands for, uint32 [N]; 0 for a separator.
        starts: positions of the documents' first tokens, int64 [D].
        pairs: for training text the count of each byte pair, int64 [PAIRS]; for validation text the pairs in order, uint32
            [T]; None for conversations.
        validation: whether the text is validation text.
        files: number of files whose last part is in this work.
        trained: whether each token counts in the loss when it is a target, uint8 [N]; None if all count.
        counts: further numbers for `meta.json`, which are summed over works.
        unfit: the documents that are not UTF-8, by file (`Unfit`).
    """

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    pairs: np.ndarray | None
    validation: bool
    files: int
    trained: np.ndarray | None = None
    counts: dict[str, int] = field(default_factory=dict)
    unfit: Found = field(default_factory=dict)


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


def encode(work: Work, tokenizer: Tokenizer, text_field: str, rule: Invalid = "refuse") -> Encoded:
    """Read and tokenize the documents of a work. A document without tokens is left out, also from the byte pairs.

    Raises:
        UserError: as `read_documents`.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    separator, no_bytes = np.asarray([tokenizer.separator], dtype), np.zeros(1, np.uint32)
    tokens, lengths, sizes, texts = [np.zeros(0, dtype)], [np.zeros(0, np.uint32)], [0], []
    unfit = Unfit(rule)
    for part in work.parts:
        for text in read_documents(part, text_field, unfit):
            ids, id_bytes = tokenizer.measure(text)
            if len(ids):
                tokens += [separator, ids.astype(dtype)]
                lengths += [no_bytes, id_bytes]
                sizes.append(len(ids) + 1)
                texts.append(text.encode())
    pairs = byte_pairs(texts)
    return Encoded(
        tokens=np.concatenate(tokens),
        lengths=np.concatenate(lengths),
        starts=np.cumsum(sizes)[:-1],
        pairs=pairs if work.validation else count_pairs(pairs),
        validation=work.validation,
        files=sum(part.last for part in work.parts),
        unfit=unfit.found,
    )


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds all ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def encode_all(works: list[Work], encode: Callable[[Work], Encoded]) -> Generator[Encoded, None, None]:
    """Encode works in parallel with Ray Data, and yield the results in the order of `works`.

    Args:
        works: the works.
        encode: encodes one of them. It is pickled and sent to the workers.

    Raises:
        UserError: a worker cannot encode a work; the first such error in the order of `works`. The error travels as a
            result, so Ray does not wrap it into an error of its own.
    """
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    rows = [{"work": pickle.dumps(work)} for work in works]
    with quiet_console(), DataContext.current(context):
        # With one block per work, Ray Data runs one task per work for any number of CPUs.
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(_Encode(encode))
        for row in dataset.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, UserError):
                raise result
            yield result


@dataclass(frozen=True)
class _Encode:
    encode: Callable[[Work], Encoded]

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        result: Encoded | UserError
        try:
            result = self.encode(pickle.loads(row["work"]))
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

"""Baselines: a unigram and a bigram model of bytes, fitted on the training text.

Both models add one half to every count (Krichevsky–Trofimov), so p(c | b) = (n_bc + ½) / (n_b + 128), and an unseen byte
costs a finite number of bits. The models predict the bytes of documents. The predecessor of a document's first byte is the
document's start. The end of a document is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

SMOOTHING = 0.5
PAIRS = 257 * 256
"""Number of (predecessor, byte) pairs. Predecessor 256 is the start of a document."""


class Baselines(NamedTuple):
    """Bits per byte of the two models on some text."""

    unigram: float
    bigram: float


def byte_pairs(documents: Iterable[bytes]) -> np.ndarray:
    """Return the pair index 256·predecessor + byte of every byte of the documents, uint32 [bytes]."""
    documents = [document for document in documents if document]
    text = np.frombuffer(b"".join(documents), np.uint8).astype(np.uint32)
    before = np.roll(text, 1)
    before[np.cumsum([0, *map(len, documents)])[:-1]] = 256
    return before * 256 + text


def count_pairs(pairs: np.ndarray) -> np.ndarray:
    """Count how often each pair occurs, int64 [PAIRS]."""
    return np.bincount(pairs, minlength=PAIRS)


def fit(counts: np.ndarray) -> np.ndarray:
    """Return the bits of each pair under the unigram and the bigram model of these counts, float64 [2, PAIRS]."""
    bigrams = counts.reshape(257, 256) + SMOOTHING
    unigrams = counts.reshape(257, 256).sum(axis=0) + SMOOTHING
    tables = np.broadcast_to(unigrams / unigrams.sum(), (257, 256)), bigrams / bigrams.sum(axis=1, keepdims=True)
    return -np.log2(np.stack(tables)).reshape(2, PAIRS)

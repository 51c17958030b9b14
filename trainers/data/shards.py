"""Writes a split: its tokens go into shards, and its documents and bytes are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from trainers.data.encode import Encoded
from trainers.data.packed import sample_order


class SplitWriter:
    """Writes the text of a split piece by piece, and holds at most one shard of tokens.

    A shard has a whole number of sequences. So its last target is the first token of the next shard. If pieces have masks, every
    shard has a file with the mask of its tokens.

    Args:
        folder: folder of the files.
        name: train or validation, the first part of the files' names.
        seq_len: number of targets of a sequence.
        dtype: type of the stored tokens.
        shard_bytes: largest size of a shard. A shard has at least one sequence.
    """

    def __init__(self, folder: Path, name: str, seq_len: int, dtype: np.dtype, shard_bytes: int = 64 << 20):
        self._folder, self._name, self._seq_len = folder, name, seq_len
        self._per_shard = max((shard_bytes // dtype.itemsize - 1) // seq_len, 1)
        self._buffer, self._buffered = [np.zeros(0, dtype)], 0
        self._trained: list[np.ndarray] = []
        self._shards: list[str] = []
        self._masks: list[str] = []
        self._starts, self._byte_ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        self._bits, self._bit_ends = np.zeros((2, 1)), [np.zeros((2, 0))]
        self.tokens = self.bytes = 0
        self._counts: Counter[str] = Counter()

    @property
    def sequences(self) -> int:
        """Number of sequences that the tokens so far fill."""
        return max(self.tokens - 1, 0) // self._seq_len

    def add(self, piece: Encoded, bits: np.ndarray | None = None) -> None:
        """Append a piece. `bits` is the cost of its T bytes under the two byte models, float64 [2, T]."""
        # Sequence i ends with token (i + 1)·seq_len of the stream. Token 0 is the separator of the first document.
        at_ends = np.cumsum(piece.lengths, dtype=np.int64)[-self.tokens % self._seq_len :: self._seq_len]
        if bits is not None:
            running = self._bits + np.concatenate([np.zeros((2, 1)), np.cumsum(bits, axis=1)], axis=1)
            self._bit_ends.append(running[:, at_ends])
            self._bits = running[:, -1:]
        self._byte_ends.append(self.bytes + at_ends)
        self._starts.append(self.tokens + piece.starts)
        self.tokens += len(piece.tokens)
        self.bytes += int(piece.lengths.sum(dtype=np.int64))
        self._counts.update(piece.counts)
        self._buffer.append(piece.tokens)
        if piece.trained is not None:
            self._trained.append(piece.trained)
        self._buffered += len(piece.tokens)
        while self._buffered > self._per_shard * self._seq_len:
            self._flush(self._per_shard)

    def finish(self, shuffled: bool = False) -> dict[str, Any]:
        """Write the last shard and the indices, and return the counts for `meta.json`.

        Args:
            shuffled: store a fixed random order of the sequences.
        """
        rest = self.sequences - len(self._shards) * self._per_shard
        if rest:
            self._flush(rest)
        starts = np.concatenate(self._starts)
        np.save(self._folder / f"{self._name}-starts.npy", starts)
        order = sample_order(0, self.sequences, 0, self.sequences) if shuffled else np.arange(self.sequences)
        if shuffled:
            np.save(self._folder / f"{self._name}-order.npy", order)
        np.save(self._folder / f"{self._name}-bytes.npy", _reordered(np.concatenate(self._byte_ends), order))
        bit_ends = np.concatenate(self._bit_ends, axis=1)
        if bit_ends.size:
            np.save(self._folder / f"{self._name}-bits.npy", _reordered(bit_ends, order))
        return {
            "documents": len(starts),
            "bytes": self.bytes,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "shards": self._shards,
            "shard_sequences": self._per_shard,
            "shuffled": shuffled,
            **({"masks": self._masks, "counts": dict(self._counts)} if self._masks else {}),
        }

    def _flush(self, sequences: int) -> None:
        stream = np.concatenate(self._buffer)
        used = sequences * self._seq_len
        self._shards.append(f"{self._name}-{len(self._shards):05d}.npy")
        np.save(self._folder / self._shards[-1], stream[: used + 1])
        self._buffer, self._buffered = [stream[used:]], len(stream) - used
        if self._trained:
            trained = np.concatenate(self._trained)
            self._masks.append(f"{self._name}-mask-{len(self._masks):05d}.npy")
            np.save(self._folder / self._masks[-1], trained[: used + 1])
            self._trained = [trained[used:]]


def _reordered(ends: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Turn running sums [… , n + 1] at the ends of sequences, in the order of the stream, into sums in another order."""
    per_sequence = np.diff(ends, axis=-1)[..., order]
    return np.concatenate([np.zeros_like(ends[..., :1]), np.cumsum(per_sequence, axis=-1)], axis=-1)

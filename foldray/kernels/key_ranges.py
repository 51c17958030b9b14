"""Masks as ranges of keys: documents, windows and the causal order hide all keys but those of one range, for every query.

A mask of S · T bools takes 1 GiB at 32K tokens, and CUDA's attention kernels take none. They take packed sequences of several
lengths (`torch.nn.attention.varlen`), a causal flag and a window. `KeyRanges.spans` says a mask in these words.

Legend: B sequences, S queries, T keys, Q = B · S, K = B · T.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foldray.kernels.transfer import move


class Spans(NamedTuple):
    """Runs of queries, each with the run of keys that it is computed with, in packed tensors [Q, heads, D] and [K, heads, D].

    Runs follow each other without gaps, so a run may have no queries or no keys. The last query of a run is aligned to the
    run's last key.

    Args:
        cu_seqlens_q, cu_seqlens_k: ends of the runs behind a 0, int32 on the device.
        max_seqlen_q, max_seqlen_k: lengths of the longest runs.
        causal: whether a query sees no keys behind the one that it is aligned to.
        window: how many keys before that one it sees; −1 is all of them.
        blind: whether there are queries without keys.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window: int
    blind: bool


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """Every query sees the keys `first` … `stop` − 1, which are indices of keys. The host knows them.

    Args:
        first_BS, stop_BS: int64 [B, S], or [1, S] if all sequences are alike. A query with `first` = `stop` sees nothing.
        keys: the number T of keys.
    """

    first_BS: np.ndarray
    stop_BS: np.ndarray
    keys: int
    device: torch.device | None = None
    _spans: dict[int, Spans | None] = field(default_factory=dict, repr=False)
    _on_device: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def widest(self) -> int:
        """The most keys that a query sees."""
        return int((self.stop_BS - self.first_BS).max(initial=0))

    def seen(self, queries: slice) -> tuple[slice, Tensor]:
        """Return the keys that some of these queries see, and which of them each query sees: bool [B, 1, s, t]."""
        first, stop = int(self.first_BS[:, queries].min(initial=self.keys)), int(self.stop_BS[:, queries].max(initial=0))
        keys = slice(min(first, stop), stop)
        if not self._on_device:
            self._on_device.extend(move(torch.from_numpy(x.copy()), self.device) for x in (self.first_BS, self.stop_BS))
        first_BS1, stop_BS1 = (x[:, queries].unsqueeze(2) for x in self._on_device)
        key_T = torch.arange(keys.start, keys.stop, device=self.device)
        return keys, ((key_T >= first_BS1) & (key_T < stop_BS1)).unsqueeze(1)

    def spans(self, sequences: int) -> Spans | None:
        """Return the spans of so many sequences. None if packed sequences and one window cannot express what is seen."""
        if sequences not in self._spans:
            shape = (sequences, self.first_BS.shape[1])
            start_B1 = np.arange(sequences)[:, None] * self.keys
            first_Q, stop_Q = ((np.broadcast_to(x, shape) + start_B1).ravel() for x in (self.first_BS, self.stop_BS))
            self._spans[sequences] = self._packed(first_Q, stop_Q, sequences * self.keys)
        return self._spans[sequences]

    def _packed(self, first_Q: np.ndarray, stop_Q: np.ndarray, keys: int) -> Spans | None:
        query_Q, blind_Q = np.arange(len(first_Q)), first_Q >= stop_Q
        # A run begins with a sequence, behind the last key that the query before sees, and between queries with and without keys.
        begins_Q = query_Q % self.first_BS.shape[1] == 0
        begins_Q[1:] |= np.where(blind_Q[1:] | blind_Q[:-1], blind_Q[1:] != blind_Q[:-1], first_Q[1:] >= stop_Q[:-1])
        start_R, run_Q = np.flatnonzero(begins_Q), np.cumsum(begins_Q) - 1
        end_R = np.append(start_R[1:], len(first_Q))
        blind_R, low_R, high_R = blind_Q[start_R], first_Q[start_R], stop_Q[end_R - 1]
        causal = bool((stop_Q[start_R] != high_R)[~blind_R].any())
        narrowed_R = ~blind_R & (first_Q[end_R - 1] > low_R)
        window = int((high_R - 1 - first_Q[end_R - 1])[narrowed_R].max()) if narrowed_R.any() else -1
        # What the kernel makes of these runs must be what is asked for.
        behind_Q = (end_R - 1)[run_Q] - query_Q
        aligned_Q, low_Q, high_Q = high_R[run_Q] - 1 - behind_Q, low_R[run_Q], high_R[run_Q]
        right_Q = (aligned_Q + 1 if causal else high_Q) == stop_Q
        right_Q &= (low_Q if window < 0 else np.maximum(low_Q, aligned_Q - window)) == first_Q
        end_k_R = np.maximum.accumulate(np.where(blind_R, 0, high_R))
        start_k_R = np.where(blind_R, np.append(0, end_k_R[:-1]), low_R)
        # Between runs there may be keys that nobody sees: a run without queries. Where there are none, the same ends come twice.
        ends_q = np.concatenate(([0], np.stack((start_R, end_R), 1).ravel(), [len(first_Q)]))
        ends_k = np.concatenate(([0], np.stack((start_k_R, end_k_R), 1).ravel(), [keys]))
        if not (right_Q | blind_Q).all() or (np.diff(ends_k) < 0).any():
            return None
        kept = np.append(True, (np.diff(ends_q) > 0) | (np.diff(ends_k) > 0))
        ends_q, ends_k = ends_q[kept], ends_k[kept]
        cu_seqlens_q, cu_seqlens_k = (move(torch.from_numpy(x.astype(np.int32)), self.device) for x in (ends_q, ends_k))
        # If the longest run has one query, and heads share keys, the kernel would take every run to have one.
        longest_q, longest_k = max(int(np.diff(ends_q).max()), 2), int(np.diff(ends_k).max())
        return Spans(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, causal, window, bool(blind_R.any()))

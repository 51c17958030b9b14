"""Texts as windows of tokens, and what a model's losses on them say.

A text is one document: a separator, then its n tokens t1 … tn. Windows of S tokens are cut from it and do not overlap:

    window 1    reads  separator t1 … t(S−1)     predicts  t1 … tS
    window 2    reads  tS t(S+1) … t(2S−1)       predicts  t(S+1) … t(2S)

So every token of the text is predicted exactly once. Within a window, token i is predicted from the i tokens before it: the
first one from the last token of the window before, or from the separator, and the last one from S tokens. Training cuts its
sequences in the same way. The end of the text is not predicted.

Legend: W windows, S tokens of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foldray.model import IGNORED, Batch


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text. `+` joins the scores of several texts.

    Args:
        tokens: number of tokens that were predicted.
        bytes: bytes of UTF-8 that these tokens stand for.
        nats: cross-entropy, summed over the tokens.
    """

    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    def __add__(self, other: Score) -> Score:
        return Score(self.tokens + other.tokens, self.bytes + other.bytes, self.nats + other.nats)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite if it is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    def as_dict(self) -> dict[str, Any]:
        means = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {"tokens": self.tokens, "bytes": self.bytes, "nats": self.nats, **means}


def windows(ids: np.ndarray, separator: int, length: int, together: int) -> Iterator[Batch]:
    """Yield the windows of a text, in order: batches of W × S tokens.

    The last window is filled up with separators behind the text, whose targets are `IGNORED`. No token of the text sees them.

    Args:
        length: S.
        together: the largest W.
    """
    for start in range(0, len(ids), length * together):
        part = ids[start : start + length * together].astype(np.int64)
        count = -(-len(part) // length)
        token_T, target_T = np.full(count * length, separator), np.full(count * length, IGNORED)
        token_T[0] = separator if start == 0 else ids[start - 1]
        token_T[1 : len(part)], target_T[: len(part)] = part[:-1], part
        yield Batch(*(torch.from_numpy(stream_T.reshape(count, length)) for stream_T in (token_T, target_T)))

"""What data are, wherever they lie and however they came there: hashes of content, which parts of a cluster make together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

_PRIME = 2**255 - 19
_BASE = int.from_bytes(hashlib.sha256(b"foldray").digest()) % _PRIME
LINK = r"^\d{1,18}-[0-9a-f]{64}$"
"""What `str` makes of a chain."""


def digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON document, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class Chain:
    """The hash of items in their order. The chain of a whole follows from those of its parts, wherever it is cut.

    It is Σ SHA-256(item i) · B^(n − i) modulo a prime, for n items. So tasks hash parts, and the driver puts them together. It
    tells apart what differs by accident. It does not withstand somebody who looks for two wholes with one hash.
    """

    def __init__(self, count: int = 0, value: int = 0):
        self.count, self.value = count, value

    @classmethod
    def parse(cls, text: str) -> Chain:
        """Return the chain of `str(chain)`."""
        count, _, value = text.partition("-")
        return cls(int(count), int(value, 16))

    def __str__(self) -> str:
        return f"{self.count}-{self.value:064x}"

    def add(self, *item: Any) -> None:
        """Add an item: some buffers of bytes, one after another."""
        hashed = hashlib.sha256()
        for buffer in item:
            hashed.update(buffer)
        self.value = (self.value * _BASE + int.from_bytes(hashed.digest())) % _PRIME
        self.count += 1

    def extend(self, part: Chain) -> None:
        """Add the items of another chain."""
        self.value = (self.value * pow(_BASE, part.count, _PRIME) + part.value) % _PRIME
        self.count += part.count

    def add_documents(self, tokens: np.ndarray, starts: np.ndarray, trained: np.ndarray | None) -> None:
        """Add every document of a stream of N tokens as an item.

        Args:
            tokens: ids [N].
            starts: positions of the documents' first tokens. Tokens before the first one are an item, too.
            trained: whether each token counts, uint8 [N]; None if all count.
        """
        for start, stop in pairwise([0, *starts.tolist(), len(tokens)]):
            if stop > start:
                arrays = [tokens] if trained is None else [tokens, trained]
                self.add(*(np.ascontiguousarray(array[start:stop]).data for array in arrays))

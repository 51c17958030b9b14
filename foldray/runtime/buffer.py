"""The token buffer between ops that cut the same tokens differently (FoldMoE, section 4.2)."""

from __future__ import annotations

import torch

from foldray.comm import Pending


class TokenBuffer:
    """Activations [B, s, H], or their gradient. Ops put pieces in and take other pieces out, every token once.

    A piece that is taken just as it was put is not copied. The buffer frees a piece once all of its tokens are taken.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[range, torch.Tensor]] = []
        self._left: list[int] = []  # tokens of each piece that are still to be taken
        self._coming: list[tuple[range, Pending]] = []

    def put(self, tokens: range, x_BsH: torch.Tensor) -> None:
        self._pieces.append((tokens, x_BsH))
        self._left.append(len(tokens))

    def put_later(self, tokens: range, pending: Pending) -> None:
        """Put a piece that is still on its way. `take` waits for it if it needs any of its tokens."""
        self._coming.append((tokens, pending))

    def take(self, tokens: range) -> torch.Tensor:
        """Take these tokens out: [B, len(tokens), H].

        Raises:
            RuntimeError: some of the tokens are not in the buffer.
        """
        coming = [piece for piece in self._coming if piece[0].start < tokens.stop and tokens.start < piece[0].stop]
        for held, pending in coming:
            self._coming.remove((held, pending))
            self.put(held, *pending.wait())
        taken: list[tuple[int, torch.Tensor]] = []
        for number, (held, x_BsH) in enumerate(self._pieces):
            start, stop = max(held.start, tokens.start), min(held.stop, tokens.stop)
            if start < stop:
                whole = stop - start == len(held)
                taken.append((start, x_BsH if whole else x_BsH[:, start - held.start : stop - held.start]))
                self._left[number] -= stop - start
        if sum(x_BsH.shape[1] for _, x_BsH in taken) != len(tokens):
            raise RuntimeError(f"tokens {tokens.start}…{tokens.stop - 1} are not all here")
        kept = [number for number, left in enumerate(self._left) if left]
        self._pieces, self._left = [self._pieces[number] for number in kept], [self._left[number] for number in kept]
        parts = [x_BsH for _, x_BsH in sorted(taken, key=lambda part: part[0])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

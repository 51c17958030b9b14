"""The keys and values, or states, of sequences that grow, so that a new token costs one pass over this token alone.

Generation is attention in slices (`slices.py`): the prompt is the first slice, and each new token is a slice of its own.

Legend: B sequences, S tokens of a slice, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from foldray.model.batch import Batch
from foldray.model.transformer import Transformer

_LEAST = 256  # tokens that a cache has room for


class Cache:
    """Runs a model over sequences slice by slice, and keeps the keys and values of every block, or the state of linear attention.

    The results are those of one pass over the whole sequences, up to rounding. There are no gradients. The cache keeps all keys,
    also those that no later query sees because of a window. Its memory doubles when it is full. That of states does not grow.

    This process must hold the model alone. Its experts must not drop tokens, because the capacity of an expert depends on tokens
    that are not there yet.
    """

    def __init__(self, model: Transformer, sequences: int = 1):
        if model.spec.router.capacity_factor is not None:
            raise ValueError("a cache needs a model whose experts drop no tokens: router.capacity_factor=None")
        self.model, self.seen = model, 0
        self._token_BL = torch.zeros((sequences, 0), dtype=torch.int64, device=next(model.parameters()).device)
        self._memories = {layer: model.block(layer).attention.memory(forgets=True) for layer in range(model.spec.layers)}

    @torch.no_grad()
    def extend(self, token_BS: torch.Tensor) -> torch.Tensor:
        """Add a slice of tokens, int64, and return the output of the last block for them: [B, S] → [B, S, H].

        `Transformer.head_logits` makes logits of it.
        """
        part, spec = range(self.seen, self.seen + token_BS.shape[1]), self.model.spec
        if spec.positions == "learned" and part.stop > spec.max_positions:
            raise ValueError(f"{part.stop} tokens need as many learned positions, and there are {spec.max_positions}")
        self._make_room(part.stop)
        self._token_BL[:, part.start : part.stop] = token_BS
        batch = Batch(self._token_BL, self._token_BL)
        place = self.model.place(self._token_BL.shape[1], part, self._token_BL.device)
        x_BSH = self.model.embed(batch, place)
        for layer, memory in self._memories.items():
            x_BSH, _ = self.model.block(layer)(x_BSH, place, memory)
        self.seen = part.stop
        return x_BSH

    def _make_room(self, tokens: int) -> None:
        """Make room for this many tokens, and more: attention keeps nothing of a slice that is as long as the sequences."""
        room = self._token_BL.shape[1]
        if tokens > room:
            length = max(2 * tokens, _LEAST)
            self._token_BL = F.pad(self._token_BL, (0, length - room))
            for memory in self._memories.values():
                memory.lengthen(length)

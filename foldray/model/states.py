"""What linear attention hands from one slice of a sequence to the next: its state, and the last tokens that its convolution sees.

Slices go forward in their order, and backward in the opposite order, as in softmax attention (`slices.py`). The backward of a
slice leaves the gradient of what it has taken, and the backward of the slice before it takes this gradient.

If context-parallel ranks share slices, the last tokens of every chunk of a slice (its tails) are gathered before attention of
the slice, in an op of their own, and their gradients travel back after it.

Legend: B sequences, V heads of values, D width of queries and keys, E width of values, P tokens that the convolution sees before
a token, W their columns, M context-parallel members, C chunks of a slice that a member holds, t tokens of a tail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.model.attention_mask import AttentionMask


class Memory(ABC):
    """What attention of one block and micro-batch keeps of the slices so far."""

    @abstractmethod
    def free(self) -> None:
        """Forget everything."""

    def lengthen(self, length: int) -> None:  # noqa: B027 - most memories need no room for tokens
        """Make room for sequences of `length` tokens. Later slices must name this length (`AttentionMask.length`)."""


class Carry(NamedTuple):
    """What a slice begins with.

    Args:
        state_BVDE: of all tokens before, in at least float32.
        before_BPW: the last P tokens, as the convolution takes them.
    """

    state_BVDE: Tensor
    before_BPW: Tensor


class StateCache(Memory):
    """The carries of the slices of one block and micro-batch, and the gradient of one of them.

    Args:
        forgets: keep the newest carry only, because no slice goes backward.

    Attributes:
        gradient: of the carry that the slice with the latest backward has taken; None before the first backward.
    """

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets
        self.gradient: Carry | None = None
        self._carries: dict[int, Carry] = {}  # by the slice's first token
        self._tails: dict[int, Tensor] = {}  # by the slice's first token
        self._tail_gradients: dict[int, Tensor] = {}

    def put(self, token: int, carry: Carry) -> None:
        """Keep what the slice that begins at a token begins with. A forward that runs again keeps what is there."""
        if token not in self._carries:
            if self.forgets:
                self._carries.clear()
            self._carries[token] = carry

    def carry(self, token: int) -> Carry | None:
        """Return what the slice that begins at a token begins with; None for the first slice, which begins with zeros."""
        return self._carries.get(token)

    def put_tails(self, token: int, tails: Tensor) -> None:
        """Keep the gathered tails of the slice that begins at a token: [M · B, C, t, W]."""
        self._tails[token] = tails

    def tails(self, token: int) -> Tensor:
        return self._tails[token]

    def leave(self, token: int, carry: Carry, tails: Tensor | None) -> None:
        """Keep the gradients of what a slice has taken. The first slice goes backward last, and frees everything else."""
        self.gradient = carry
        if tails is not None:
            self._tail_gradients[token] = tails
        if token == 0:
            self.gradient = None
            self._carries.clear()

    def take_tails(self, token: int) -> Tensor:
        """Return the gradient of the tails of a slice, and free both."""
        del self._tails[token]
        return self._tail_gradients.pop(token)

    def free(self) -> None:
        self.gradient = None
        for kept in (self._carries, self._tails, self._tail_gradients):
            kept.clear()


def taken(x_BSW: Tensor, first: Carry, memory: StateCache, mask: AttentionMask, tails: bool) -> tuple[Tensor, ...]:
    """Return what a slice computes from: x, the state and the last tokens before it, and its tails if they are gathered.

    Args:
        first: what the first slice begins with.
    """
    carry = memory.carry(mask.tokens.start) or first
    more = [memory.tails(mask.tokens.start)] if tails else []
    return _Taken.apply(x_BSW, memory, mask.tokens.start, *carry, *more)


def handed_on(y_BSW: Tensor, carry: Carry, memory: StateCache, mask: AttentionMask) -> Tensor:
    """Hand a carry to the next slice, and return y. Its backward has the gradient of the carry, too."""
    return _HandedOn.apply(y_BSW, memory, mask.tokens.stop, *carry)


class _Taken(torch.autograd.Function):
    """x passes through, so that the backward of an op, which goes on to x, comes here once all gradients are complete."""

    @staticmethod
    def forward(ctx: Any, x_BSW: Tensor, memory: StateCache, token: int, *stored: Tensor) -> tuple[Tensor, ...]:
        ctx.memory, ctx.token = memory, token
        return x_BSW.view_as(x_BSW), *(tensor.view_as(tensor) for tensor in stored)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx_BSW, dstate_BVDE, dbefore_BPW, *tails = gradients
        ctx.memory.leave(ctx.token, Carry(dstate_BVDE, dbefore_BPW), tails[0] if tails else None)
        return dx_BSW, None, None, None, None, *(None for _ in tails)


class _HandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_BSW: Tensor, memory: StateCache, token: int, *carry: Tensor) -> Tensor:
        ctx.memory = memory
        memory.put(token, Carry(*(tensor.detach() for tensor in carry)))
        return y_BSW.view_as(y_BSW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, None, *(ctx.memory.gradient or (None, None))

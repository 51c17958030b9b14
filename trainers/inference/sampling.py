"""How the next token is drawn from logits, and what is written so.

Legend: V ids of the vocabulary.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from foldray.errors import UserError

_SEEDS = 2**32


@dataclass(frozen=True)
class Sampling:
    """The rule of drawing a token. Its three limits apply one after another: temperature, top-k, top-p.

    Args:
        temperature: logits are divided by it. 0 takes the most probable token, the first one of several (greedy).
        top_p: only the most probable tokens are drawn, as many as make up this probability together; at least one
            (nucleus sampling, Holtzman et al. 2020). 1 draws all.
        top_k: only the K most probable tokens are drawn. None draws all.
        seed: seed of the draws. None is a random one.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf):
            raise UserError("temperature", self.temperature, "must be at least 0 and finite; 0 takes the most probable token")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p", self.top_p, "must be greater than 0, and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise UserError("top_k", self.top_k, "must be at least 1")
        if self.seed is not None and not 0 <= self.seed < _SEEDS:
            raise UserError("seed", self.seed, f"must be at least 0, and less than {_SEEDS}")

    def sampler(self) -> Sampler:
        return Sampler(self, secrets.randbelow(_SEEDS) if self.seed is None else self.seed)


class Sampler:
    """Draws tokens, one after another. It computes on the CPU in float64, so a seed means the same draws on every device."""

    def __init__(self, sampling: Sampling, seed: int):
        self.sampling, self.seed = sampling, seed
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, logit_V: torch.Tensor) -> int:
        """Draw an id. Logits of −inf are never drawn."""
        logit_V = logit_V.detach().to("cpu", torch.float64)
        if self.sampling.temperature == 0:
            return int(logit_V.argmax())
        return int(torch.multinomial(probabilities(logit_V, self.sampling), 1, generator=self._generator))


class Generated(NamedTuple):
    """What a model wrote.

    Args:
        text: the continuation, without the prompt.
        tokens: its ids, without a separator at the end.
        stopped: whether a token that ends texts (in a chat, also one that ends answers) ended it, or its length.
        seed: seed of the draws. The same call with this seed gives the same text.
        log_probs: the log-probability that the model itself gives to each of `tokens`, whatever the rule of drawing.
        experts: with `routes`, the experts of the prompt and of all tokens but the last one, int16 [M, L, K]: those that
            `Model.log_probs` takes. M are the blocks with experts, L the tokens, K the experts of a token.
    """

    text: str
    tokens: list[int]
    stopped: Literal["separator", "length"]
    seed: int
    log_probs: list[float]
    experts: torch.Tensor | None = None


def probabilities(logit_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the probability of each id, float64 [V]. The temperature must not be 0."""
    # Without the maximum, the quotient of a small temperature would be infinite.
    logit_V = (logit_V - logit_V.max()) / sampling.temperature
    if sampling.top_k is not None:
        best, ids = logit_V.topk(min(sampling.top_k, len(logit_V)))
        logit_V = torch.full_like(logit_V, -math.inf).scatter(0, ids, best)
    share_V = logit_V.softmax(0)
    if sampling.top_p < 1:
        sorted_V, order_V = share_V.sort(descending=True, stable=True)
        before_V = sorted_V.cumsum(0) - sorted_V
        share_V = torch.zeros_like(share_V).scatter(0, order_V, sorted_V.where(before_V < sampling.top_p, 0.0))
    return share_V / share_V.sum()

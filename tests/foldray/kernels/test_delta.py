"""The gated delta rule in chunks of 64 tokens gives what it gives token by token."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from foldray.kernels.delta import CHUNK, convolved, delta_rule, transition, unit

LENGTHS = [1, 3, CHUNK, CHUNK + 1, 150]
STARTS: dict[str, list[list[int]] | None] = {
    "one document": None,
    "documents": [[70], [1, 2, 63, 64, 65, 100]],
    "a document of each token": [list(range(150)), []],
}
"""By sequence, the tokens at which a document begins. The first token goes on with a document if it is not among them."""


COLUMNS = pytest.mark.parametrize("columns", [1, 5], ids=["a decay of heads", "a decay of columns"])


class Inputs(NamedTuple):
    """What the rule takes: B = 2, K = 2, V = 4, D = 5, E = 3."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    write: Tensor
    state: Tensor

    @classmethod
    def drawn(cls, length: int, columns: int, rate: float = 1.0, dtype: torch.dtype = torch.float64) -> Inputs:
        chance = torch.Generator().manual_seed(length)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=chance)

        q, k = (unit(draw(2, length, 2, 5)) for _ in range(2))
        decay, write = -rate * draw(2, length, 4, columns).abs(), torch.sigmoid(draw(2, length, 4))
        made = cls(q, k, draw(2, length, 4, 3), decay, write, draw(2, 4, 5, 3))
        return cls(*(x.to(dtype).requires_grad_() for x in made))


def positions(starts: list[list[int]] | None, length: int) -> Tensor | None:
    """Return positions in documents. The first document began 7 tokens before."""
    if starts is None:
        return None
    rows = []
    for begins in starts:
        row, within = [], 7
        for token in range(length):
            within = 0 if token in begins else within
            row.append(within)
            within += 1
        rows.append(row)
    return torch.tensor(rows)


def token_by_token(given: Inputs, within_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the rule as papers write it (arXiv:2412.06464, equation 10; of columns: arXiv:2510.26692, equation 1)."""
    (sequences, length, keys, _), heads = given.q.shape, given.v.shape[2]
    outs = [[[Tensor()] * heads for _ in range(length)] for _ in range(sequences)]
    states = []
    for b in range(sequences):
        for head in range(heads):
            state, shared = given.state[b, head], head // (heads // keys)
            for t in range(length):
                k, share = given.k[b, t, shared], given.write[b, t, head]
                state = state * (0.0 if within_BS is not None and within_BS[b, t] == 0 else 1.0)
                state = torch.diag(given.decay[b, t, head].exp().expand(len(k))) @ state
                erased = torch.eye(len(k), dtype=k.dtype) - share * torch.outer(k, k)
                state = erased @ state + share * torch.outer(k, given.v[b, t, head])
                outs[b][t][head] = given.q[b, t, shared] @ state
            states.append(state)
    return torch.stack([torch.stack([torch.stack(row) for row in rows]) for rows in outs]), torch.stack(states).view_as(
        given.state
    )


@pytest.mark.gate(10)
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("length", LENGTHS)
@COLUMNS
def test_chunks_are_tokens_together(columns: int, length: int, starts: str) -> None:
    within, given = positions(STARTS[starts], length), Inputs.drawn(length, columns)
    found, expected = delta_rule(*given, within), token_by_token(given, within)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
    slopes = [torch.randn_like(x) for x in expected]
    ours, theirs = (torch.autograd.grad(results, given, slopes) for results in (found, expected))
    for name, own, other in zip(Inputs._fields, ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-11, rtol=1e-11, msg=name)


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("length", LENGTHS)
@COLUMNS
def test_a_map_leads_from_the_first_state_to_the_last(columns: int, length: int, starts: str) -> None:
    within, given = positions(STARTS[starts], length), Inputs.drawn(length, columns)
    _, last = delta_rule(*given, within)
    a, b = transition(given.k, given.v, given.decay, given.write, within).split((5, 3), dim=-1)
    torch.testing.assert_close(a @ given.state + b, last, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("rate", [0.0, 1e-4, 30.0, 1000.0])
@COLUMNS
def test_no_decay_is_too_strong_or_too_weak(columns: int, rate: float) -> None:
    """With factors of their own, tokens would have e^1000 and more."""
    given = Inputs.drawn(150, columns, rate, torch.float32)
    found = delta_rule(*given)
    exact = Inputs(*(x.detach().double() for x in given))
    for ours, theirs in zip(found, token_by_token(exact, None), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)
    for slope in torch.autograd.grad([x.sum() for x in found], given):
        assert bool(slope.isfinite().all())


@COLUMNS
def test_no_sequence_is_nothing(columns: int) -> None:
    out, state = delta_rule(*(x[:0] for x in Inputs.drawn(70, columns)))
    assert (out.shape, state.shape) == ((0, 70, 4, 3), (0, 4, 5, 3))


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("starts", ["one document", "documents"])
def test_a_convolution_sees_the_last_tokens_of_its_document(starts: str, taps: int) -> None:
    within, chance = positions(STARTS[starts], 80), torch.Generator().manual_seed(1)
    x, before, factors = (torch.randn(*shape, dtype=torch.float64, generator=chance) for shape in (
        (2, 80, 3), (2, taps - 1, 3), (taps, 3)))  # fmt: skip
    found, every = convolved(x, before, factors, within), torch.cat((before, x), dim=1)
    for b in range(2):
        for t in range(80):
            seen = taps if within is None else min(taps, int(within[b, t]) + 1)
            row = sum(every[b, t + taps - 1 - back] * factors[taps - 1 - back] for back in range(seen))
            torch.testing.assert_close(found[b, t], row / (1 + torch.exp(-row)), atol=1e-12, rtol=1e-12)


def test_short_vectors_stay_short() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-4, 4e-4]], dtype=torch.float64)
    lengths = unit(x).norm(dim=-1).tolist()
    assert lengths == pytest.approx([1, 0, 5e-4 / math.sqrt(25e-8 + 1e-6)], abs=1e-7)

"""Linear attention of long sequences: slices, documents and generation against whole sequences."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from foldray.model import Batch, Cache, Transformer, cache
from foldray.model.states import StateCache
from tests.foldray.model.test_transformer import tokens
from tests.foldray.parity import model_of

LENGTH = 150  # more than two chunks of the kernel
MODEL: dict[str, Any] = {
    "layers": 3, "windows": ["linear", "linear", "full"], "linear_heads": 4, "linear_key_heads": 2, "norm": "zero_rmsnorm",
    "qk_norm": "head", "attention_gate": "element",
}  # fmt: skip

KIMI: dict[str, Any] = {
    "linear_kind": "kimi_delta", "latent_rank": 10, "kv_heads": 8, "rope_dim": 2, "full_positions": "none", "norm": "rmsnorm",
    "qk_norm": "none", "attention_gate": "none",
}  # fmt: skip


def made(**changes: Any) -> Transformer:
    return model_of(dtype=torch.float64, **{**MODEL, **changes})


@pytest.mark.parametrize("slices", [[75, 75], [1, 149], [64, 64, 22], [100] + [1] * 50, [3, 2, 1, 70, 74]], ids=str)
@pytest.mark.parametrize("changes", [{"linear_taps": 1}, {}, {"linear_taps": 6}, KIMI], ids=["1", "4", "6", "kimi"])
def test_a_cache_gives_what_whole_sequences_give(
    slices: list[int], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LEAST", 6)  # so slices end where there is no more room
    model, text = made(**changes), tokens(2, LENGTH)
    growing = Cache(model, sequences=2)
    found = torch.cat([model.head_logits(growing.extend(part)) for part in text.split(slices, dim=1)], dim=1)
    torch.testing.assert_close(found, model.logits(text), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_a_cache_of_states_does_not_grow(kind: str) -> None:
    model = made(windows=["linear"], layers=1, linear_kind=kind)
    growing, held = Cache(model), []
    for number, part in enumerate(tokens(1, 40).split(1, dim=1)):
        growing.extend(part)
        if number % 13 == 12:
            held.append(_numbers(growing))
    assert len(held) == 3
    assert len(set(held)) == 1


def _numbers(growing: Cache) -> int:
    gc.collect()
    memory = growing._memories[0]
    assert isinstance(memory, StateCache)
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for carry in memory._carries.values() for x in carry}
    return sum(storages.values())


@pytest.mark.parametrize("changes", [{}, KIMI], ids=["gated", "kimi"])
def test_documents_are_as_if_they_stood_alone(changes: dict[str, Any]) -> None:
    lengths = (1, 2, 61, 3, 64, 19)
    model, text = made(**changes), tokens(1, sum(lengths))
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    packed = model.head_logits(model.hidden(Batch(text, text, numbers)))
    alone = torch.cat([model.logits(part) for part in text.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-10, rtol=1e-10)


def test_initial_states_keep_between_almost_all_and_little() -> None:
    """In each step of a token that says nothing, e^(−rate · step) with rates from 1 to 16 and steps from 0.001 to 0.1."""
    attention = made(linear_heads=64, linear_key_heads=2).block(0).attention
    keeps = torch.exp(-attention.decay_rate.exp() * torch.nn.functional.softplus(attention.time_step))
    assert bool((keeps > 0.2).all())
    assert bool((keeps < 0.9991).all())
    assert float(keeps.std()) > 0.05

"""Slices with stored keys and values against one pass over whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.model import Cache, cache
from tests.foldray.model.test_transformer import tokens
from tests.foldray.parity import model_of

LENGTH = 23
MODELS: dict[str, dict[str, Any]] = {
    "shared expert, grouped heads": {},
    "sliding and full windows": {"layers": 3, "windows": ["sliding:5", "full"]},
    "chunked windows": {"windows": ["chunked:6", "sliding:1"]},
    "learned positions": {"positions": "learned", "max_positions": LENGTH, "norm": "layernorm", "ffn": "gelu"},
    "dense blocks, tied embedding": {"layers": 4, "dense_first": 1, "moe_every": 2, "tied_embeddings": True},
    "sigmoid router": {"router": {"score": "sigmoid", "normalize": True, "scale": 2.5, "bias_rate": 0.1}, "topk": 3},
    "softmax before top-k": {"router": {"softmax": "before_topk", "normalize": True}, "shared_hidden": 0},
    "narrow values": {"value_dim": 10, "kv_heads": 1},
    "norms, biases, partly rotated heads": {"qk_norm": "head", "attention_bias": "all", "rope_dim": 2, "shared_gate": True},
}
SLICES: list[list[int]] = [[1] * LENGTH, [9] + [1] * 14, [4, 1, 12, 1, 1, 4], [LENGTH]]


@pytest.mark.gate(12)
@pytest.mark.parametrize("slices", SLICES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_whole_sequences(model: str, slices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LEAST", 6)  # so it must be made longer
    made = model_of(dtype=torch.float64, **MODELS[model])
    if made.spec.router.bias_rate:
        for bias in made.biases().values():
            bias.copy_(torch.linspace(-1, 1, len(bias)))  # this changes which experts are chosen
    text, growing = tokens(2, LENGTH), Cache(made, sequences=2)
    found = torch.cat([made.head_logits(growing.extend(part)) for part in text.split(slices, dim=1)], dim=1)
    assert growing.seen == LENGTH
    torch.testing.assert_close(found, made.logits(text), atol=1e-10, rtol=1e-10)


def test_a_cache_leaves_the_model_as_it_is() -> None:
    made, text = model_of(dtype=torch.float64), tokens(1, 9)
    before, growing = made.logits(text), Cache(made)
    growing.extend(text[:, :4])
    assert torch.equal(made.logits(text), before)
    torch.testing.assert_close(made.head_logits(growing.extend(text[:, 4:])), before[:, 4:])


def test_what_a_cache_cannot_do() -> None:
    with pytest.raises(ValueError, match="drop no tokens"):
        Cache(model_of(router={"capacity_factor": 1.0}))
    growing = Cache(model_of(positions="learned", max_positions=8))
    growing.extend(tokens(1, 8))
    with pytest.raises(ValueError, match="9 tokens need"):
        growing.extend(tokens(1, 1))

"""What the planner counts of linear attention, against what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foldray.blueprint import AttentionSpec
from foldray.blueprint.block import LinearKind, LinearSpec
from foldray.costs.parts import LINEAR_CHUNK, linear_flops
from foldray.kernels.delta import delta_rule, transition


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
@pytest.mark.parametrize(("heads", "key_heads", "keys", "values"), [(4, 4, 8, 8), (4, 2, 8, 12)])
def test_flops_are_those_of_the_kernel(kind: LinearKind, heads: int, key_heads: int, keys: int, values: int) -> None:
    """Torch does not count the triangular systems, which have half of a product's FLOPs."""
    spec, length = AttentionSpec(heads, key_heads, keys, values, "linear", linear=LinearSpec(4, kind)), 4 * LINEAR_CHUNK
    q, k, state = (
        torch.rand(1, length, key_heads, keys),
        torch.rand(1, length, key_heads, keys),
        torch.rand(1, heads, keys, values),
    )
    rest = torch.rand(1, length, heads, values), -torch.rand(1, length, heads, spec.decays // heads), torch.rand(1, length, heads)
    with FlopCounterMode(display=False) as outputs:
        delta_rule(q, k, *rest, state)
    with FlopCounterMode(display=False) as maps:
        transition(k, *rest)
    solved = length * heads * LINEAR_CHUNK
    found = linear_flops(spec, length)
    assert found.outputs == outputs.get_total_flops() + solved * (keys + values)
    assert found.maps == maps.get_total_flops() + solved * (2 * keys + values)

"""Muon's parts against those of torch, and the shares of work of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import _muon

from foldray.blueprint import ModelSpec, parameter_table
from foldray.comm import Communicator, Groups
from foldray.runtime.assignment import Assignment
from foldray.runtime.muon import COEFFICIENTS, EPS, orthogonalize, update_scale
from tests.foldray.parity import engine_of, go_on, make_recipe

SHAPES = [(8, 8), (5, 12), (12, 5), (1, 6), (64, 96)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_iteration_has_the_bits_of_torch(shape: tuple[int, int], steps: int) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, steps, EPS)
    assert torch.equal(orthogonalize(matrix.bfloat16(), steps), expected)


def test_singular_values_come_near_one() -> None:
    matrix = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ orthogonalize(matrix, 5) @ right.T
    assert values.min() < values.max() / 5, "the test needs different singular values"
    assert found.diagonal().sub(1).abs().max() < 0.35
    assert (found - found.diagonal().diag()).abs().max() < 1e-10  # singular vectors stay


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert torch.equal(orthogonalize(torch.zeros(3, 4), 5), torch.zeros(3, 4))


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_learning_rates_are_adjusted_as_in_torch(adjust: str, inputs: int, outputs: int) -> None:
    assert update_scale(adjust, inputs, outputs) == pytest.approx(_muon._adjust_lr(1.0, adjust, torch.Size((outputs, inputs))))


def test_what_muon_updates() -> None:
    """Matrices between embedding and head, the router's and the shared expert's among them."""
    model = ModelSpec(
        layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn_hidden=16, experts=2, topk=1, expert_hidden=8, vocab=10,
        dense_first=1, moe_every=1, shared_hidden=8, positions="learned", attention_bias="all", expert_bias=True,
        qk_norm="head", attention_sinks=True, router={"logit_bias": True},
    )  # fmt: skip
    hidden = {row.name for row in parameter_table(model) if row.is_hidden_matrix}
    parts = [f"attention.{part}" for part in ("query", "key", "value", "out")]
    networks = [f"0.ffn.{part}" for part in ("gate", "up", "down")]
    networks += [f"1.moe.{each}.{part}" for each in ("experts.0", "experts.1", "shared") for part in ("gate", "up", "down")]
    assert hidden == {
        f"blocks.{name}" for name in ["1.moe.router.weight", *networks, *(f"{i}.{p}" for i in (0, 1) for p in parts)]
    }


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 5))
def test_work_is_shared_out_evenly(work: list[int], ranks: int) -> None:
    """Every item has one owner, all members agree on it, and no member has more work than another by more than one item."""
    members = [Communicator("dense_gradients", tuple(range(ranks)), index, None) for index in range(ranks)]
    mine = [Assignment(member, work, [[1] * ranks] * len(work)).mine for member in members]
    assert sorted(item for own in mine for item in own) == list(range(len(work)))
    loads = [sum(work[item] for item in own) for own in mine]
    assert max(loads) - min(loads) <= max(work, default=0)


@pytest.mark.nightly("trains for seven seconds")
def test_a_small_training_lowers_the_loss() -> None:
    optimizer = {"kind": "muon", "lr": 0.02, "weight_decay": 0.1, "clip": 1.0}
    recipe = make_recipe(1, optimizer=optimizer, precision="float32", model={"init_std": 0.02})
    groups = Groups.create(recipe.placed_fold)
    engine, losses = engine_of(recipe, groups), []
    for _ in range(20):  # the same text again and again
        losses += go_on(engine, groups, recipe, range(1))["losses"]
    assert losses[-1][0] < 0.7 * losses[0][0]

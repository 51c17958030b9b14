"""Plans of adapters: what they hold and compute, counted by hand."""

from __future__ import annotations

import pytest

from foldray.blueprint import ModelSpec, count_by_cut, parameter_table, step_flops
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import ledger
from foldray.costs.rank import RankCosts
from foldray.fold import Fold
from foldray.kinds import EXPERT, FFN, HEAD, ROUTE
from foldray.orders import Ordering

_QWEN = ModelSpec.model_validate({"preset": "qwen3-30b-a3b", "adapter": {"rank": 16}})
_GPU = load_hardware("h100")
_SMALL = {"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn_hidden": 128, "experts": 4, "topk": 2,
          "expert_hidden": 96, "vocab": 64, "moe_every": 2}  # fmt: skip


def rank_of(model: ModelSpec, fold: Fold | None = None, zero: int = 0) -> RankCosts:
    job = Job(model, 4096, 8)
    return RankCosts(job, fold or Fold(1), Device.of(job, _GPU), 1, zero)


def test_qwen_on_one_gpu_by_hand() -> None:
    """48 blocks: 32 heads of 128 with 4 of keys and values, 128 experts of 768. Frozen weights are bf16 and nothing else."""
    attention = 2 * (2048 + 4096) + 2 * (2048 + 512)  # inputs and outputs of four products
    expert = (2048 + 2 * 768) + (768 + 2048)
    outside, inside = 48 * 16 * attention, 48 * 16 * 128 * expert
    assert count_by_cut(_QWEN, trained=True) == (outside, inside)
    frozen, trained = sum(count_by_cut(_QWEN.base)), outside + inside
    held = ledger(Candidate(Job(_QWEN, 4096, 8), Fold(1), Ordering(), 1, zero=0), rank_of(_QWEN))
    assert held.weights == 2 * frozen + (2 + 4) * trained
    assert (held.gradients, held.optimizer) == (4 * trained, 8 * trained)


@pytest.mark.parametrize("targets", [["q_proj", "o_proj"], ["down_proj"], ["gate_up_proj", "k_proj"]], ids=str)
@pytest.mark.parametrize("ffn", ["gated_silu", "gelu"])
def test_counts_are_those_of_the_table(targets: list[str], ffn: str) -> None:
    model = ModelSpec.model_validate({**_SMALL, "ffn": ffn, "adapter": {"rank": 8, "targets": targets}})
    table = parameter_table(model)
    assert sum(count_by_cut(model)) == sum(row.count for row in table)
    outside, inside = count_by_cut(model, trained=True)
    assert inside == sum(row.count for row in table if row.trained and row.gradient_class == "expert")
    assert outside == sum(row.count for row in table if row.trained) - inside


def test_frozen_products_have_no_gradients_of_weights() -> None:
    """Backward of frozen products is one product, and adapters have two. No op is for gradients of frozen weights."""
    whole, adapted = (rank_of(ModelSpec.model_validate({**_SMALL, "adapter": given})) for given in (None, {"rank": 8}))
    tokens = range(4096)
    for kind, block in ((HEAD, None), (FFN, 0), (ROUTE, 1)):
        spec = None if block is None else whole.model.block(block)
        for rank, expected in ((whole, True), (adapted, False)):
            works = rank.price(kind, True, tokens, spec).works
            assert any(work.weights for work in works) == expected
    products = [work for work in adapted.price(EXPERT, True, tokens, adapted.model.block(1)).works if work.what == "experts"]
    assert sum(work.weights for work in products) == 4  # two for each adapter
    assert len(products) == 4 + 4 + 2
    graph = Candidate(Job(adapted.model, 64, 8), Fold(1), Ordering(weight_gradients="apart"), 1).graph
    assert {op.kind for op in graph.ops() if op.direction == "W"} == {"attention", "expert"}


def test_flops_by_hand() -> None:
    """Frozen products count in forward and for the gradients of their inputs, and adapters three times."""
    whole = ModelSpec.model_validate(_SMALL)
    adapted = ModelSpec.model_validate({**_SMALL, "adapter": {"rank": 8}})
    attention = 3 * 8 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))
    experts = 1 * 2 * 8 * ((64 + 2 * 96) + (96 + 64))  # one MoE block of three, two experts of each token
    core = 3 * 2 * (64 + 64) * 129 / 2  # scores and sums of values have no weights, so they count three times as well
    expected = 2 / 3 * step_flops(whole, 128, 4) + (core + 3 * 2 * (attention + experts)) * 128 * 4
    assert step_flops(adapted, 128, 4) == pytest.approx(expected)

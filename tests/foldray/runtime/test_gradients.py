"""Who takes part in a reduction, what the norm counts, and how the learning rate goes."""

from __future__ import annotations

import math

import pytest
import torch

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Transformer
from foldray.recipe import OptimizerSpec
from foldray.runtime import Gradients, TorchEngine, learning_rate
from foldray.runtime.peak import matmul_peak
from foldray.spec import ModelSpec, count_parameters
from tests.foldray.parity import MODEL


def _reduced(rank: int, ep: int) -> tuple[float, float]:
    groups = Groups.create(Fold(4, ep=ep), rank)
    model = Transformer(ModelSpec(**MODEL), groups)
    gradients = Gradients(model.parameters(), model.expert_parameters(), groups)
    for buffer in gradients.buffers:
        buffer.flat.fill_(2.0**rank)
    gradients.reduce()
    groups.close()
    return tuple(float(buffer.flat.unique()) for buffer in gradients.buffers)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_sum_of_2_to_the_rank_names_who_took_part(ranks, ep: int) -> None:
    fold = Fold(4, ep=ep)
    for rank, (dense, expert) in enumerate(ranks(4).run(_reduced, ep)):
        (edp,) = [group for group in fold.groups("edp") if rank in group]
        assert dense == sum(2.0**r for r in range(4)) / 4
        assert expert == sum(2.0**r for r in edp) / 4  # scaled by 1/(DP·CP), whatever EDP is


def _norm_of_ones(rank: int, ep: int) -> float:
    groups = Groups.create(Fold(4, ep=ep), rank)
    model = Transformer(ModelSpec(**MODEL), groups)
    gradients = Gradients(model.parameters(), model.expert_parameters(), groups)
    for buffer in gradients.buffers:
        buffer.flat.fill_(1.0)
    norm = gradients.clip(1.0)
    groups.close()
    return norm


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_norm_of_ones_is_the_root_of_the_number_of_parameters(ranks, ep: int) -> None:
    expected = math.sqrt(count_parameters(ModelSpec(**MODEL)))
    assert ranks(4).run(_norm_of_ones, ep) == pytest.approx([expected] * 4, rel=1e-12)


def test_clipping_scales_to_the_limit_and_leaves_small_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    gradients = Gradients([parameter], [], Groups.create(Fold(1)))
    gradients.dense.flat.fill_(1.0)
    assert gradients.clip(3.0) == 2.0
    assert parameter.grad.tolist() == [1.0] * 4
    assert gradients.clip(1.0) == 2.0
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))


def test_bfloat16_weights_have_float32_masters_and_gradients() -> None:
    model = Transformer(ModelSpec(**MODEL), Groups.create(Fold(1)), dtype=torch.bfloat16)
    engine = TorchEngine(model, Groups.create(Fold(1)), OptimizerSpec(lr=1e-5, clip=None), accumulation=2)
    before = {key: tensor.clone() for key, tensor in engine.state().items()}
    tokens = torch.randint(0, 29, (2, 9))
    for _ in range(2):
        engine.train_pass(tokens[:, :-1], tokens[:, 1:])
    assert {buffer.flat.dtype for buffer in engine.gradients.buffers} == {torch.float32}
    assert engine.update(1e-5) > 0
    after = engine.state()
    assert after["model/embedding.weight"].dtype == torch.float32
    assert not torch.equal(after["model/embedding.weight"], before["model/embedding.weight"])
    for parameter, master in engine.masters.items():
        assert torch.equal(parameter, master.to(torch.bfloat16))
    assert all(float(buffer.flat.abs().max()) == 0 for buffer in engine.gradients.buffers)


def test_the_learning_rate_warms_up_and_falls_to_its_share() -> None:
    spec = OptimizerSpec(lr=1.0, warmup_steps=4, min_lr=0.1)
    rates = [learning_rate(spec, step, 104) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(OptimizerSpec(lr=2.0, decay="constant"), 99, 100) == 2.0
    assert learning_rate(OptimizerSpec(lr=2.0, decay="linear", min_lr=0.0), 50, 100) == pytest.approx(1.0)


def test_the_measured_peak_is_a_rate_of_this_machine() -> None:
    rate = matmul_peak(torch.device("cpu"), torch.float32, size=256, rounds=3)
    assert 1e8 < rate < 1e15

"""The members of reductions, the parameters that the norm counts, clipping, and the learning rate."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from foldray.blueprint import ModelSpec, Ownership, count_parameters, parameter_table
from foldray.comm import Groups, Pending
from foldray.fold import Fold
from foldray.model import Batch, Transformer
from foldray.recipe import OptimizerSpec
from foldray.runtime import Gradients, TorchEngine, learning_rate, peak
from tests.foldray.parity import MODEL, model_of

ORDERS = {"order": "cp-tp-dp-pp", "moe_order": "edp-ep-etp-pp"}
FOLDS = [
    Fold(8, **sizes)
    for sizes in (
        {},
        {"ep": 8},
        {"ep": 4, "etp": 2},
        {"tp": 8, "ep": 2},
        {"cp": 8, "etp": 4},
        {"pp": 8},
        {"tp": 2, "cp": 2, "ep": 4},
        {"tp": 4, "ep": 2, "etp": 2},
        {"cp": 4, "ep": 2, "etp": 4},
        {"tp": 2, "pp": 2, "ep": 2},
        {"cp": 2, "pp": 2, "ep": 4},
        {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2},
        {"pp": 4, "ep": 2},
        {"tp": 2, "pp": 4, "etp": 2},
        {"tp": 2, "cp": 2, "ep": 2, "etp": 2, **ORDERS},
        {"tp": 2, "cp": 2, "pp": 2, "ep": 2, **ORDERS},
        {"tp": 2, "pp": 2, "etp": 2, "order": "pp-tp-cp-dp", "moe_order": "pp-ep-etp-edp"},
    )
]
SIZES: dict[str, Any] = {
    **MODEL, "layers": 8, "kv_heads": 8, "dense_first": 1, "moe_every": 2, "tied_embeddings": True, "positions": "learned",
    "max_positions": 8, "norm": "layernorm",
}  # fmt: skip
UNTIED = {**SIZES, "tied_embeddings": False, "norm": "rmsnorm"}
LIMIT = 0.5


class Found(NamedTuple):
    """The results of a rank on a fold.

    Args:
        sums: the reduction of 2^rank, by global parameter.
        norms: the norm of gradients of ones, with and without tied embeddings.
        clipped: the norm before clipping, and the largest error of any clipped gradient against one process.
    """

    sums: dict[str, float]
    norms: tuple[float, float]
    clipped: tuple[float, float]


def gradient_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64)


def measure(rank: int) -> list[Found]:
    found = []
    for fold in FOLDS:
        groups = Groups.create(fold, rank)
        owned = [Ownership(ModelSpec(**sizes), fold) for sizes in (SIZES, UNTIED)]
        tied, untied = (Transformer(ownership, groups, dtype=torch.float64) for ownership in owned)
        found.append(Found(_sums(tied, groups), (_norm(tied, groups), _norm(untied, groups)), _clipped(tied, groups)))
        groups.close()
    return found


def _sums(model: Transformer, groups: Groups) -> dict[str, float]:
    gradients = Gradients(model, groups)
    for parameter in model.parameters():
        gradients.sum_of(parameter).add_(2.0**groups.rank)
    gradients.reduce()
    parameters, sums = dict(model.named_parameters()), {}
    for local, parts in model.global_parts.items():
        values = gradients.views[parameters[local]].unique().tolist()
        assert len(values) == 1, f"{local} has several values"
        sums |= {name: values[0] for name, _ in parts}
    return sums


def _norm(model: Transformer, groups: Groups) -> float:
    gradients = Gradients(model, groups)
    for buffer in gradients.buffers:
        buffer.sums.fill_(1.0)
    return gradients.norms().total


def _clipped(model: Transformer, groups: Groups) -> tuple[float, float]:
    gradients, parameters = Gradients(model, groups), dict(model.named_parameters())
    whole = {spec.name: gradient_of(spec.name, spec.shape) for spec in parameter_table(model.spec)}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in whole.values()))
    placed = {
        name: (gradients.views[parameters[local]][index], whole[name][model.pieces[name].box])
        for local, parts in model.global_parts.items()
        for name, index in parts
    }
    for view, gradient in placed.values():
        view.copy_(gradient)
    before = gradients.clip(LIMIT).total
    scale = LIMIT / (norm + 1e-6)
    return before, max(float((view - gradient * scale).abs().max()) for view, gradient in placed.values())


@pytest.fixture(scope="module")
def measured(ranks: Any) -> list[list[Found]]:
    """The results by fold, then by rank."""
    return [list(found) for found in zip(*ranks(8).run(measure, timeout=300), strict=True)]


# The axes along which a gradient class is summed: their ranks hold the same weights and see other data.
SUMMED = {"dense": ("attention", {"dp", "cp"}), "replicated": ("attention", {"tp", "dp", "cp"}), "expert": ("moe", {"edp"})}


def took_part(fold: Fold, rank: int, kind: str) -> set[int]:
    """Return the ranks whose coordinates differ from this rank's only on the axes of a gradient class."""
    view, free = SUMMED[kind]
    mine = fold.coordinate(rank)[view]
    places = {other: fold.coordinate(other)[view] for other in range(8)}
    return {other for other, place in places.items() if all(place[a] == mine[a] for a in mine if a not in free)}


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_the_sum_of_2_to_the_rank_names_who_took_part(measured, fold: Fold) -> None:
    kinds = {spec.name: spec.gradient_class for spec in parameter_table(ModelSpec(**SIZES))}
    seen = set()
    for rank, found in enumerate(measured[FOLDS.index(fold)]):
        place = fold.attention.coordinate(rank)
        for name, value in found.sums.items():
            members = took_part(fold, rank, kinds[name])
            if name == "embedding.weight" and fold.pp > 1:
                assert place["pp"] in (0, fold.pp - 1), "a middle stage holds the embedding"
                ends = fold.groups("embedding")
                (mine,) = [pair for pair in ends if rank in pair]
                assert [fold.attention.coordinate(end)["pp"] for end in mine] == [0, fold.pp - 1]
                assert len({fold.attention.coordinate(end)["tp"] for end in mine}) == 1
                members = set().union(*(took_part(fold, end, "dense") for end in mine))
                assert len(members) == 2 * fold.dp * fold.cp
            assert value == sum(2.0**member for member in members), f"{name} on rank {rank}"
            seen.add(name)
    assert seen == kinds.keys()


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_the_norm_of_ones_is_the_root_of_the_number_of_parameters(measured, fold: Fold) -> None:
    expected = [math.sqrt(count_parameters(ModelSpec(**sizes))) for sizes in (SIZES, UNTIED)]
    for found in measured[FOLDS.index(fold)]:
        assert found.norms == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_the_clip_coefficient_is_that_of_one_process(measured, fold: Fold) -> None:
    table = parameter_table(ModelSpec(**SIZES))
    norm = math.sqrt(sum(float(gradient_of(spec.name, spec.shape).square().sum()) for spec in table))
    for before, error in (found.clipped for found in measured[FOLDS.index(fold)]):
        assert before == pytest.approx(norm, rel=1e-12)
        assert error < 1e-15


def test_nothing_is_read_before_all_chunks_have_arrived(ranks) -> None:
    """`finish` must wait for every chunk. On a fast link, small chunks would arrive in time without a wait."""
    assert ranks(2).run(_waited) == [[], []]


def _waited(rank: int) -> list[int]:
    """Return the chunks for which `finish` did not wait."""
    groups = Groups.create(Fold(2), rank)
    gradients = Gradients(model_of(groups.fold, groups), groups)
    under_way: list[int] = []

    class Watched(Pending):
        def wait(self) -> tuple[torch.Tensor, ...]:
            under_way.remove(id(self))
            return super().wait()

    for chunk in gradients.chunks(1 << 10):
        gradients.start(chunk).__class__ = Watched
    under_way += map(id, gradients._travelling)
    assert len(under_way) > 1
    gradients.finish()
    groups.close()
    return under_way


def test_clipping_scales_to_the_limit_and_leaves_small_gradients() -> None:
    model = model_of(dtype=torch.float64)
    gradients = Gradients(model, Groups.create(Fold(1)))
    for buffer in gradients.buffers:
        buffer.sums.fill_(1.0)
    norm = math.sqrt(count_parameters(model.spec))
    assert gradients.clip(2 * norm).total == pytest.approx(norm)
    assert all(buffer.sums.unique().tolist() == [1.0] for buffer in gradients.buffers)
    assert gradients.clip(None).total == gradients.clip(norm / 2).total == pytest.approx(norm)
    for buffer in gradients.buffers:
        torch.testing.assert_close(buffer.sums, torch.full_like(buffer.sums, 0.5))


def test_gradients_of_micro_batches_add_up() -> None:
    model = model_of()
    gradients, parameter = Gradients(model, Groups.create(Fold(1))), model.final_norm.weight
    for value in (1.0, 2.0):
        gradients.sum_of(parameter).add_(value)
    assert gradients.views[parameter].unique().tolist() == [3.0]
    assert parameter.grad is None
    gradients.zero()
    assert not any(buffer.sums.any() for buffer in gradients.buffers)


def test_bfloat16_weights_have_float32_masters_and_gradients() -> None:
    model = model_of(dtype=torch.bfloat16)
    engine = TorchEngine(model, Groups.create(Fold(1)), OptimizerSpec(lr=1e-5, clip=None))
    before = {key: tensor.clone() for key, tensor in engine.state().items()}
    text = torch.randint(0, 29, (2, 2, 9))
    losses = engine.train([Batch(tokens[:, :-1], tokens[:, 1:]) for tokens in text])
    assert len(losses) == 2
    assert {buffer.sums.dtype for buffer in engine.gradients.buffers} == {torch.float32}
    assert min(engine.update(1e-5).values()) > 0
    after = engine.state()
    assert after["model/embedding.weight"].dtype == torch.float32
    assert not torch.equal(after["model/embedding.weight"], before["model/embedding.weight"])
    for parameter, master in engine.masters.items():
        assert torch.equal(parameter, master.to(torch.bfloat16))
    assert all(float(buffer.sums.abs().max()) == 0 for buffer in engine.gradients.buffers)


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
    assert all(learning_rate(OptimizerSpec(decay=decay, min_lr=0.0), 150, 100) == 0 for decay in ("linear", "cosine"))


def test_the_measured_peak_is_a_rate_of_this_machine() -> None:
    rate = peak.matmul_peak(torch.device("cpu"), torch.float32, size=256, rounds=3)
    assert 1e8 < rate < 1e15


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(("mkl", "onednn"), [(6.0, 2.0), (2.0, 6.0)])
def test_the_peak_is_that_of_the_faster_library(monkeypatch: pytest.MonkeyPatch, mkl: float, onednn: float) -> None:
    """The utilisation of a run is at most 1, although experts do not use torch's own product everywhere."""
    now = [0.0]

    def takes(seconds: float) -> Callable[..., None]:
        def product(*arguments: object) -> None:
            now[0] += seconds

        return product

    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch, "mm", takes(mkl))
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", takes(onednn))
    assert peak.matmul_peak(torch.device("cpu"), torch.float32, size=256) == 2 * 256**3 / 2

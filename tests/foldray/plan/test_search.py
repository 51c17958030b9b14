"""The search: it considers every legal fold, and leaves out only candidates that are not among the best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foldray.blueprint import ModelSpec, Ownership
from foldray.costs.bounds import fold_bound, stage_bounds
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import ledger
from foldray.costs.ops import OpWork
from foldray.costs.passes import LAGS, with_best_lags
from foldray.costs.prediction import Step, predict
from foldray.errors import UserError
from foldray.fold import Fold, divisors
from foldray.graph import SliceCost
from foldray.orders import Ordering, Overlap, Sequences
from foldray.plan.search import Node, Planned, Refinement, search
from foldray.plan.space import Space

MODEL = ModelSpec.model_validate({"preset": "mixtral-8x22b", "layers": 4, "heads": 8, "kv_heads": 4, "hidden": 1024})
CLOSE = 1 - 1e-12


def space(gpus: int = 8, model: dict[str, Any] | None = None, constants: dict[str, float] | None = None, **changes: Any) -> Space:
    hardware = load_hardware("eos-h100").model_copy(update={"gpus_per_node": 4, "constants": constants or {}})
    job = Job(MODEL.model_copy(update=model or {}), 1024, 16)
    return Space(job, hardware, gpus, **{"degrees": (2,), "micro_batches": (1, 2), **changes})


def test_folds_are_all_that_divide_the_model_and_the_batch() -> None:
    legal = set()
    for tp, cp, pp, ep, etp in itertools.product(divisors(8), repeat=5):
        try:
            fold = Fold(8, tp, cp, pp, ep, etp)
            Ownership(MODEL, fold)
        except UserError:
            continue
        if 16 % fold.dp == 0 and pp <= MODEL.layers:
            legal.add(fold)
    assert set(space().folds()) == legal


@pytest.mark.gate(1 / 5)
@pytest.mark.parametrize(
    ("gpus", "changes"),
    [
        (1, {}),
        (4, {}),
        pytest.param(8, {}, marks=pytest.mark.nightly("all candidates for 8 GPUs are predicted")),
        (4, {"model": {"dense_first": 1}}),  # dense and MoE blocks; only the first position has a dense one
        (4, {"model": {"mtp_depth": 1}}),  # the last position has one more block, a second head, and the embedding
        (4, {"model": {"moe_every": 2}}),  # with virtual stages, each position may have one kind of block only
        (4, {"constants": {"crowding": 0.3}}),
        (4, {"zero": 3}),
    ],
    ids=str,
)
def test_what_is_not_looked_at_could_not_have_won(gpus: int, changes: dict[str, Any]) -> None:
    """Compare the search with the predictions of all candidates."""
    asked = space(gpus, **changes)
    refinement = Refinement(asked)
    everything = []
    queue = [refinement.bounded(grid) for grid in refinement.grids()]
    while queue:
        node = queue.pop()
        if isinstance(node.what, Planned):
            everything.append(node.what)
            continue
        for each in refinement.refined(node, lambda held: False):
            assert each.held >= node.held * CLOSE
            assert each.seconds >= node.seconds * CLOSE
            if isinstance(each.what, Planned):
                step = Step(each.what.candidate, OpWork(each.what.candidate, refinement.device))
                reductions = [step.prediction(other).seconds for other in asked.reductions]
                assert each.what.prediction.seconds == min(reductions) == step.prediction().seconds
                stages = stage_bounds(step.rank, step.layout.contents, step.pieces)
                apart = step.bound(stages), step.simulated_bound(), each.what.prediction.seconds
                assert all(low * CLOSE <= high for low, high in itertools.pairwise(apart))
                assert each.what.memory == ledger(each.what.candidate, step.rank, asked.imbalance)
            queue.append(each)
    best = sorted(everything, key=lambda each: (not each.fits, each.prediction.seconds))
    found = search(asked, 5, with_front=True)
    assert [each.prediction.seconds for each in found.best] == [each.prediction.seconds for each in best[:5]]
    for each in everything:
        assert any(
            other.prediction.seconds <= each.prediction.seconds and other.memory.total <= each.memory.total
            for other in found.front
        )
    assert search(asked, 5) == found._replace(front=[])


def test_a_bound_is_that_of_its_best_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bounds of others leave out once they are too large."""
    refinement = Refinement(space(8, {"dense_first": 1}))
    folds = [node.what for node in every_fold(refinement) if isinstance(node.what, list)]
    together = [refinement._least_seconds(groups) for groups in folds]

    def whole(*given: Any, enough: float) -> float:
        bound = fold_bound(*given)
        for share in (0.5, 0.9, 1.0, 1.1):
            some = fold_bound(*given, enough=share * bound)
            assert some == bound if share > 1 else share * bound <= some <= bound
        return bound

    monkeypatch.setattr("foldray.plan.search.fold_bound", whole)
    assert together == [min(refinement._least_seconds([group]) for group in groups) for groups in folds]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"dense_first": 1, "mtp_depth": 1, "shared_hidden": 512}},
        {"constants": {"crowding": 0.3}, "zero": 3},
        {"job": {"dispatch": "rank", "wire": "float8"}},
        {"job": {"context": "all_gather"}},
    ],
    ids=str,
)
def test_no_fold_is_faster_than_what_its_grid_of_attention_takes(changes: dict[str, Any]) -> None:
    given = {name: value for name, value in changes.items() if name != "job"}
    asked = space(16, **given)
    refinement = Refinement(replace(asked, job=replace(asked.job, **changes.get("job", {}))))
    for grid in refinement.grids():
        together = refinement.bounded(grid)
        for fold in refinement.refined(together._replace(seconds=0.0), lambda held: False):
            assert 0 < together.seconds * CLOSE <= fold.seconds


def test_folds_of_slow_grids_are_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, attention alone takes longer than the best steps."""
    priced, holding = list[Any](), Refinement._holding
    monkeypatch.setattr(Refinement, "_holding", lambda self, ranks: priced.append(self) or holding(self, ranks))
    asked = space(128)
    found = search(replace(asked, job=replace(asked.job, global_batch=128)), 5)
    assert found.legal > 1000
    assert len(priced) < found.legal / 2


def test_memory_that_is_too_much_leaves_out_nothing_else() -> None:
    refinement = Refinement(space(4))
    for fold in every_fold(refinement):
        for group in refinement.refined(fold, lambda held: False):
            chosen = chosen_within(refinement, group, math.inf)
            limit = chosen[len(chosen) // 2][0].total
            assert chosen_within(refinement, group, limit) == [each for each in chosen if each[0].total < limit]


def every_fold(refinement: Refinement) -> Iterator[Node]:
    for grid in refinement.grids():
        yield from refinement.refined(refinement.bounded(grid), lambda held: False)


def chosen_within(refinement: Refinement, group: Any, limit: float) -> list[tuple[Any, ...]]:
    """Return memory, order and stages of the choices of a group that need less memory than a limit."""
    choices = [node.what for node in refinement.refined(group, lambda held: held >= limit)]
    return [(choice.memory, choice.ordering, choice.staging) for choice in choices]  # type: ignore[union-attr]


def test_settled_sizes_are_kept() -> None:
    found = search(space(pins={"tp": 2, "ep": 4, "pp": 1}), 3)
    assert {(each.candidate.fold.tp, each.candidate.fold.ep, each.candidate.fold.pp) for each in found.best} == {(2, 4, 1)}


def test_no_legal_fold_is_told() -> None:
    with pytest.raises(UserError, match="no legal fold"):
        search(space(pins={"tp": 3}))


def test_experts_are_not_cut_by_tensors_where_they_need_not_be() -> None:
    """MoE Parallel Folding (table 3) trains Mixtral-8x22B on 128 H100 with whole experts, and EP inside the node."""
    job = Job(ModelSpec.model_validate({"preset": "mixtral-8x22b"}), 4096, 256)
    pins = {"tp": 2, "cp": 1, "pp": 8, "ep": 8}
    (whole,), (cut,) = (search(Space(job, load_hardware("eos-h100"), 128, {**pins, "etp": etp}), 1).best for etp in (1, 2))
    assert whole.fits
    assert whole.prediction.seconds < 0.95 * cut.prediction.seconds


def test_a_large_head_leaves_the_last_stage_fewer_blocks() -> None:
    """Of 16 blocks of Qwen3-235B on two positions, nine take about as long as seven and the head."""
    model = ModelSpec.model_validate({"preset": "qwen3-235b-a22b", "layers": 16})
    pins = {"tp": 1, "cp": 1, "pp": 2, "ep": 4, "etp": 1}
    (best,) = search(Space(Job(model, 4096, 64), load_hardware("h200"), 8, pins, micro_batches=(1,), batch_degrees=(1,)), 1).best
    sizes = best.candidate.stage_layers
    assert sizes
    assert [sum(sizes[place::2]) for place in (0, 1)] == [9, 7]
    even = replace(best.candidate, stage_layers=None)
    assert best.prediction.seconds < 0.97 * predict(even, load_hardware("h200")).seconds


def test_small_models_have_large_micro_batches() -> None:
    """Where the host sets the pace, every further sequence in an op is almost free."""
    job = Job(MODEL, 512, 64)
    (best,) = search(Space(job, load_hardware("h200"), 1, degrees=(2,)), 1).best
    assert best.candidate.micro_batch == 16


def test_a_plan_with_a_slow_link_hides_all_it_can() -> None:
    """Where all-to-alls take as long as the computation, sequences are cut, and gradients give way."""
    slow = load_hardware("eos-h100").model_copy(update={"gpus_per_node": 1})
    job = Job(MODEL.model_copy(update={"hidden": 2048}), 4096, 64)
    (best,) = search(Space(job, slow, 4, {"tp": 1, "cp": 1, "pp": 1, "ep": 2, "etp": 1}), 1).best
    ordering = best.candidate.ordering
    assert ordering.forward.kind != "sequential"
    assert ordering.reduction.kind == "chunks"


def test_attention_has_fewer_slices_where_the_host_pays_for_each() -> None:
    """Where the host's calls cost nothing, four slices hide more over a slow link than two."""
    slow = load_hardware("eos-h100").model_copy(update={"gpus_per_node": 1})
    job = Job(MODEL.model_copy(update={"hidden": 2048}), 8192, 4)
    orderings = list(Space(job, slow, 4, degrees=(2, 4), kinds=("stream",)).orderings(1, True, 1))
    assert [(each.degree, each.fewer_slices) for each in orderings] == [(1, None), (2, None), (4, None), (4, 2)]
    seconds = {
        (issue, each.fewer_slices): predict(Candidate(job, Fold(4, ep=4), each), slow, {"issue": issue}).seconds
        for issue, each in itertools.product((0.0, 4e-5), orderings[2:])
    }
    assert seconds[0.0, None] < seconds[0.0, 2]
    assert seconds[4e-5, 2] < 0.95 * seconds[4e-5, None]


def test_lags_are_those_with_the_shortest_passes() -> None:
    slow = load_hardware("eos-h100").model_copy(update={"gpus_per_node": 1})
    job = Job(ModelSpec.model_validate({"preset": "deepseek-moe", "layers": 4}), 4096, 8)
    device, cost = Device.of(job, slow), SliceCost.of_model(job.model.hidden, job.model.heads)
    each = Candidate(
        job, Fold(8, ep=8), Ordering(Overlap("stream", 1), Overlap("stream", 1), Sequences(4096, cost, 2).cut_for("stream", 8))
    )
    rank = OpWork(each, device).rank
    found = with_best_lags(each, rank).ordering
    seconds = {}
    for lags in itertools.product(LAGS, LAGS):
        forward, backward = (Overlap("stream", lag) for lag in lags)
        other = replace(each, ordering=each.ordering._replace(forward=forward, backward=backward))
        seconds[lags] = Step(other, OpWork(other, device)).passes()
    assert min(seconds.values()) < 0.99 * seconds[1, 1]
    assert seconds[found.forward.lag, found.backward.lag] == pytest.approx(min(seconds.values()), rel=1e-12)

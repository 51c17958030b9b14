"""The executor: it runs the ops of its list, works inside `loss.backward()`, and keeps no tensors without need."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from foldray.clock import Recording, replay, usage
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.graph import Op, SliceCost
from foldray.model import Batch
from foldray.orders import OVERLAPS, Ordering, Overlap, named_ordering
from foldray.runtime import Execution, Gradients, StepModule, Trace
from tests.foldray.parity import MODEL, engine_of, engine_on, make_recipe, model_of, sample

LENGTH = 32
COST = SliceCost.of_model(MODEL["hidden"], MODEL["heads"])
NAMES = ["sequential", *(f"{kind}:4@1" for kind in list(OVERLAPS)[1:])]


def batches_of(vocab: int, number: int = 2) -> list[Batch]:
    return [Batch(text[:, :-1], text[:, 1:]) for text in (sample(step, 2, LENGTH + 1, vocab) for step in range(number))]


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_an_ordinary_module(name: str) -> None:
    """Gradients accumulate and scale in `parameter.grad` as with any module. Hooks fire once per step."""
    model, whole = (model_of(dtype=torch.float64, layers=3, moe_every=2) for _ in range(2))
    step = StepModule(model, Groups.create(Fold(1)), named_ordering(name, LENGTH, COST))
    batches, parameters = batches_of(model.spec.vocab), list(model.parameters())
    fired: list[int] = []
    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: fired.append(number))  # type: ignore[misc]
    for batch in batches:
        (0.5 * step([batch])).backward()
    assert sorted(fired) == sorted([*range(len(parameters))] * 2)
    objectives, losses = zip(*(whole(batch) for batch in batches), strict=True)
    wanted = torch.autograd.grad(0.5 * sum(objectives), list(whole.parameters()))
    for parameter, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
    language = torch.stack([each.means()[0] for each in losses]).mean()
    torch.testing.assert_close(step(batches).double(), language, rtol=0, atol=1e-6)


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_gives_the_training_losses_and_keeps_nothing(name: str) -> None:
    model = model_of(dtype=torch.float64)
    execution = Execution(model, groups := Groups.create(Fold(1)), Gradients(model, groups), named_ordering(name, LENGTH, COST))
    batches = batches_of(model.spec.vocab, 3)
    for trained, evaluated in zip(execution.train(batches), execution.evaluate(batches), strict=True):
        for ours, wanted in zip(evaluated, trained, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


def test_padded_evaluation_may_have_batches_of_other_sizes(ranks) -> None:
    assert ranks(2).run(_uneven) == [True, True]


def _uneven(rank: int) -> bool:
    recipe = make_recipe(2, {"ep": 2}, model={"router": {"capacity_factor": 1.0, "pad": True}}, data={"seq_len": LENGTH})
    (batch,) = batches_of(recipe.model.vocab, 1)
    own = Batch(*(x[: 1 + rank] if x is not None else None for x in batch))
    with engine_on(recipe, rank) as (engine, _):
        (losses,) = engine.execution.evaluate([own])
    return bool(losses.language.isfinite())


def traced(rank: int, name: str) -> list[dict[str, Any]]:
    """Run three steps, and return the graph, the order, the spans and the times of each."""
    recipe = make_recipe(2, {"ep": 2}, data={"seq_len": LENGTH})
    groups = Groups.create(recipe.placed_fold, rank)
    execution = engine_of(recipe, groups).execution
    execution.reorder(named_ordering(name, LENGTH, COST))
    execution.trace, found = Trace(), []
    for _ in range(3):
        batches = batches_of(recipe.model.vocab, 1)
        execution.train(batches)
        graph = execution.step(batches)[0]
        found.append({"graph": graph, "order": execution.order(graph), "spans": dict(execution.trace.spans),
                      "times": execution.trace.times(graph)})  # fmt: skip
    groups.close()
    return found


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_op_is_recorded_in_the_lists_order(ranks, name: str) -> None:
    for found in ranks(2).run(traced, name):
        for step in found:
            graph, order, spans = step["graph"], step["order"], step["spans"]
            assert set(spans) == set(order)
            computed = [op for op in order if graph.channel(op) is None]
            for before, after in itertools.pairwise(computed):
                assert spans[before].end <= spans[after].start
            for op in order:
                assert all(spans[need].end <= spans[op].start + 1e-3 for need in graph.needs(op) if graph.channel(op) is None)
            used, times = usage(graph, spans), step["times"]
            assert 0 <= used.exposed <= used.communication
            assert times["forward_ms"] + times["backward_ms"] == pytest.approx(times["step_ms"])
            assert times["compute_ms"] == pytest.approx(used.compute * 1e3)


def test_the_simulator_repeats_a_step_from_its_recorded_costs(ranks) -> None:
    """A replayed step computes as long as the recorded one, and the replay of a replay changes nothing."""
    found = ranks(2).run(traced, "stream:4")
    step, spans = found[0][-1], [rank[-1]["spans"] for rank in found]
    graph, order = step["graph"], step["order"]
    simulated = replay(graph, [Recording(order, each) for each in spans])
    for used, own in zip(simulated.usage, spans, strict=True):
        assert used.compute == pytest.approx(usage(graph, own).compute)
        assert simulated.seconds >= used.compute
    # Two equal ranks wait for each other less than the recorded ones. A second replay of them changes nothing.
    alike = replay(graph, [Recording(order, simulated.spans)] * 2)
    again = replay(graph, [Recording(order, alike.spans)] * 2)
    assert again.seconds == pytest.approx(alike.seconds)
    assert all(again.spans[op] == pytest.approx(alike.spans[op]) for op in order)


def test_a_pipeline_is_recorded_too(ranks) -> None:
    assert all(ranks(2).run(_pipeline_is_recorded))


def _pipeline_is_recorded(rank: int) -> bool:
    recipe = make_recipe(2, {"pp": 2}, data={"seq_len": LENGTH})
    with engine_on(recipe, rank) as (engine, _):
        execution, batches = engine.execution, batches_of(recipe.model.vocab)
        execution.trace = Trace()
        execution.train(batches)
        return set(execution.trace.spans) == set(execution.step(batches)[1])


def test_ranks_with_other_schedules_are_told(ranks) -> None:
    assert ranks(2).run(_other_schedules) == [True, True]


def _other_schedules(rank: int) -> bool:
    recipe = make_recipe(2, {"ep": 2}, data={"seq_len": LENGTH})
    slicing = named_ordering("stream:4", LENGTH, COST).slicing
    with engine_on(recipe, rank) as (engine, _):
        engine.execution.reorder(Ordering(Overlap("stream", 1 + rank), Overlap("stream"), slicing))
        try:
            engine.execution.step(batches_of(recipe.model.vocab, 1))
        except RuntimeError as error:
            return "have other schedules" in str(error)
    return False


def saved_bytes(name: str, **more: Any) -> int:
    """Return the largest number of bytes that autograd keeps at once during a step."""
    model = model_of(layers=4, moe_every=2)
    ordering = named_ordering(name, 256, COST)._replace(**more)
    execution = Execution(model, groups := Groups.create(Fold(1)), Gradients(model, groups), ordering)
    text, alive, most = sample(0, 1, 257, model.spec.vocab), {}, 0
    batch = Batch(text[:, :-1], text[:, 1:])
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    class Kept:
        def __init__(self, x: torch.Tensor):
            nonlocal most
            self.x, storage = x, x.untyped_storage()
            self.key = storage.data_ptr()
            if self.key not in parameters:
                count, _ = alive.get(self.key, (0, 0))
                alive[self.key] = (count + 1, storage.nbytes())
                most = max(most, sum(size for _, size in alive.values()))

        def __del__(self) -> None:
            count, size = alive.get(self.key, (1, 0))
            alive[self.key] = (count - 1, size)
            if count <= 1:
                alive.pop(self.key, None)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
        execution.train([batch])
    return most


def test_no_schedule_keeps_more_than_sequential() -> None:
    sequential = saved_bytes("sequential")
    for name in NAMES[1:]:
        assert saved_bytes(name) <= 1.05 * sequential, name


def test_recomputation_keeps_less() -> None:
    for name in ("sequential", "one_a_one_m:4"):
        assert saved_bytes(name, recompute=("attention", "ffn", "expert")) < 0.6 * saved_bytes(name), name


def test_an_op_that_lost_its_input_says_so() -> None:
    model = model_of()
    execution = Execution(model, groups := Groups.create(Fold(1)), Gradients(model, groups))
    (batch,) = batches_of(model.spec.vocab, 1)
    graph, _ = execution.step([batch])
    order = [op for op in execution.order(graph) if op != Op("merge", "F", 0)]
    execution._orders[graph] = tuple(order)
    with pytest.raises(RuntimeError, match=r"tokens 0…31 are not all here"):
        execution.train([batch])

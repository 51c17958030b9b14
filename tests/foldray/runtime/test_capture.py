"""Ops can be captured: replayed without Python, on a stand-in for CUDA graphs (`standin.py`), steps have the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from foldray.comm import Groups
from foldray.kinds import ATTENTION, EMBED, FFN, HEAD, MERGE, PROJECT, ROUTE
from foldray.model import all_losses
from foldray.moe import Router
from foldray.recipe import Recipe
from foldray.runtime import Trace, micro_batch
from foldray.runtime.micro_batch import MicroBatch
from foldray.runtime.op_graphs import Compute, Computed, OpGraphs
from foldray.schedule import Op
from tests.foldray.parity import engine_of, make_recipe, own_batches
from tests.foldray.standin import NotCapturable, Slot, slots_of, survey

CAPTURED = (ATTENTION, PROJECT, ROUTE, MERGE, FFN, EMBED, HEAD)
STEPS = 3  # that replay, or record and replay


def captured(slots: Sequence[Slot], slot_of: Mapping[int, int]) -> type[OpGraphs]:
    """Return graphs of ops that are recorded for the first micro-batch of each slot, and replayed for later ones."""

    class CapturedOps(OpGraphs):
        def compute(self, op: Op, compute: Compute, *inputs: torch.Tensor, beside: Sequence[torch.Tensor] = ()) -> Computed:
            def call(*given: torch.Tensor) -> Computed:
                return OpGraphs.compute(self, op, compute, *given[: len(inputs)], beside=given[len(inputs) :])

            return self._run(op, call, [*inputs, *beside]) if self.training else call(*inputs, *beside)

        def compute_again(self, op: Op, *inputs: torch.Tensor) -> Computed:
            again = op._replace(direction="R")
            return self._run(again, lambda *given: OpGraphs.compute_again(self, op, *given), inputs)

        def differentiate(self, op: Op, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return self._run(op, lambda *given: OpGraphs.differentiate(self, op, given), gradients)

        def add_left(self, op: Op) -> None:
            self._run(op, lambda: OpGraphs.add_left(self, op), ())

        def _run(self, op: Op, call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
            if op.kind not in CAPTURED:
                return call(*inputs)
            self.begin()
            return slots[slot_of[op.micro_batch]].run(op._replace(micro_batch=0), call, inputs)

    return CapturedOps


def steps(
    rank: int,
    recipe: Recipe,
    captures: bool,
    one_slot: bool = False,
    then: str | None = None,
    documents: bool = False,
    made: list[Slot] | None = None,
) -> list[tuple[list[float], list[torch.Tensor]]]:
    """Train, and return the losses and the sums of gradients of the last steps.

    Args:
        captures: whether ops are captured.
        one_slot: whether all micro-batches have one slot, though several are in flight.
        then: another schedule, whose lists replay what was recorded for the recipe's own.
        made: gets the slots.
    """
    groups = Groups.create(recipe.placed_fold, rank)
    engine, constants, found = engine_of(recipe, groups), dict[int, torch.Tensor](), []
    execution, ops = engine.execution, OpGraphs

    def train() -> None:
        losses = all_losses(engine.train(own_batches(recipe, groups, len(found), documents=documents)), groups.control)
        found.append((losses.means().tolist(), [buffer.sums.clone() for buffer in engine.gradients.buffers]))
        engine.update(recipe.optimizer.lr)
        engine.model.update_biases(losses.count_ME)

    while execution.lacks_costs:
        execution.trace = Trace()
        train()
        execution.learn_costs()
    execution.trace = None
    with survey(constants):
        train()
    if captures:
        _, order = execution.step(own_batches(recipe, groups, 0, documents=documents))
        slot_of = slots_of(op.micro_batch for op in order if op.kind in CAPTURED)
        slot_of = dict.fromkeys(slot_of, 0) if one_slot else slot_of
        slots = [Slot(constants) for _ in range(1 + max(slot_of.values()))]
        ops = captured(slots, slot_of)
        if made is not None:
            made += slots
    with mock.patch.object(micro_batch, "OpGraphs", ops):
        train()
        if then is not None:
            other = recipe.model_dump(exclude_unset=True) | {"schedule": {"kind": then, "degree": recipe.schedule.degree}}
            execution.reorder(Recipe.parse(other).ordering)
        for _ in range(STEPS - 1):
            train()
    engine.close()
    groups.close()
    return found[-STEPS:]


def same(eager: Any, replayed: Any) -> bool:
    pairs = zip(eager, replayed, strict=True)
    return all(a[0] == b[0] and all(map(torch.equal, a[1], b[1])) for a, b in pairs)


SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "moe_only": {"kind": "moe_only", "degree": 2},
    "aaam": {"kind": "aaam", "degree": 2},
    "one_a_one_m": {"kind": "one_a_one_m", "degree": 4},
    "stream": {"kind": "stream", "degree": 2},
    "stream in four": {"kind": "stream", "degree": 4, "lag": 1},
    "stream apart": {"kind": "stream", "degree": 4, "weight_gradients": "apart"},
    "weave": {"kind": "weave", "degree": 2},
    "list": {"kind": "list", "degree": 2},
    "flow": {"kind": "flow", "degree": 2},
    "attention again": {"kind": "stream", "degree": 4, "recompute": ["attention"]},
    "all again": {"kind": "aaam", "degree": 2, "recompute": ["attention", "expert", "ffn"]},
}
MODELS: dict[str, dict[str, Any]] = {
    "shared expert": {},
    "dense blocks": {"moe_every": 2, "layers": 2, "shared_hidden": 0},
    "sigmoid and bias": {"router": {"score": "sigmoid", "bias_rate": 0.01, "balance_loss": 0.1}},
    "latent": {"latent_rank": 8, "latent_query_rank": 6, "rope_dim": 2, "value_dim": 4, "kv_heads": 8},
    "windows": {"windows": ["sliding:5", "full"]},
    "sinks and biases": {"attention_sinks": True, "attention_bias": "all", "shared_gate": True},
    "further tokens": {"mtp_depth": 1},
    "tied, layernorm, learned": {
        "tied_embeddings": True, "norm": "layernorm", "ffn": "gelu", "positions": "learned", "max_positions": 64, "kv_heads": 8,
    },
    "padded": {"router": {"capacity_factor": 1.0, "pad": True, "balance_loss": 0.1, "z_loss": 0.01}},
}  # fmt: skip
CASES = [
    *((schedule, "shared expert") for schedule in SCHEDULES),
    *(("stream", model) for model in MODELS if model != "shared expert"),
    *(("attention again", model) for model in MODELS if model != "shared expert"),
    *(("stream apart", model) for model in MODELS if model != "shared expert"),
    *(("list", model) for model in ("latent", "windows", "further tokens", "padded")),
]  # fmt: skip


@pytest.mark.gate(4)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("schedule", "model"), CASES, ids=lambda name: name.replace(" ", "-"))
def test_replayed_steps_have_the_same_bits(schedule: str, model: str, precision: str) -> None:
    recipe = make_recipe(
        1, model=MODELS[model], schedule=SCHEDULES[schedule], precision=precision, moe={"experts": "grouped"}, engine={"zero": 1}
    )
    assert same(steps(0, recipe, False), steps(0, recipe, True))


@pytest.mark.parametrize(
    ("fold", "schedule"),
    [
        ({"pp": 2}, {"kind": "stream", "degree": 2}),
        ({"pp": 2}, {"kind": "weave", "degree": 2}),
        ({"pp": 2}, {"virtual_stages": 2}),
        ({"ep": 2}, {"kind": "stream", "degree": 4}),
    ],
    ids=str,
)
@pytest.mark.gate(1)
def test_ranks_with_micro_batches_in_flight(ranks, fold: dict[str, Any], schedule: dict[str, Any]) -> None:
    recipe = make_recipe(2, fold, schedule=schedule, precision="float32", moe={"experts": "grouped"})
    eager, replayed = (ranks(2).run(steps, recipe, captures, timeout=240) for captures in (False, True))
    assert all(map(same, eager, replayed))


FLOW = make_recipe(1, schedule=SCHEDULES["flow"], precision="float32")
STREAM = make_recipe(1, schedule=SCHEDULES["stream"], precision="float32")


def test_a_slot_for_two_micro_batches_in_flight_is_noticed() -> None:
    with pytest.raises(NotCapturable, match="comes after the slot has been replayed"):
        steps(0, FLOW, True, one_slot=True)


def test_a_replay_in_another_order_is_noticed() -> None:
    """What was recorded in the order of one schedule shares memory in this order alone."""
    recipe = make_recipe(1, schedule={"kind": "stream", "degree": 4}, precision="float32")
    try:
        replayed = steps(0, recipe, True, then="aaam")
    except RuntimeError:  # other numbers lie where an op reads indices
        return
    assert not same(steps(0, recipe, False, then="aaam"), replayed)


def test_a_tensor_that_is_no_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def embed(self: MicroBatch, op: Op) -> None:
        (x_BsH,), _ = self.graphs.compute(op, lambda: Computed([self.model.embed(self.batch, self._places[op.part])]))
        self.inputs[op.layer].put(self._tokens(op), x_BsH)

    monkeypatch.setattr(MicroBatch, "embed_forward", embed)
    with pytest.raises(NotCapturable, match="is no input, and does not stay"):
        steps(0, STREAM, True)


def test_a_weight_at_another_address_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(1, model=MODELS["sigmoid and bias"], schedule=SCHEDULES["stream"], precision="float32")
    eager = steps(0, recipe, False)

    def update(self: Router, count_E: torch.Tensor) -> None:
        self.bias = self.bias + self.spec.bias_rate * torch.sign(count_E.double().mean() - count_E).to(self.bias.dtype)

    monkeypatch.setattr(Router, "update_bias", update)
    assert same(eager, steps(0, recipe, False)), "without graphs, any address does"
    assert not same(eager, steps(0, recipe, True))


@pytest.mark.parametrize(
    ("why", "sections", "options"),
    [
        ("masks of documents are made anew", {}, {"documents": True}),
        ("the host reads how many rows are kept", {"model": {"router": {"capacity_factor": 1.0}}}, {}),
    ],
)
def test_what_is_run_as_before(why: str, sections: dict[str, Any], options: dict[str, bool]) -> None:
    recipe = make_recipe(1, schedule=SCHEDULES["stream"], precision="float32", **sections)
    with pytest.raises(NotCapturable):
        steps(0, recipe, True, **options)


def test_micro_batches_take_the_lowest_free_slot() -> None:
    assert slots_of([0, 1, 0, 2, 1, 2, 3, 3]) == {0: 0, 1: 1, 2: 0, 3: 0}
    assert slots_of([0, 1, 0, 2, 1, 3, 2, 3]) == {0: 0, 1: 1, 2: 0, 3: 1}


MOST_CALLS = {
    "embed F": 3, "attention F": 49, "route F": 39, "merge F": 5, "head F": 17,
    "embed B": 2, "attention B": 79, "route B": 54, "merge B": 13, "head B": 33,
}  # fmt: skip


def test_ops_make_few_calls() -> None:
    """A GPU starts about a kernel for each. More of them cost its host time, and the GPU the pauses between them."""
    made: list[Slot] = []
    recipe = make_recipe(
        1,
        model={"layers": 1, "shared_hidden": 0},
        schedule=SCHEDULES["stream in four"],
        precision="bfloat16",
        moe={"experts": "grouped"},
    )
    steps(0, recipe, True, made=made)
    (slot,) = made
    most = Counter[str]()
    for op, calls in slot.calls().items():
        most[f"{op.kind} {op.direction}"] = max(calls, most[f"{op.kind} {op.direction}"])
    assert {name: calls for name, calls in most.items() if calls > MOST_CALLS[name]} == {}

"""Captured ops: replayed without Python, on a stand-in for CUDA graphs (`standin.py`), steps have the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from foldray.comm import Groups
from foldray.errors import UserError
from foldray.graph import Op
from foldray.kernels import experts
from foldray.kinds import ROUTE
from foldray.model import Batch, Transformer, all_losses
from foldray.moe import Router
from foldray.recipe import CAPTURED, Recipe, told_of_capture, uncaptured
from foldray.runtime import Engine, Trace, graphs
from foldray.runtime.graphs import EAGER_STEPS, Captures, slots_of
from foldray.runtime.micro_batch import MicroBatch
from foldray.runtime.op_graphs import Computed
from tests.foldray.parity import engine_of, make_recipe, own_batches
from tests.foldray.standin import NotCapturable, Standin, survey
from tests.pool import RankFailure

STEPS = 3  # that replay, or record and replay


_closed = uncaptured


def steps(
    rank: int,
    recipe: Recipe,
    captures: bool,
    documents: bool = False,
    between: Callable[[Engine], Any] = lambda engine: None,
    made: list[Standin] | None = None,
    checks: bool = False,
) -> list[tuple[list[float], list[torch.Tensor]]]:
    """Train with the experts of a GPU, and return the losses and the sums of gradients of the last steps.

    Args:
        captures: whether ops are captured.
        between: is done after the first step that captures.
        made: gets the stand-in.
    """
    groups = Groups.create(recipe.placed_fold, rank)
    engine, constants, found = engine_of(recipe, groups), dict[int, Any](), []
    execution, standin = engine.execution, Standin(constants)
    gpus = mock.patch.object(experts, "_implementation", experts._on_gpus)

    def train() -> None:
        with gpus:
            trained = engine.train(own_batches(recipe, groups, len(found), documents=documents))
        losses = all_losses(trained, groups.control)
        found.append((losses.means().tolist(), [buffer.sums.clone() for buffer in execution.gradients.buffers]))
        engine.update(recipe.optimizer.lr)
        engine.model.update_biases(losses.count_ME)

    while execution.lacks_costs:
        execution.trace = Trace()
        train()
        execution.learn_costs()
    execution.trace = None
    if captures:
        execution.captures = Captures(standin, set(CAPTURED) - set(_closed(recipe)), checks)
    for _ in range(EAGER_STEPS):
        with survey(constants):
            train()
    train()
    between(engine)
    for _ in range(STEPS - 1):
        train()
    if made is not None:
        made.append(standin)
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
    "sigmoid and bias": {
        "router": {"score": "sigmoid", "bias_rate": 0.01, "balance_loss": 0.1, "balance_scope": "global_batch"}
    },
    "latent": {"latent_rank": 8, "latent_query_rank": 6, "rope_dim": 2, "value_dim": 4, "kv_heads": 8},
    "windows": {"windows": ["sliding:5", "full"]},
    "sinks and biases": {"attention_sinks": True, "attention_bias": "all", "shared_gate": True},
    "further tokens": {"mtp_depth": 1},
    "gates, norms behind, factors": {
        "attention_gate": "head", "norms": "both", "residual_scale": 0.4, "embedding_scale": 3.0, "query_growth": 0.3,
        "query_growth_positions": 4,
    },
    "tied, layernorm, learned": {
        "tied_embeddings": True, "norm": "layernorm", "ffn": "gelu", "positions": "learned", "max_positions": 64, "kv_heads": 8,
    },
    "expert biases": {"expert_bias": True, "ffn": "gelu", "shared_hidden": 0},
    "adapters": {"adapter": {"rank": 3}, "expert_bias": True},
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


def test_a_slot_for_two_micro_batches_in_flight_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "slots_of", lambda order: dict.fromkeys((op.micro_batch for op in order), 0))
    with pytest.raises(NotCapturable, match="comes after the slot has been replayed"):
        steps(0, FLOW, True)


def reordered(kind: str) -> Callable[[Engine], None]:
    recipe = make_recipe(1, schedule={"kind": kind, "degree": 4}, precision="float32")
    return lambda engine: engine.execution.reorder(recipe.ordering)


def test_another_list_is_captured_anew() -> None:
    recipe, then, made = make_recipe(1, schedule={"kind": "stream", "degree": 4}, precision="float32"), reordered("aaam"), []
    assert same(steps(0, recipe, False, between=then), steps(0, recipe, True, between=then, made=made))
    assert not made[0].slots, "steps of a new list run without graphs at first"


def test_a_replay_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded in the order of one schedule shares memory in this order alone."""
    recipe, then = make_recipe(1, schedule={"kind": "stream", "degree": 4}, precision="float32"), reordered("aaam")
    held: list[Any] = []
    slice_ = Transformer.slice
    monkeypatch.setattr(Captures, "forget", lambda self: None)
    monkeypatch.setattr(Transformer, "slice", lambda self, lengths: held.append(dict(self._positions)) or slice_(self, lengths))
    try:
        replayed = steps(0, recipe, True, between=then)
    except RuntimeError:  # other numbers lie where an op reads indices
        return
    assert not same(steps(0, recipe, False, between=then), replayed)


def test_a_tensor_that_is_no_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def embed(self: MicroBatch, op: Op) -> None:
        (x_BsH,), _ = self.graphs.compute(op, lambda: Computed([self.model.embed(self.batch, self._places[op.part])]))
        self.inputs[op.layer].put(self._tokens(op), x_BsH)

    monkeypatch.setattr(MicroBatch, "embed_forward", embed)
    with pytest.raises(NotCapturable, match="is no input, and does not stay"):
        steps(0, STREAM, True)


def test_a_weight_at_another_address_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(1, model=MODELS["sigmoid and bias"], schedule=SCHEDULES["stream"], precision="float32")

    def update(self: Router, count_E: torch.Tensor) -> None:
        self.bias = self.bias + self.spec.bias_rate * torch.sign(count_E.double().mean() - count_E).to(self.bias.dtype)

    monkeypatch.setattr(Router, "update_bias", update)
    with pytest.raises(NotCapturable, match=r"a tensor .* that an op reads is gone"):
        steps(0, recipe, True)


POSITION = {"capacity_factor": 1.0, "pad": True, "drop": "position", "drop_scope": "sequence"}
GROUPED = {"experts": "grouped"}
CHUNKS = {"kind": "stream", "degree": 2, "reduction": "chunks"}
GATES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "documents": (1, {}, {"data": {"mask_documents": True}}, "attention project"),
    "dropping": (1, {}, {"model": {"router": {"capacity_factor": 1.0}}}, "route merge expert"),
    "dropping over ranks": (2, {"cp": 2}, {"model": {"router": POSITION}}, "attention project route merge"),
    "tensor parallelism": (2, {"tp": 2}, {}, "attention project shared ffn embed head"),
    "shared experts over ranks": (2, {"tp": 2}, {}, "shared attention project ffn embed head"),
    "context parallelism": (2, {"cp": 2}, {}, "attention project"),
    "one row for a rank": (2, {"ep": 2}, {"moe": {**GROUPED, "dispatch": "rank"}}, "merge expert"),
    "DeepSpeed's gates": (1, {}, {"moe": {"backend": "deepspeed"}}, "route merge expert"),
    "workers for experts": (
        4, {}, {"placement": {"attention": 2, "experts": 2}, "schedule": {"kind": "af_pipe"}}, "route merge expert",
    ),
    "experts over ranks": (2, {"ep": 2}, {}, "expert"),
    "slices of experts over ranks": (2, {"etp": 2}, {}, "expert"),
    "experts in a loop": (1, {}, {"moe": {"experts": "loop"}}, "expert"),
    "experts in float32": (1, {}, {"precision": "float32"}, "expert"),
    "experts of odd sizes": (1, {}, {"model": {"expert_hidden": 12}}, "expert"),
    "ZeRO-2": (2, {}, {"engine": {"zero": 2}}, "all"),
    "ZeRO-2 by DeepSpeed": (
        2, {}, {"engine": {"kind": "deepspeed", "zero": 2}, "schedule": CHUNKS}, "all",
    ),
}  # fmt: skip
OPEN: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "DeepSpeed": (1, {}, {"engine": {"kind": "deepspeed", "zero": 1}}, ""),
    "DeepSpeed, its own ZeRO-2": (2, {}, {"engine": {"kind": "deepspeed", "zero": 2}}, ""),
    "DeepSpeed, sums by the list": (
        2, {}, {"engine": {"kind": "deepspeed", "zero": 1}, "schedule": CHUNKS}, "",
    ),
    "ZeRO-1 in chunks": (
        2, {}, {"engine": {"zero": 1}, "schedule": CHUNKS}, "",
    ),
    "ETP": (2, {"etp": 2}, {"precision": "float32"}, "expert"),
    "a pattern in place of routers": (1, {}, {"model": {"router": {"skew": 0.5}}}, ""),
    "positions within sequences": (1, {}, {"model": {"router": POSITION}}, ""),
    "padded over ranks": (2, {"ep": 2}, {"model": {"router": POSITION}}, ""),
    "padded, in float32": (1, {}, {"model": {"router": POSITION}, "precision": "float32"}, ""),
    "narrow rows": (2, {"ep": 2}, {"moe": {**GROUPED, "wire": "float8"}}, "expert"),
}  # fmt: skip


def gated(workers: int, fold: dict[str, Any], sections: dict[str, Any]) -> Recipe:
    return make_recipe(workers, fold, **{"schedule": SCHEDULES["stream"], "precision": "bfloat16", "moe": GROUPED, **sections})


def ungated_steps(rank: int, recipe: Recipe, kinds: str) -> Any:
    """Capture the first of these kinds, though a recipe says that it cannot be captured."""
    closed = {kind: "" for kind in CAPTURED if kind != kinds.split()[0]}
    with mock.patch(f"{__name__}._closed", return_value=closed):
        return steps(rank, recipe, True, documents=recipe.data.mask_documents)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.gate(4)
def test_ops_that_cannot_be_captured_run_as_before(ranks, gate: str) -> None:
    workers, fold, sections, kinds = GATES[gate]
    recipe = gated(workers, fold, sections)
    closed = " ".join(CAPTURED) if kinds == "all" else kinds
    assert sorted(uncaptured(recipe)) == sorted(closed.split())
    documents = recipe.data.mask_documents
    eager, replayed = (ranks(workers).run(steps, recipe, captures, documents, timeout=240) for captures in (False, True))
    assert all(map(same, eager, replayed))
    if "ZeRO-2" in gate:  # sums of gradients that were freed are memory of others
        replayed = ranks(workers).run(ungated_steps, recipe, closed, timeout=240)
        assert not all(map(same, eager, replayed)), "the gate is shut without need"
        return
    with pytest.raises(RankFailure, match=r"NotCapturable|The size of tensor"):
        ranks(workers).run(ungated_steps, recipe, closed, timeout=240)


@pytest.mark.parametrize("case", OPEN)
@pytest.mark.gate(3)
def test_ops_are_captured_beside(ranks, case: str) -> None:
    workers, fold, sections, closed = OPEN[case]
    recipe = gated(workers, fold, sections)
    assert " ".join(uncaptured(recipe)) == closed
    eager, replayed = (ranks(workers).run(steps, recipe, captures, timeout=240) for captures in (False, True))
    assert all(map(same, eager, replayed))


@pytest.mark.parametrize(
    ("graphs", "gpu", "told"),
    [
        ("off", True, None),
        ("auto", False, "schedule.graphs=auto: CUDA graphs need GPUs, so ops run without them"),
        (
            "check", True,
            "schedule.graphs=check: these ops run without graphs: attention, project (data.mask_documents makes masks for every "
            "batch); expert, merge, route (without model.router.pad, the host counts the rows that are not dropped)",
        ),
    ],
)  # fmt: skip
def test_one_line_says_what_is_not_captured(graphs: str, gpu: bool, told: str | None) -> None:
    recipe = make_recipe(
        1,
        schedule={"graphs": graphs},
        cluster={"gpu": gpu},
        data={"mask_documents": True},
        model={"router": {"capacity_factor": 1.0}},
    )
    assert told_of_capture(recipe) == told


def test_sequences_of_another_length_free_nothing_that_is_read() -> None:
    recipe, text = make_recipe(1, precision="float32"), torch.arange(8).view(1, 8)
    evaluate = lambda engine: engine.execution.evaluate([Batch(text, text)])  # noqa: E731
    assert same(steps(0, recipe, False, between=evaluate), steps(0, recipe, True, between=evaluate))


def test_a_step_that_captures_is_compared_with_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(1, model=MODELS["sigmoid and bias"], schedule=SCHEDULES["stream"], precision="float32")
    assert same(steps(0, recipe, False), steps(0, recipe, True, checks=True))
    kept = []

    def update(self: Router, count_E: torch.Tensor) -> None:
        kept.append(self.bias)  # graphs go on to read it
        self.bias = self.bias + 10 * torch.sign(count_E.double().mean() - count_E).to(self.bias.dtype)

    monkeypatch.setattr(Router, "update_bias", update)
    with pytest.raises(UserError, match=r"schedule.graphs.*another gradient of .*legal: off"):
        steps(0, recipe, True, checks=True)


def test_an_alias_reads_memory_that_it_does_not_keep() -> None:
    x = torch.arange(12.0).view(3, 4)[1:, ::2]
    alias = graphs._alias(x)
    x.add_(1)
    assert torch.equal(alias, x)
    assert alias.stride() == x.stride()
    assert alias.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    weak = StorageWeakRef(x.untyped_storage())
    del x
    assert weak.expired()


def test_micro_batches_take_the_lowest_free_slot() -> None:
    def slots(*micro_batches: int) -> dict[int, int]:
        seen = Counter[int]()
        order = []
        for micro_batch in micro_batches:
            order.append(Op(ROUTE, "F", seen[micro_batch], 0, micro_batch))
            seen[micro_batch] += 1
        return slots_of(order)

    assert slots(0, 1, 0, 2, 1, 2, 3, 3) == {0: 0, 1: 1, 2: 0, 3: 0}
    assert slots(0, 1, 0, 2, 1, 3, 2, 3) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert slots(0, 0, 1, 2, 2) == {0: 0, 1: 1, 2: 0}, "micro-batch 1 has other ops, which lie elsewhere"


MOST_CALLS = {
    "embed F": 3, "attention F": 49, "route F": 39, "merge F": 5, "head F": 17,
    "embed B": 2, "attention B": 79, "route B": 54, "merge B": 13, "head B": 33, "expert F": 5, "expert B": 12,
}  # fmt: skip


def test_ops_make_few_calls() -> None:
    """A GPU starts about a kernel for each. More of them cost its host time, and the GPU the pauses between them."""
    made: list[Standin] = []
    recipe = make_recipe(
        1,
        model={"layers": 1, "shared_hidden": 0},
        schedule=SCHEDULES["stream in four"],
        precision="bfloat16",
        moe={"experts": "grouped"},
    )
    steps(0, recipe, True, made=made)
    most = Counter[str]()
    for op, calls in made[0].calls.items():
        most[f"{op.kind} {op.direction}"] = max(calls, most[f"{op.kind} {op.direction}"])
    assert {name: calls for name, calls in most.items() if calls > MOST_CALLS[name]} == {}

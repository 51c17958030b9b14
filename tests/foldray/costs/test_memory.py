"""The memory ledger against counts by hand, and against the tensors of real runs."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from foldray.blueprint import ModelSpec, Ownership, grouping
from foldray.clock import COMPUTE
from foldray.comm import Groups
from foldray.costs.activations import block_activations, slices_of
from foldray.costs.apart import ApartWork, Sides
from foldray.costs.candidate import Candidate, Content, Job, StageForm
from foldray.costs.device import Device
from foldray.costs.hardware import counts, load_hardware
from foldray.costs.memory import Memory, content_parameters, in_flight, ledger, parameters
from foldray.costs.rank import RankCosts
from foldray.finding import find
from foldray.fold import Fold
from foldray.graph import PipelineGraph, SliceCost
from foldray.kinds import HEAD
from foldray.model import Batch, Transformer
from foldray.moe import MoeBackend
from foldray.orders import Ordering, named_ordering
from foldray.recipe import Recipe
from foldray.runtime import Execution, Gradients
from foldray.runtime.halves import micro_batch_type
from foldray.runtime.micro_batch import MicroBatch
from foldray.runtime.op_graphs import OpGraphs
from foldray.runtime.weights import Weights
from tests.foldray.live import Live, storage
from tests.foldray.parity import MODEL, engine_of, go_on, make_recipe, model_of, sample

EOS = load_hardware("eos-h100").model_copy(update={"processors": 1})  # runs are those of a CPU


def rank_of(model: ModelSpec, fold: Fold, length: int, dtype: str = "bf16", zero: int = 1) -> RankCosts:
    job = Job(model, length, 4 * fold.dp)
    return RankCosts(job, fold, Device.of(job, EOS), 1, zero)


# Counts by hand, for a model and a fold: the dense and expert parameters of a position, and their bytes.

MIXTRAL = ModelSpec.model_validate({"preset": "mixtral-8x22b"})
QWEN = ModelSpec.model_validate({"preset": "qwen2-57b-a14b"})
SMALL = ModelSpec(layers=4, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn_hidden=16, experts=4, topk=1, expert_hidden=8,
                  vocab=10, moe_every=2, ffn="gelu", norm="layernorm", tied_embeddings=True)  # fmt: skip


def test_mixtral_by_hand() -> None:
    """TP2 EP8 PP8 on 128 GPUs: a GPU has 7 blocks, with one expert and half of the attention of each block."""
    rank = rank_of(MIXTRAL, Fold(128, tp=2, pp=8, ep=8), 4096)
    attention = 2 * 6144 * 6144 + 2 * 6144 * 1024
    whole = 2 * 6144 + 6144 * 8  # norms and the router
    expert = 3 * 6144 * 16384
    count = rank.elements(Content(((MIXTRAL.block(0), 7),), True, None))
    assert count == {"dp_cp": 7 * attention // 2 + 32000 * 6144 // 2, "tp_dp_cp": 7 * whole, "edp": 7 * expert}
    # dp = 8, and edp = 128 / (8 · 8) = 2. A rank has all bf16 weights and float32 gradients of its boxes. The ranks of a group
    # share the float32 weights, the summed gradients, and the two moments.
    every, shared = sum(count.values()), count["dp_cp"] / 8 + count["tp_dp_cp"] / 16 + count["edp"] / 2
    held = parameters(rank.fold, rank.zero, rank.device.bytes, count)
    assert held.weights == pytest.approx(2 * every + 4 * shared)
    assert held.gradients == pytest.approx(4 * every + 4 * shared)
    assert held.optimizer == pytest.approx(8 * shared)


def test_qwen_by_hand() -> None:
    """EP4 ETP2 TP2 PP4 on 64 GPUs. The last position has the head. TP cuts the shared experts, but not their gate."""
    rank = rank_of(QWEN, Fold(64, tp=2, pp=4, ep=4, etp=2), 4096)
    attention = (2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512) // 2  # with biases of queries, keys and values
    shared = 3 * 3584 * 20480 // 2
    whole = 2 * 3584 + 3584 * 64 + 3584
    expert = 3 * 3584 * 2560 * 64 // 8
    count = rank.elements(Content(((QWEN.block(0), 7),), False, QWEN.block(0)))
    dense = 7 * (attention + shared) + 151936 * 3584 // 2
    assert count == {"dp_cp": dense, "tp_dp_cp": 7 * whole + 3584, "edp": 7 * expert}


def test_a_small_model_by_hand() -> None:
    """ZeRO-3 on two ranks in float32. Dense and MoE blocks alternate. The position has the tied embedding and the head."""
    rank = rank_of(SMALL, Fold(2), 16, "fp32", zero=3)
    rank.device = Device(EOS, "fp32", 4)
    attention = 2 * 8 * 8 + 2 * 8 * 4 + 2 * 8  # q and o, k and v, norm
    dense = 2 * 8 * 16 + 2 * 8
    route = 8 * 4 + 2 * 8
    ends = 10 * 8 + 2 * 8 + (SMALL.max_positions * 8 if SMALL.positions == "learned" else 0)
    count = rank.elements(Content(((SMALL.block(0), 2), (SMALL.block(1), 2)), True, SMALL.block(1)))
    assert count["dp_cp"] + count["tp_dp_cp"] == 4 * attention + 2 * (dense + route) + ends
    assert count["edp"] == 2 * 4 * 2 * 8 * 8
    own = sum(count.values()) / 2
    assert parameters(rank.fold, rank.zero, rank.device.bytes, count) == (own * 4, own * 4, own * 8)


@pytest.mark.parametrize(("pp", "virtual", "most"), [(1, 1, [1]), (4, 1, [4, 3, 2, 1]), (4, 2, [11, 9, 7, 5])])
def test_micro_batches_in_flight(pp: int, virtual: int, most: list[int]) -> None:
    """1F1B keeps pp − p passes of a stage, and interleaved 1F1B (v − 1)·pp + 2·(pp − 1 − p) + 1."""
    graph = PipelineGraph(pp, 16, virtual)
    assert [sum(in_flight(graph, place).values()) for place in range(pp)] == most


@pytest.mark.parametrize(("pp", "virtual", "most"), [(1, 1, [1]), (4, 1, [7, 5, 3, 1]), (4, 2, [11, 9, 7, 5])])
def test_micro_batches_in_flight_if_pairs_are_woven(pp: int, virtual: int, most: list[int]) -> None:
    """(v − 1)·pp + 2·(pp − 1 − p) + 1, and a block besides, which `peak_memory` adds."""
    graph = PipelineGraph(pp, 16, virtual)
    assert [sum(in_flight(graph, place, woven=True).values()) for place in range(pp)] == most


def test_the_fullest_position_counts() -> None:
    candidate = Candidate(Job(MIXTRAL, 4096, 256), Fold(128, tp=2, pp=8, ep=8))
    rank = rank_of(MIXTRAL, candidate.fold, 4096)
    held = ledger(candidate, rank)
    assert held.activations == pytest.approx(8 * 7 * block_activations(rank, MIXTRAL.block(0)))
    assert held.total == pytest.approx(sum(held))


# Comparisons with tensors.


@pytest.mark.gate(2)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("fold", "model"), [
    ({"ep": 2}, {}), ({"tp": 2, "ep": 2}, {}), ({"pp": 2, "ep": 2}, {}), ({"tp": 4, "ep": 2}, {"kv_heads": 2}),
    ({"tp": 2, "ep": 2}, {"adapter": {"rank": 16}}), ({"pp": 2, "ep": 2}, {"adapter": {"rank": 16}}),
    ({"ep": 2, "etp": 2}, {"adapter": {"rank": 16}}),
], ids=str)  # fmt: skip
def test_parameters_are_those_of_a_run(ranks, fold: dict[str, int], model: dict[str, Any], zero: int) -> None:
    """Weights, gradients and optimizer state of four ranks after a step agree within 1 %."""
    sizes, optimizer = {**WIDE, **model}, {"kind": "adamw"}
    recipe = make_recipe(4, fold, precision="float32", engine={"kind": "torch", "zero": zero}, optimizer=optimizer, model=sizes)
    model, placed = recipe.model, recipe.placed_fold
    job = Job(model, 16, 8, "fp32")
    rank = RankCosts(job, placed, Device.of(job, EOS), 1, zero)
    for number, found in enumerate(ranks(4).run(_held, recipe)):
        stages = Ownership(model, placed).held_stages(number)
        forms = [StageForm(tuple(map(model.block, stage.layers)), stage.first, stage.last) for stage in stages]
        assert content_parameters(rank, Content.of(forms)) == pytest.approx(found, rel=0.01)


def _held(rank: int, recipe: Recipe) -> list[int]:
    groups = Groups.create(recipe.placed_fold, rank)
    engine = engine_of(recipe, groups)
    go_on(engine, groups, recipe, range(1))
    weights = [*engine.model.parameters(), *engine.masters.values()]  # type: ignore[attr-defined]
    gradients = [each for buffer in engine.gradients.buffers for each in (buffer.flat, buffer.sums) if each is not None]  # type: ignore[attr-defined]
    memory = [
        each for optimizer, _ in engine.optimizers for state in optimizer.state.values() for each in state.values() if each.dim()
    ]  # type: ignore[attr-defined]
    groups.close()
    return [_bytes(each) for each in (weights, gradients, memory)]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(dict(map(storage, tensors)).values())


WIDE: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn_hidden": 128,
                        "expert_hidden": 96, "shared_hidden": 0, "experts": 4, "vocab": 64}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "experts": {},
    "shared": {"shared_hidden": 128},
    "every other block": {"moe_every": 2},
    "gelu, layernorm, learned positions": {"ffn": "gelu", "norm": "layernorm", "positions": "learned", "max_positions": 512},
    "one expert for each token": {"topk": 1},
    "norms of heads": {"qk_norm": "head", "rope_dim": 4},
    "norms of turned heads": {"qk_norm": "turned_head"},
    "norms of all heads, learned positions": {"qk_norm": "all", "positions": "learned", "max_positions": 512},
    "latent": {"latent_rank": 48, "latent_query_rank": 32, "rope_dim": 4, "kv_heads": 8},
    "latent without queries, sinks": {"latent_rank": 48, "rope_dim": 4, "kv_heads": 8, "attention_sinks": True},
    "sinks, biases of experts": {"attention_sinks": True, "expert_bias": True, "ffn": "gated_clamped"},
    "further tokens": {"mtp_depth": 2},
    "norms behind, a gate by column": {"norms": "both", "attention_gate": "element", "shared_hidden": 128},
    "norms behind alone, a gate by head, no positions": {
        "norms": "after",
        "attention_gate": "head",
        "moe_every": 2,
        "full_positions": "none",
    },
    "factors, growing queries": {
        "residual_scale": 0.3,
        "embedding_scale": 2.0,
        "query_growth": 0.2,
        "query_growth_positions": 8,
        "attention_scale": 0.2,
    },
    "further tokens, dense, layernorm": {"mtp_depth": 1, "moe_every": 2, "norm": "layernorm"},
    "linear": {
        "windows": ["linear", "full"],
        "linear_key_heads": 4,
        "linear_key_dim": 12,
        "norm": "zero_rmsnorm",
        "qk_norm": "head",
    },
    "linear, wide states": {"windows": ["linear"], "linear_heads": 1, "linear_key_dim": 256},
    "all linear, further tokens": {"windows": ["linear"], "mtp_depth": 1, "moe_every": 2},
    "a decay of columns, no positions": {
        "windows": ["linear", "full"],
        "linear_kind": "kimi_delta",
        "linear_heads": 2,
        "linear_key_dim": 8,
        "linear_value_dim": 48,
        "latent_rank": 40,
        "kv_heads": 8,
        "rope_dim": 4,
        "full_positions": "none",
    },
    "adapters": {"adapter": {"rank": 8}},
    "adapters of queries and values, norms of heads": {
        "adapter": {"rank": 16, "targets": ["q_proj", "v_proj"]},
        "qk_norm": "head",
        "moe_every": 2,
    },
    "adapters of experts, a shared expert": {
        "adapter": {"rank": 8, "targets": ["gate_up_proj", "down_proj"]},
        "shared_hidden": 128,
        "expert_bias": True,
    },
    "adapters out of experts and of attention": {"adapter": {"rank": 8, "targets": ["down_proj", "o_proj"]}, "moe_every": 2},
    "biases, a gate": {"attention_bias": "all", "shared_hidden": 128, "shared_gate": True, "rope_pairs": "interleaved"},
}


AGAIN = [[], ["expert"], ["shared"], ["attention", "ffn", "expert", "shared"]]


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sequential", "moe_only:4", "one_a_one_m-even:4/2"])
@pytest.mark.parametrize("again", AGAIN, ids=str)
def test_activations_are_those_of_a_run(change: str, dtype: str, name: str, again: list[str]) -> None:
    """Activations agree within 2 %."""
    length, sequences = 256, 2
    model = model_of(dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], **WIDE | CHANGES[change])
    cost = SliceCost.of_model(model.spec.hidden, model.spec.heads)
    text = sample(0, sequences, length + 1, model.spec.vocab)
    ordering = named_ordering(name, length, cost)._replace(recompute=tuple(again))
    real = _kept(model, Groups.create(Fold(1)), ordering, Batch(text[:, :-1], text[:, 1:]))
    job = Job(model.spec, length, sequences, dtype)
    rank = RankCosts(job, Fold(1), Device.of(job, EOS), sequences)
    blocks = map(model.spec.block, model.spec.all_layers)
    sliced = 0 if ordering.slicing is None else slices_of(ordering.slicing)
    counted = sum(block_activations(rank, block, tuple(again), sliced) for block in blocks)
    assert counted == pytest.approx(real, rel=0.02)


SHARED, APART, TO_NODES = Fold(2, ep=2), Fold(3, ep=2, expert_ranks=2), Fold(6, ep=4, ep_inside=2, expert_ranks=4)


@pytest.mark.gate(5)
@pytest.mark.parametrize("again", [(), ("attention", "ffn", "expert", "shared")], ids=str)
@pytest.mark.parametrize(
    ("fold", "way", "depth"),
    [(SHARED, "assignment", 0), (SHARED, "rank", 0), (APART, "rank", 0), (APART, "rank", 2), (TO_NODES, "rank", 0)],
    ids=["shared", "once", "apart", "apart, further tokens", "apart, once to each node"],
)
def test_activations_of_ranks_with_several_experts_are_those_of_a_run(
    ranks, fold: Fold, way: Any, depth: int, again: tuple[str, ...]
) -> None:
    """Two ranks have two of the four experts each, and every token has all four, so that no rank has more rows by chance."""
    length, sequences = 256, 2
    model = ModelSpec(**MODEL | WIDE | {"topk": 4, "mtp_depth": depth})
    job = Job(model, length, sequences * fold.dp, "fp32", dispatch=way)
    candidate, device = Candidate(job, fold, Ordering(recompute=again), sequences), Device.of(job, EOS)
    if fold.disjoint:
        attention, experts = ApartWork(candidate, Sides(device, device)).memory()
        waiting = depth * sequences * length * model.hidden * 4  # gradients of heads, which do not run here
        counted = [attention.activations - waiting] * fold.attention_ranks + [experts.activations] * fold.moe_ranks
    else:
        counted = [ledger(candidate, RankCosts(job, fold, device, sequences)).activations] * 2
    real = ranks(fold.world_size).run(_kept_by_rank, fold, model, way, again, sequences, length)
    assert real == pytest.approx(counted, rel=0.02)


def _kept_by_rank(rank: int, fold: Fold, spec: ModelSpec, way: Any, again: tuple[str, ...], sequences: int, length: int) -> int:
    """Return the bytes that a rank of a fold holds between forward and backward of a micro-batch."""
    groups = Groups.create(fold, rank)
    text = sample(rank, sequences, length + 1, spec.vocab)
    batch = Batch(text[:, :-1], text[:, 1:]) if groups.owns_tokens else Batch.empty(length)
    model = Transformer(Ownership(spec, fold), groups, MoeBackend(dispatch=way))
    found = _kept(model, groups, Ordering(recompute=again), batch)
    groups.close()
    return found


def _kept(model: Transformer, groups: Groups, ordering: Ordering, batch: Batch) -> int:
    """Return the bytes that a micro-batch holds between forward and backward, without heads and their inputs."""
    execution = Execution(model, groups, gradients := Gradients(model, groups), ordering)
    graph, order = execution.step([batch])
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        number, held[number] = storage(tensor)
        return tensor

    before = _alive()
    weights = Weights([batch], groups, torch.float32, model.spec)
    micro_batch = micro_batch_type(groups)(model, batch, OpGraphs(model, graph, gradients.sum_of), weights)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        for op in takewhile(lambda op: op.direction == "F", (op for op in order if op.kind != HEAD)):
            micro_batch.run(op)
    micro_batch.finish()
    micro_batch.states.clear()
    after = held | _alive()
    return sum(size for place, size in after.items() if place not in before)


STEPS = [
    *((kind, 1) for kind in ("sequential", "sequential-apart", "weave", "weave-apart", "aaam-whole:2", "stream-whole:4")),
    *(("list", n) for n in (0, 0.5, 1, 2)),
    ("list-whole:2", 0.5),
]


@pytest.mark.gate(1)
@pytest.mark.parametrize(("kind", "ahead"), STEPS)
def test_a_step_of_several_micro_batches_stays_within_the_ledger(kind: str, ahead: float) -> None:
    """What is alive at the fullest moment is at most what the ledger counts, and at least 0.6 of that."""
    peak, held = _compare(kind, ahead)
    counted = held.activations + held.buffers + held.logits
    assert 0.6 * counted <= peak <= counted


@pytest.mark.gate(1)
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("again", [("expert",), ("attention", "expert", "ffn", "shared")], ids=str)
def test_a_list_stays_within_the_ledger_if_ops_run_again(again: tuple[str, ...], ahead: float) -> None:
    peak, held = _compare("list", ahead, again)
    assert peak <= held.activations + held.buffers + held.logits


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("kind", ["moe_only:4", "stream:4", "stream-apart:4", "weave-apart:2", "list:4"])
def test_the_logits_of_one_piece_exist_at_a_time(kind: str) -> None:
    """With so large a vocabulary, the logits of one more piece would be more than what the ledger counts too much elsewhere."""
    peak, held = _compare(kind, 0, vocab=16384)
    # Between two ops, there is either the softmax or the gradient of the logits: a third of what the head itself needs.
    assert peak <= held.activations + held.buffers + 0.35 * held.logits


def _compare(kind: str, ahead: float, again: tuple[str, ...] = (), **changes: Any) -> tuple[int, Memory]:
    """Return the bytes of a step at its peak, and what the ledger counts."""
    length, sequences, count = 256, 2, 5
    model = model_of(dtype=torch.float32, **WIDE | changes)
    cost = SliceCost.of_model(model.spec.hidden, model.spec.heads)
    ordering = named_ordering(kind, length, cost)._replace(ahead=ahead, recompute=again)
    job = Job(model.spec, length, sequences * count, "fp32")
    candidate = Candidate(job, Fold(1), ordering, sequences)
    held = ledger(candidate, RankCosts(job, Fold(1), Device.of(job, EOS), sequences))
    return _peak(model, ordering, sequences, length, count), held


def _peak(model: Transformer, ordering: Ordering, sequences: int, length: int, count: int) -> int:
    """Return the most bytes that are alive after an op of a step, beyond those before the step."""
    groups = Groups.create(Fold(1))
    execution = Execution(model, groups, gradients := Gradients(model, groups), ordering)
    text = sample(0, sequences * count, length + 1, model.spec.vocab)
    batches = [Batch(part[:, :-1], part[:, 1:]) for part in text.split(sequences)]
    graph, order = execution.step(batches)
    if ordering.forward.row.found:
        (order,) = find(graph, lambda op: (("link", 0.6) if graph.channel(op) else (COMPUTE, 1.0),), ordering.ahead).schedule
    weights, before, most = Weights(batches, groups, torch.float32, model.spec), _alive(), 0
    passes = [MicroBatch(model, batch, OpGraphs(model, graph, gradients.sum_of), weights) for batch in batches]
    with Live(before) as live:
        for op in order:
            passes[op.micro_batch].run(op)
            most = max(most, live.now)
    return most


def _alive() -> dict[int, int]:
    """Return the number and size of the storages of all tensors that Python's garbage collector tracks."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return dict(map(storage, tensors))


def test_gradients_of_large_matrices_are_nowhere_but_in_their_sums_on_a_gpu() -> None:
    """The peaks of a block on an H200 beside weights and sums (docs/notebook/gpus.md), in GiB: at most 15 % less."""
    assert counts().summing == grouping.SUMMING_PRODUCT
    machines, sizes = load_hardware("h200"), {"layers": 1, "head_dim": 128, "vocab": 1024, "moe_every": 1}
    large = {"hidden": 4096, "heads": 32, "kv_heads": 8, "expert_hidden": 14336, "experts": 8, "topk": 2, "ffn_hidden": 14336}
    fine = {"hidden": 2048, "heads": 32, "kv_heads": 4, "expert_hidden": 768, "experts": 128, "topk": 8, "ffn_hidden": 768}
    for model, length, measured in ((large, 8192, 3.03), (large, 32768, 12.1), (fine, 8192, 2.09), (fine, 32768, 6.11)):
        job = Job(ModelSpec(**sizes, **model), length, 1)
        held = ledger(Candidate(job, Fold(1), zero=0), RankCosts(job, Fold(1), Device.of(job, machines), 1))
        beside = held.total - held.workspace - held.weights - held.gradients - held.optimizer
        assert 0.85 <= measured * 2**30 / beside <= 1.0

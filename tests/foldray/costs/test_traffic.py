"""The planned bytes of a step, against those that a step counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from foldray.blueprint import ModelSpec
from foldray.comm import TRAFFIC
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.network import Network
from foldray.costs.traffic import edges, sent
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.nodes import ROWS, Placement
from tests.foldray.costs.fake_step import run_step
from tests.gate import examples

MODEL = ModelSpec(
    layers=2, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn_hidden=64, experts=8, topk=2, expert_hidden=64, vocab=64,
    shared_hidden=32,
)  # fmt: skip
LINEAR = {"windows": ("linear", "full"), "linear_key_heads": 4, "linear_key_dim": 16, "norm": "zero_rmsnorm"}
KIMI = {"windows": ("linear", "full"), "linear_kind": "kimi_delta", "linear_key_dim": 16}
JOB = Job(MODEL, 256, 16)
FOLDS = [
    (Fold(8, tp=2, ep=4), 1),
    (Fold(8, tp=2, cp=2, ep=8), 1),
    (Fold(8, cp=2, ep=2, etp=2), 0),
    (Fold(8, tp=2, pp=2, ep=2, etp=2), 1),
    (Fold(8, ep=8, ep_inside=2), 1),
    (Fold(8, ep=4, ep_inside=2, etp=2), 0),
]


@pytest.mark.gate(1)
@pytest.mark.parametrize(("fold", "zero"), FOLDS, ids=[str(fold) for fold, _ in FOLDS])
def test_planned_bytes_are_counted_bytes(fold: Fold, zero: int) -> None:
    """The planner lets TP gather once more in backward than a step does."""
    job = replace(JOB, dispatch="rank") if fold.ep_inside > 1 else JOB
    _check(Candidate(job, fold, micro_batch=2, zero=zero))


@pytest.mark.parametrize("fold", [Fold(8, ep=4), Fold(8, tp=2, cp=2, ep=2)], ids=str)
def test_rounded_gradients_are_half_as_many_bytes(fold: Fold) -> None:
    job = replace(JOB, gradients="bfloat16")
    candidate = Candidate(job, fold, micro_batch=2, zero=1)
    _check(candidate)
    exact = sent(replace(candidate, job=JOB))
    for family in ("dp_cp", "edp"):  # weights are gathered in bfloat16
        assert sent(candidate)[family] == pytest.approx(exact[family] * (2 + 2) / (4 + 2))


@pytest.mark.gate(1)
@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.parametrize("kind", [LINEAR, KIMI], ids=["linear", "kimi"])
@pytest.mark.parametrize("fold", [Fold(8, tp=2, cp=2, ep=8), Fold(8, cp=4, ep=2)], ids=str)
def test_planned_bytes_of_states_are_counted_bytes(fold: Fold, kind: dict, length: int) -> None:
    """Linear attention sends maps of states and the last tokens of chunks, whatever the length of sequences."""
    _check(Candidate(Job(MODEL.model_copy(update=kind), length, 16), fold, micro_batch=2, zero=1))


def test_only_keys_and_values_grow_with_sequences() -> None:
    sizes = []
    for windows in (("linear",), ("full",)):
        model = MODEL.model_copy(update=LINEAR | {"windows": windows})
        sizes.append([sent(Candidate(Job(model, length, 16), Fold(8, cp=2, ep=2)))["cp"] for length in (256, 1024)])
    assert sizes[0][1] == sizes[0][0]
    assert sizes[1][1] == 4 * sizes[1][0]


def _check(candidate: Candidate) -> None:
    fold, counted = candidate.fold, dict[str, int]()
    for (name, _), count in run_step(candidate).sent.items():
        if name not in ("control", "counts", "sequence"):
            family = {"ep_across": "ep"}.get(TRAFFIC[name], TRAFFIC[name])
            counted[family] = counted.get(family, 0) + count.inside_bytes
    found = sent(candidate)
    assert found.keys() == counted.keys()
    for family, count in counted.items():
        # The first position has no last norm. Visits of tokens to nodes are rounded to whole rows.
        rounded = 2e-3 if fold.ep_inside > 1 and family in ("ep", "ep_inside", "etp") else 1e-9
        close = 0.3 if family == "tp" else 0.06 if family == "tp_dp_cp" and fold.pp > 1 else rounded
        assert found[family] == pytest.approx(count, rel=close), family


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_each_further_token_has_a_head(depth: int) -> None:
    """The planner's backward gathers the inputs of attention, of the shared expert and of the head once more than a step does."""
    model = MODEL.model_copy(update={"mtp_depth": depth})
    candidate = Candidate(replace(JOB, model=model), Fold(8, tp=2, ep=4), micro_batch=2, zero=0)
    counts = run_step(candidate).sent.items()
    counted = sum(each.inside_bytes for (name, operation), each in counts if name == "tensor" and operation != "all_reduce")
    gather = 16 / 4 * 256 * MODEL.hidden * 2 / 2  # bytes of a rank's half of the sequences of its data-parallel place
    blocks, heads = 2 + depth, 1 + depth
    assert sent(candidate)["tp"] == pytest.approx(counted + (2 * blocks + heads) * gather, rel=1e-12)


FAMILIES = ("tp", "cp", "dp_cp", "tp_dp_cp", "pp", "ep", "etp", "edp")


@given(st.sampled_from([12, 24, 36]), st.lists(st.integers(1, 4), min_size=5, max_size=5), st.integers(1, 10),
       st.sampled_from(["tp-cp-dp-pp", "dp-tp-cp-pp", "cp-tp-dp-pp"]), st.integers(0, 9))  # fmt: skip
@examples(100)
def test_the_widest_group_of_a_family_sets_its_pace(world: int, sizes: list[int], node: int, order: str, offset: int) -> None:
    """Groups are counted on their nodes one by one."""
    try:
        fold = Fold(world, *sizes, order=order, offset=offset)
    except UserError:
        reject()
    network = Network(fold, Device(load_hardware("eos-h100").model_copy(update={"gpus_per_node": node})))
    for family in FAMILIES:
        groups = [Counter(rank // node for rank in group) for group in fold.groups(family)]
        widest = max(groups, key=lambda shares: (len(shares), -min(shares.values())))
        assert network.shape(family) == (widest.total(), min(widest.values()), len(widest)), family
        assert (network.shape(family).nodes > 1) == (Placement(fold, node).crossing(family) > 0)


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_of_experts_with_ranks_of_their_own(depth: int) -> None:
    """Each token goes to both of two ranks of experts with the chance that its two of eight experts are on both."""
    job = replace(JOB, model=MODEL.model_copy(update={"mtp_depth": depth}))
    candidate = Candidate(job, Fold(4, ep=2, expert_ranks=2), micro_batch=2)
    blocks = len(MODEL.moe_layers) + depth
    rows = 16 / 2 * 256 * 2 * (1 - 2 * (4 * 3) / (8 * 7) / 2)  # of a rank of attention in a layer
    assert sent(candidate)[ROWS] == pytest.approx(2 * blocks * rows * MODEL.hidden * 2)
    assert {flow.way for flow in edges(candidate).flows} == {"routes", "ring"}
    to_nodes = replace(candidate, fold=Fold(10, ep=8, ep_inside=4, expert_ranks=8))
    found = sent(to_nodes)
    assert found[ROWS] == pytest.approx(sent(candidate)[ROWS])  # two nodes instead of two ranks
    # A rank of the experts gets a token with a chance of 1/4, and sends as many. They travel there and back, twice.
    passed = blocks * 16 / 8 * 256 * 8 / 4 * (4 * MODEL.hidden * 2 + 2 * (2 * 4) + 2 * 4)
    assert found["ep_inside"] == pytest.approx(passed * 3 / 4)
    rounded = replace(candidate, job=replace(job, wire="float8"))
    out, back = MODEL.hidden + 4, MODEL.hidden * 2  # with a scale; as many rows go up as come down
    assert sent(rounded)[ROWS] == pytest.approx(blocks * rows * (out + back))

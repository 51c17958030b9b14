"""Predicted steps: a prediction from parts equals a simulation of the whole, and better hardware never makes it longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.blueprint import ModelSpec
from foldray.clock import simulate
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware, Link, constants, counts, data_sheet_peak, known_hardware, load_hardware
from foldray.costs.memory import ledger
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step, predict, straggling
from foldray.costs.whole import simulate_step, whole_seconds
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.graph import Reduction, SliceCost, slice_sequence
from foldray.kinds import ATTENTION, OP_KINDS, STAGE
from foldray.orders import Ordering, Overlap, step_schedule
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from tests.gate import examples

MODEL = ModelSpec.model_validate({"preset": "mixtral-8x22b", "layers": 8})
FOLDS: list[dict[str, int]] = [
    {}, {"ep": 2}, {"tp": 2, "ep": 4}, {"cp": 2, "ep": 4}, {"tp": 2, "etp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"pp": 4},
    {"pp": 2, "tp": 2, "ep": 4}, {"pp": 4, "ep": 2}, {"pp": 8},
]  # fmt: skip


def machines(**changes: Any) -> Hardware:
    return load_hardware("eos-h100").model_copy(update={"gpus_per_node": 4, **changes})


def candidate(
    kind: str, degree: int, fold: dict[str, int], batch: int = 16, virtual: int = 1, slices: int | None = None, **more: Any
) -> Candidate:
    ordering = Ordering()
    if degree > 1:
        fold_ = Fold(8, **fold)
        cost = SliceCost.of_model(MODEL.hidden, MODEL.heads)
        slicing = slice_sequence("time_uniform", 4096, degree, cost, 2 * fold_.cp * fold_.tp, slices)
        if kind == "moe_only":
            slicing = slicing._replace(attention=(4096,))
        ordering = Ordering(Overlap(kind, 1), Overlap(kind, 1), slicing)
    return Candidate(Job(more.pop("model", MODEL), 4096, batch), Fold(8, **fold), ordering, virtual_stages=virtual, **more)


def parts_and_whole(each: Candidate) -> tuple[float, float]:
    """Return the seconds of a step's passes, predicted from parts, and simulated op by op."""
    work = OpWork(each, Device.of(each.job, machines()))
    schedule = step_schedule(each.graph, each.ordering.forward, each.ordering.backward)
    return Step(each, work).passes(), simulate(each.graph, schedule, work.cost).seconds


@pytest.mark.gate(10)
@pytest.mark.parametrize("fold", FOLDS, ids=str)
@pytest.mark.parametrize(("kind", "degree"), [("sequential", 1), ("moe_only", 2), ("aaam", 2), ("one_a_one_m", 4)])
def test_parts_make_the_whole(kind: str, degree: int, fold: dict[str, int]) -> None:
    """For blocks that drain, the prediction from blocks, stages and pipeline equals the simulation of all ops."""
    for virtual in {1, 2} if fold.get("pp", 1) > 1 and 8 // fold["pp"] > 1 else {1}:
        each = candidate(kind, degree, fold, virtual=virtual)
        # With TP, the embedding communicates while the first block's tokens travel. This overlap changes the step by 0.01 %.
        overlapping = degree > 1 and each.fold.tp > 1
        # With virtual stages, a position asks for some first pieces only after it has sent its own. The parts leave this out.
        late = degree > 1 and virtual > 1
        parts, whole = parts_and_whole(each)
        assert parts == pytest.approx(whole, rel=4e-3 if late else 2e-4 if overlapping else 1e-9)


@pytest.mark.parametrize("fold", [{"ep": 2}, {"cp": 2, "ep": 4}, {"pp": 4, "ep": 2}, {"pp": 8}], ids=str)
@pytest.mark.parametrize(("kind", "degree"), [("sequential", 1), ("one_a_one_m", 4)])
def test_parts_make_the_whole_with_further_tokens(kind: str, degree: int, fold: dict[str, int]) -> None:
    plain, each = (candidate(kind, degree, fold, model=MODEL.model_copy(update={"mtp_depth": depth})) for depth in (0, 2))
    parts, whole = parts_and_whole(each)
    assert parts == pytest.approx(whole, rel=1e-9)
    assert whole > parts_and_whole(plain)[0]


@pytest.mark.parametrize("fold", [{"ep": 2}, {"cp": 2, "ep": 4}, {"pp": 4, "ep": 2}], ids=str)
def test_parts_make_the_whole_with_fewer_slices_of_attention(fold: dict[str, int]) -> None:
    parts, whole = parts_and_whole(candidate("one_a_one_m", 4, fold, slices=2))
    assert parts == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("fold", [{"ep": 8}, {"tp": 2, "ep": 4}, {"pp": 2, "ep": 4}, {"pp": 4, "ep": 2}], ids=str)
@pytest.mark.parametrize(("kind", "degree"), [("stream", 2), ("stream", 4), ("stream", 8)])
def test_parts_are_close_to_the_whole_where_blocks_overlap(kind: str, degree: int, fold: dict[str, int]) -> None:
    """A stage that streams is simulated with four blocks and extrapolated. Stages may overlap each other on shared lanes."""
    model = ModelSpec.model_validate({"preset": "mixtral-8x22b", "layers": 24})
    parts, whole = parts_and_whole(candidate(kind, degree, fold, model=model))
    print(f"{fold} {kind} d={degree}: parts {parts / whole - 1:+.2%}")
    assert parts == pytest.approx(whole, rel=0.01)


REDUCTIONS = [Reduction("end"), Reduction("buckets"), Reduction("chunks", 16 << 20), Reduction("chunks", 64 << 20)]


@pytest.mark.gate(27)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("fold", [{"ep": 8}, {"tp": 2, "ep": 4}, {"pp": 2, "ep": 2}, {"pp": 2, "ep": 4}], ids=str)
@pytest.mark.parametrize(("kind", "degree"), [("sequential", 1), ("moe_only", 4), ("stream", 4)])
def test_reductions_are_close_to_the_whole(kind: str, degree: int, fold: dict[str, int], reduction: Reduction) -> None:
    """The parts say how long all-to-alls wait for gradients, and gradients for all-to-alls; in the whole step both happen.

    In the whole step, an all-to-all waits for a whole bucket before it. On a real link, and in the parts, they share the link.
    """
    each = candidate(kind, degree, fold, batch=8)
    each = replace(each, ordering=each.ordering._replace(reduction=reduction))
    work = OpWork(each, Device.of(each.job, machines()))
    whole, step = simulate_step(each, work).seconds, Step(each, work)
    ends = zip(step.pipeline, step.reductions(reduction), strict=True)
    parts = max(place.end + own.delayed + own.exposed for place, own in ends)
    print(f"{fold} {kind} {reduction}: parts {parts / whole - 1:+.2%}")
    assert parts == pytest.approx(whole, rel={"end": 0.01, "chunks": 0.05, "buckets": 0.15}[reduction.kind])


@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_it_does_not_matter_which_nodes_a_fold_has(fold: dict[str, int]) -> None:
    here = candidate("sequential", 1, fold)
    elsewhere = replace(here, fold=replace(here.fold, offset=16))
    assert predict(elsewhere, machines()) == predict(here, machines())


def test_weights_that_tp_ranks_hold_whole_are_reduced_over_all_of_them() -> None:
    """Learned positions are most of what this model reduces. Over TP and DP, every rank sends an eighth of them between nodes."""
    model = ModelSpec.model_validate({"preset": "gpt-moe-s", "vocab": 50304})
    each = Candidate(Job(model, 4096, 2), Fold(16, tp=8, ep=16))
    device = Device.of(each.job, load_hardware("a10g-g5.48xlarge"))
    work = OpWork(each, device)
    whole = whole_seconds(each, work) * (1 + straggling(16, device))
    assert Step(each, work).prediction().seconds == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize(("pp", "virtual", "sizes", "batch"), [
    (2, 1, (7, 1), 16), (2, 1, (1, 7), 16), (2, 2, (1, 3, 3, 1), 32), (4, 1, (1, 3, 3, 1), 64), (2, 3, (1, 1, 3, 1, 1, 1), 64),
])  # fmt: skip
def test_uneven_stages_are_as_long_as_when_they_are_simulated_whole(pp: int, virtual: int, sizes: Any, batch: int) -> None:
    fold = {"pp": pp, "ep": 8 // pp}
    parts, whole = parts_and_whole(candidate("sequential", 1, fold, batch=batch, virtual=virtual, stage_layers=sizes))
    assert parts == pytest.approx(whole, rel=1e-9)


def test_the_stages_of_a_recipe_are_priced() -> None:
    """The longest stage sets the pace: 30 blocks take 30 · m for m micro-batches, and 2 blocks of the last one come after."""
    model = {"preset": "tiny", "layers": 32, "hidden": 1024, "head_dim": 256, "expert_hidden": 4096, "vocab": 256}
    given = {
        "model": model,
        "fold": {"pp": 2},
        "data": {"seq_len": 4096},
        "training": {"global_batch": 8},
        "precision": "bfloat16",
    }
    seconds, held = [], []
    for sizes in ([30, 2], [16, 16]):
        schedule = {"stage_layers": sizes}
        each = as_candidate(Recipe.parse({**given, "precision": "bfloat16", "schedule": schedule, "cluster": {"workers": 2}}))
        work = OpWork(each, Device.of(each.job, load_hardware("eos-h100")))
        seconds.append(Step(each, work).passes())
        held.append(ledger(each, work.rank).total)
    assert seconds[0] / seconds[1] == pytest.approx((8 * 30 + 2) / (9 * 16), rel=0.02)
    assert held[0] > 1.5 * held[1]


@pytest.mark.parametrize("back", [False, True])
def test_gathered_keys_wait_and_those_of_a_ring_do_not(back: bool) -> None:
    """Half of the keys and values come from the other rank. Backward also sends their float32 gradients back."""
    machine, tokens = machines(inter=Link(gb_s=1e4), intra=Link(gb_s=1e4)), range(2048)
    cp = {}
    for context in ("ring", "all_gather"):
        each = candidate("sequential", 1, {"cp": 2, "ep": 4})
        each = replace(each, job=replace(each.job, context=context))
        works = OpWork(each, Device.of(each.job, machine)).rank.price(ATTENTION, back, tokens, MODEL.block(0)).works
        cp[context] = sum(work.seconds for work in works if work.what == "cp")
    sent = 2048 * 2 * 8 * 128 * (2 + 4 * back)
    assert cp["all_gather"] == pytest.approx(sent / (1e13 * constants()["intra"].value))
    assert cp["ring"] == 0


def test_gathered_keys_take_memory() -> None:
    """Eight ranks' keys and values with float32 gradients are there at once, or two ranks' beside a rank's own.

    Experts are small, so that attention is the fullest op.
    """
    model = MODEL.model_copy(update={"heads": 64, "kv_heads": 64, "vocab": 256, "topk": 1, "expert_hidden": 256})
    base = candidate("sequential", 1, {"cp": 8, "ep": 8}, model=model)
    work = []
    for way in ("ring", "all_gather"):
        each = replace(base, job=replace(base.job, context=way, seq_len=65536))
        work.append(ledger(each, OpWork(each, Device.of(each.job, machines())).rank).working)
    own = 65536 // 8 * 2 * 64 * 128 * (2 + 4)
    assert work[1] - work[0] == pytest.approx((8 - 2) * own, rel=0.2)


def test_a_long_pipeline_is_as_long_as_when_it_is_simulated_whole() -> None:
    parts, whole = parts_and_whole(candidate("sequential", 1, {"pp": 4}, batch=64, virtual=2))
    assert parts == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("fold", FOLDS, ids=str)
def test_shares_sum_to_the_step(fold: dict[str, int], zero: int) -> None:
    for kind, degree in (("sequential", 1), ("stream", 4)):
        prediction = predict(candidate(kind, degree, fold, zero=zero), machines())
        assert sum(prediction.breakdown.values()) == pytest.approx(prediction.seconds, rel=1e-9)
        assert min(prediction.breakdown.values()) >= 0
        assert prediction.mfu_full > prediction.mfu_causal


def test_mfu_is_that_of_a_data_sheet() -> None:
    """NVIDIA's data sheets: dense bf16 TFLOP/s of the SXM and PCIe cards. Other GPUs, and processors, have no MFU."""
    assert data_sheet_peak("NVIDIA H100 80GB HBM3", "bf16") == data_sheet_peak("NVIDIA H200", "bf16") == 989.5e12
    assert data_sheet_peak("NVIDIA GeForce RTX 3090", "fp32") == 35.6e12
    assert [data_sheet_peak(name, "bf16") for name in ("NVIDIA H100 PCIe", "AMD EPYC", "")] == [None] * 3
    assert data_sheet_peak("NVIDIA H200", "fp64") is None


FASTER = st.sampled_from(["memory_gb_s", "intra", "inter", "bf16"])


@given(st.sampled_from(FOLDS), st.sampled_from([("sequential", 1), ("one_a_one_m", 4)]), FASTER, st.floats(1.0, 16.0),
       st.sampled_from([0.0, 0.5, 1.0]))  # fmt: skip
@examples(60)
def test_better_hardware_never_costs_time(
    fold: dict[str, int], how: tuple[str, int], what: str, times: float, crowding: float
) -> None:
    plain = machines(constants={"crowding": crowding})
    if what == "bf16":
        changes: dict[str, Any] = {"peak_tflops": {"bf16": plain.peak_tflops["bf16"] * times}}
    elif what == "memory_gb_s":
        changes = {what: plain.memory_gb_s * times}
    else:
        link = getattr(plain, what)
        changes = {what: link.model_copy(update={"gb_s": link.gb_s * times})}
    better = plain.model_copy(update=changes)
    each = candidate(*how, fold)
    assert predict(each, better).seconds <= predict(each, plain).seconds * (1 + 1e-12)


def test_what_travels_beside_computation_costs_it_time() -> None:
    """Hidden communication slows computation down in proportion, in parts as in the whole step. Exposed one does not."""
    each = candidate("one_a_one_m", 4, {"ep": 8})
    devices = [Device.of(each.job, machines(), {"crowding": crowding}) for crowding in (0.0, 0.25, 0.5)]
    none, some, more = (whole_seconds(each, OpWork(each, device)) for device in devices)
    assert some - none == pytest.approx(more - some, rel=1e-6)
    assert some > 1.01 * none
    parts = [Step(each, OpWork(each, device)).prediction().seconds for device in devices]
    assert parts[2] - parts[0] == pytest.approx(more - none, rel=0.02)
    alone = candidate("sequential", 1, {"ep": 8})
    apart = [predict(alone, machines(), {"crowding": crowding}).seconds for crowding in (0.0, 0.5)]
    assert apart[1] == pytest.approx(apart[0], rel=1e-12)


def test_small_slices_take_longer_where_that_was_measured() -> None:
    each = candidate("one_a_one_m", 4, {"ep": 8})
    plain = predict(each, machines()).breakdown["attention"]
    as_fast, slower = (predict(each, machines(attention=((128, share), (4096, share)))).breakdown for share in (1.0, 0.5))
    assert as_fast["attention"] == pytest.approx(plain)
    assert slower["attention"] == pytest.approx(2 * plain)
    some = predict(each, machines(attention=((128, 0.5), (4096, 1.0)))).breakdown["attention"]
    assert plain < some < 2 * plain, "between what was measured, by the logarithm of the slice's tokens"


def test_one_expert_is_a_dense_model_with_a_router() -> None:
    """With EP = ETP = 1 and one expert, only the router, its permutation and the sum after it are added."""
    changes = {"experts": 1, "topk": 1}
    one = MODEL.model_copy(update=changes)
    dense = MODEL.model_copy(update={**changes, "dense_first": MODEL.layers, "ffn_hidden": MODEL.expert_hidden})
    apart = [predict(candidate("sequential", 1, {}, model=model), machines()).breakdown for model in (one, dense)]
    assert apart[0]["attention"] == pytest.approx(apart[1]["attention"])
    assert apart[0]["experts"] == pytest.approx(apart[1]["gemm"] - apart[0]["gemm"], rel=0.01)
    assert apart[0]["memory"] > apart[1]["memory"]


def test_constants_stand_within_their_bounds() -> None:
    assert len(constants()) <= 15
    for each in constants().values():
        assert each.low <= each.value <= each.high
        assert each.unit
        assert each.why


def test_every_op_that_computes_starts_kernels() -> None:
    computing = {name for name, row in OP_KINDS.items() if row.travels is None and name != STAGE}
    once, wire = {f"once_{kind}" for kind in ("route", "expert", "merge", "inside")}, {"narrow", "scaled"}
    linear = {"linear", "linear_chunk", "map", "map_chunk", "columns"}
    assert set(counts().kernels) == computing | {"part", "head_norm", "expert_bias", "adapter"} | once | wire | linear


# By the makers' data sheets, for one GPU: dense bf16 and fp8 in TFLOP/s, GB of memory, GB/s of memory, GB/s of NVLink or Infinity
# Fabric in both directions, Gbit/s of an adapter.
DATA_SHEETS: dict[str, tuple[float, float | None, float, float, float, float]] = {
    "a100": (312, None, 80, 2039, 600, 200),
    "b200": (2250, 4500, 180, 8000, 1800, 400),
    "gb200": (2500, 5000, 186, 8000, 1800, 400),
    "b300": (2250, 4500, 288, 8000, 1800, 800),
    "gb300": (2500, 5000, 288, 8000, 1800, 800),
    "mi300x": (1307, 2615, 192, 5300, 896, 400),
    "mi355x": (2517, 5033, 288, 8000, 1075, 400),
}


def test_known_hardware_loads() -> None:
    others = {"eos-h100", "h100", "h200", "h800", "a10g-g5.48xlarge", "rtx3090"}
    assert set(known_hardware()) == others | DATA_SHEETS.keys()
    assert all(load_hardware(name).name == name for name in known_hardware())
    assert all("data sheet" in load_hardware(name).source for name in known_hardware())


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_data_sheets(name: str) -> None:
    """No GPU sees all of the memory in its data sheet. Links there count both ways, and adapters in Gbit/s."""
    bf16, fp8, memory, bandwidth, link, adapter = DATA_SHEETS[name]
    machines = load_hardware(name)
    assert machines.peak_tflops["bf16"] == pytest.approx(bf16, rel=0.01)
    assert machines.peak_tflops.get("fp8") == (pytest.approx(fp8, rel=0.01) if fp8 else None)
    assert machines.peak_tflops.get("mxfp8") in (None, machines.peak_tflops.get("fp8"))
    assert 0.92 * memory < machines.memory_gib <= memory
    assert machines.memory_gb_s == pytest.approx(bandwidth, rel=0.01)
    assert (2 * machines.intra.gb_s, 8 * machines.inter.gb_s) == (pytest.approx(link, rel=0.01), adapter)


def test_mxfp8_writes_a_scale_for_each_block_of_32() -> None:
    """Casts take 1 / 64 longer than those to fp8 (4 1/16 bytes for 4), and products as long. Hopper has no MXFP8."""
    devices = [Device(load_hardware("b200"), dtype) for dtype in ("fp8", "mxfp8", "bf16")]
    fp8, mxfp8, bf16 = ((device.casts(1e6), device.product(8192, 8192, 8192)) for device in devices)
    assert mxfp8 == (pytest.approx(fp8[0] * (1 + 1 / 64)), fp8[1])
    assert bf16 == (0.0, 2 * fp8[1])
    with pytest.raises(UserError, match="mxfp8: has no peak in hardware h100"):
        _ = Device(load_hardware("h100"), "mxfp8").peak


def test_fp8_is_for_products_only() -> None:
    """In fp8 the products of projections and experts take half the time. Attention does not, and casts take time.

    MoE Parallel Folding (table 2) publishes 1.30 times the speed of bf16 for Mixtral-8x22B on 128 H100.
    """
    model = ModelSpec.model_validate({"preset": "mixtral-8x22b"})
    fold = Fold(128, tp=2, pp=8, ep=8)
    wide, narrow = (
        predict(Candidate(Job(model, 4096, 256, dtype), fold, virtual_stages=7), load_hardware("eos-h100"))
        for dtype in ("bf16", "fp8")
    )
    assert narrow.breakdown["experts"] == pytest.approx(wide.breakdown["experts"] / 2)
    assert narrow.breakdown["attention"] == wide.breakdown["attention"]
    assert narrow.breakdown["memory"] > wide.breakdown["memory"]
    assert 1.30 < wide.seconds / narrow.seconds < 1.45

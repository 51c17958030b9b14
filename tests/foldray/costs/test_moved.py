"""What the planner counts for activations on the host: bytes and memory as those of real runs, seconds by hand, and what fits."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foldray.blueprint import ModelSpec
from foldray.cli import main
from foldray.clock import COMPUTE
from foldray.comm import Groups
from foldray.costs.activations import block_activations, freed_bytes, moved_bytes, slices_of
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import GIB, ledger
from foldray.costs.moved import moved
from foldray.costs.ops import OpWork
from foldray.costs.prediction import predict
from foldray.costs.rank import RankCosts
from foldray.costs.whole import whole_seconds
from foldray.finding import find
from foldray.fold import Fold
from foldray.graph import SliceCost
from foldray.kinds import HEAD, OFFLOAD
from foldray.model import Batch, Transformer
from foldray.orders import Ordering, named_ordering
from foldray.plan.search import search
from foldray.plan.space import Space
from foldray.runtime import Execution, Gradients
from foldray.runtime.kept import HostMemory
from foldray.runtime.micro_batch import MicroBatch
from foldray.runtime.op_graphs import OpGraphs
from foldray.runtime.weights import Weights
from tests.foldray.costs.test_memory import CHANGES, EOS, MIXTRAL, WIDE
from tests.foldray.lanes import host_apart
from tests.foldray.live import Live, storage
from tests.foldray.parity import model_of, sample

KINDS = ("attention", "ffn", "expert", "shared")
LENGTH, SEQUENCES = 256, 2


def passes_of(model: Transformer, ordering: Ordering, count: int) -> tuple[HostMemory, list[MicroBatch], Any]:
    """Return the passes of a step, its host, and its list."""
    groups = Groups.create(Fold(1))
    execution = Execution(model, groups, gradients := Gradients(model, groups), ordering)
    text = sample(0, SEQUENCES * count, LENGTH + 1, model.spec.vocab)
    batches = [Batch(part[:, :-1], part[:, 1:]) for part in text.split(SEQUENCES)]
    graph, order = execution.step(batches)
    if ordering.forward.row.found:
        lanes = {OFFLOAD: 1.3}

        def cost(op: Any) -> Any:
            channel = graph.channel(op)
            return ((str(channel), lanes.get(op.kind, 0.6)) if channel else (COMPUTE, 1.0),)

        (order,) = find(graph, cost, ordering.ahead).schedule
    host, weights = HostMemory(model), Weights(batches, groups, torch.float32, model.spec)
    host.begin()
    passes = [MicroBatch(model, batch, OpGraphs(model, graph, gradients.sum_of, host=host), weights) for batch in batches]
    return host, passes, order


def rank_of(model: ModelSpec, dtype: str, count: int = 1) -> RankCosts:
    job = Job(model, LENGTH, SEQUENCES * count, dtype)
    return RankCosts(job, Fold(1), Device.of(job, EOS), SEQUENCES)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sequential", "one_a_one_m-even:4/2"])
def test_the_bytes_that_travel_are_those_of_a_run(change: str, dtype: str, name: str) -> None:
    """Every kind of op by itself: within 3 %."""
    model = model_of(dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], **WIDE | CHANGES[change])
    rank, spec = rank_of(model.spec, dtype), model.spec
    ordering = named_ordering(name, LENGTH, SliceCost.of_model(spec.hidden, spec.heads))
    sliced = 0 if ordering.slicing is None else slices_of(ordering.slicing)
    for kind in KINDS:
        host, (micro_batch,), order = passes_of(model, ordering._replace(offload=(kind,)), 1)
        for op in takewhile(lambda op: op.direction == "F", (op for op in order if op.kind != HEAD)):
            micro_batch.run(op)
        counted = sum(moved_bytes(rank, spec.block(layer), kind, sliced) for layer in spec.all_layers[:-1])
        assert counted == pytest.approx(host.sent, rel=0.03), kind


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sequential", "one_a_one_m-even:4/2"])
def test_what_stays_is_that_of_a_run(change: str, dtype: str, name: str) -> None:
    """What a micro-batch keeps on the device between forward and backward: within 3 % of the whole, without the host's."""
    model = model_of(dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], **WIDE | CHANGES[change])
    rank, spec = rank_of(model.spec, dtype), model.spec
    ordering = named_ordering(name, LENGTH, SliceCost.of_model(spec.hidden, spec.heads))._replace(offload=KINDS)
    sliced, blocks = 0 if ordering.slicing is None else slices_of(ordering.slicing), [*map(spec.block, spec.all_layers)]
    whole = sum(block_activations(rank, block, (), sliced) for block in blocks)
    counted = whole - sum(freed_bytes(rank, block, KINDS, sliced) for block in blocks[:-1])
    with host_apart() as there:
        _, (micro_batch,), order = passes_of(model, ordering, 1)
        with Live(_Either(there, _alive())) as live:
            for op in takewhile(lambda op: op.direction == "F", (op for op in order if op.kind != HEAD)):
                micro_batch.run(op)
            micro_batch.finish()
            micro_batch.states.clear()
            gc.collect()
            assert counted == pytest.approx(live.now, abs=0.03 * whole)


STEPS = [
    ("sequential", 0), ("sequential-apart", 0), ("weave", 0), ("weave-apart", 0), ("aaam-whole:2", 0), ("stream:4", 0),
    ("stream-whole:4", 0), *(("list", n) for n in (0, 0.5, 1, 2)), ("list-whole:2", 0.5), ("list:4", 1),
]  # fmt: skip


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("name", "ahead"), STEPS)
def test_a_step_stays_within_the_ledger(name: str, ahead: float) -> None:
    """Six blocks, five micro-batches: what is alive at the fullest moment is at most what is counted, and at least half of it."""
    model, count = model_of(dtype=torch.float32, **WIDE | {"layers": 6}), 5
    ordering = named_ordering(name, LENGTH, SliceCost.of_model(model.spec.hidden, model.spec.heads))
    ordering = ordering._replace(ahead=ahead, offload=KINDS)
    candidate = Candidate(Job(model.spec, LENGTH, SEQUENCES * count, "fp32"), Fold(1), ordering, SEQUENCES)
    held, most = ledger(candidate, rank_of(model.spec, "fp32", count)), 0
    with host_apart() as there:
        _, passes, order = passes_of(model, ordering, count)
        with Live(_Either(there, _alive())) as live:
            for op in order:
                passes[op.micro_batch].run(op)
                most = max(most, live.now)
    counted = held.activations + held.buffers + held.logits
    assert (0.2 if ordering.forward.row.found else 0.5) * counted <= most <= counted


class _Either:
    """The members of both."""

    def __init__(self, one: Any, other: Any):
        self._both = one, other

    def __contains__(self, member: object) -> bool:
        return any(member in each for each in self._both)


def _alive() -> dict[int, torch.Tensor]:
    """Return all tensors by their addresses. As long as they are kept, no other tensor has these addresses."""
    gc.collect()
    return {storage(each)[0]: each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}


# By hand.


def test_mixtral_by_hand() -> None:
    """A block in bfloat16 on one rank with two of eight experts: what attention and experts keep of 4096 tokens."""
    job = Job(MIXTRAL, 4096, 64)
    rank = RankCosts(job, Fold(4, ep=4), Device.of(job, EOS), 1)
    block, n = MIXTRAL.block(0), 4096
    attention = n * (2 * (6144 + 6144 + (6144 + 2 * 1024) + 6144) + 4 * 48)  # input, normed, queries, keys, values, outputs; sums
    assert moved_bytes(rank, block, "attention") == pytest.approx(attention)
    assert moved_bytes(rank, block, "expert") == pytest.approx(n * 2 * 2 * (6144 + 2 * 16384))
    assert moved_bytes(rank, block, "ffn") == moved_bytes(rank, block, "shared") == 0
    held = block_activations(rank, block)
    assert freed_bytes(rank, block, ("attention", "expert")) == pytest.approx(attention + n * 4 * (6144 + 2 * 16384))
    assert held > attention


def candidate_of(offload: tuple[str, ...], layers: int = 8, **more: Any) -> Candidate:
    model = MIXTRAL.model_copy(update={"layers": layers})
    return Candidate(Job(model, 4096, 64), Fold(8, ep=8), Ordering(offload=offload), **more)


def test_the_ledger_has_three_blocks_and_the_host_has_all() -> None:
    plain, moving = candidate_of(()), candidate_of(("attention", "expert"))
    rank = RankCosts(plain.job, plain.fold, Device.of(plain.job, EOS), 1)
    block = MIXTRAL.block(0)
    away = freed_bytes(rank, block, ("attention", "expert"))
    before, after = ledger(plain, rank), ledger(moving, rank)
    assert before.activations - after.activations == pytest.approx(5 * away)
    assert after._replace(activations=0, working=0) == before._replace(activations=0, working=0)
    assert moved(plain, rank) is None
    on_host = moved(moving, rank)
    assert on_host is not None
    assert on_host.held == pytest.approx(8 * away)
    assert on_host.travels == pytest.approx(2 * 8 * 7 * away)  # eight micro-batches; the last block keeps its own


@pytest.mark.parametrize("speed", [None, 8.0, 64.0, 640.0])
def test_a_slow_link_to_the_host_sets_the_pace(speed: float | None) -> None:
    h100 = load_hardware("h100")
    host = h100.host
    assert host is not None
    machines = h100.model_copy(update={"host": None if speed is None else host.model_copy(update={"gb_s": speed})})
    plain, moving = (predict(candidate_of(kinds), machines) for kinds in ((), ("attention", "expert")))
    if speed is None:
        assert moving.seconds == plain.seconds
        return
    rank = RankCosts(candidate_of(()).job, Fold(8, ep=8), Device.of(candidate_of(()).job, machines), 1)
    away = freed_bytes(rank, MIXTRAL.block(0), ("attention", "expert"))
    assert moving.traffic["host"] == pytest.approx(8 * 2 * 7 * away / (speed * 0.8e9))
    assert (moving.seconds > plain.seconds) == (moving.breakdown.get("exposed_host", 0.0) > 0)
    assert moving.seconds == pytest.approx(plain.seconds + moving.breakdown.get("exposed_host", 0.0), rel=0.01)
    assert (speed < 600) == ("exposed_host" in moving.breakdown)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("speed", [16.0, 64.0, 640.0])
def test_parts_of_a_step_add_up_to_the_whole(pp: int, speed: float) -> None:
    """A step that is put together from its stages takes about as long as one whose every op is simulated."""
    h100 = load_hardware("h100")
    assert h100.host is not None
    machines = h100.model_copy(update={"host": h100.host.model_copy(update={"gb_s": speed})})
    candidate = replace(candidate_of(("attention", "expert")), fold=Fold(8 * pp, ep=8, pp=pp))
    work = OpWork(candidate, Device.of(candidate.job, machines))
    assert predict(candidate, machines).seconds == pytest.approx(whole_seconds(candidate, work), rel=0.08)


def test_a_model_that_fits_only_with_it() -> None:
    """Twelve blocks of Mixtral on eight GPUs of 120 GiB: nothing fits as it is, and it fits once activations leave."""
    model = MIXTRAL.model_copy(update={"layers": 12})
    job, machines = Job(model, 8192, 64), load_hardware("h200")
    pins = {"tp": 1, "pp": 1, "cp": 1, "ep": 8, "etp": 1}
    more: dict[str, Any] = {"pins": pins, "recompute": ((),), "micro_batches": (1,)}
    plain = search(Space(job, machines, 8, **more), 1).best[0]
    moving = search(Space(job, machines, 8, **more, offload=("attention", "expert")), 1).best[0]
    between = (plain.memory.total + moving.memory.total) / 2 / GIB
    small = machines.model_copy(update={"memory_gib": between})
    assert not search(Space(job, small, 8, **more), 1).best[0].fits
    found = search(Space(job, small, 8, **more, offload=("attention", "expert")), 1).best[0]
    assert found.fits
    assert found.moved is not None
    assert found.memory.activations < 0.5 * plain.memory.activations


ASKED = ["plan", "--cluster", "h100", "--pp", "1", "--tp", "1", "--cp", "1", "--etp", "1", "--top", "1"]
TINY = ["--model", "tiny", "--gpus", "8", "--seq-len", "512", "--global-batch", "32"]


def test_the_option_and_the_recipe_say_the_same(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "recipe.yaml"
    recipe = {
        "model": {"preset": "tiny"}, "data": {"seq_len": 512}, "training": {"global_batch": 32}, "cluster": {"workers": 8},
        "precision": "bfloat16", "engine": {"kind": "torch", "zero": 1},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(recipe))

    def planned(*given: str) -> dict[str, Any]:
        assert main([*ASKED, "--json", *given]) == 0
        return json.loads(capsys.readouterr().out)["candidates"][0]

    usual, asked = planned(str(path)), planned(str(path), "--offload-activations", "attention,expert")
    own = planned(str(path), "schedule.offload=[attention, expert]")
    assert asked == own == planned(*TINY, "--offload-activations", "attention,expert")
    assert "activations_on_host" not in usual
    assert usual["schedule"]["offload"] == []
    assert own["schedule"]["offload"] == ["attention", "expert"]
    assert own["memory"]["activations"] < usual["memory"]["activations"]
    assert own["activations_on_host"]["travels_gib"] > 0
    assert main([*ASKED, *TINY, "--offload-activations", "attention"]) == 0
    text = capsys.readouterr().out
    assert "to host attention" in text
    assert "the first one's operations keep " in text


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--offload-activations", "head"], "offload_activations=head: must be operations, each of them once, with commas"),
        (["--offload-activations", "expert,expert"], "offload_activations=expert: must be operations"),
        (["--offload-activations", "expert", "--disaggregate"], "and --disaggregate parts them"),
    ],
    ids=str,
)
def test_what_the_command_refuses(given: list[str], line: str, capsys: Any) -> None:
    assert main([*ASKED, *TINY, *given]) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert line in told

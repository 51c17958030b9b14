"""The planner's memory and traffic against a step of each named model at 8192 tokens.

The tensors are fake (`fake_step.py`), so a step takes about a second and no memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import pytest

from foldray.blueprint import ModelSpec
from foldray.costs import working
from foldray.costs.activations import block_activations
from foldray.costs.candidate import FAMILY, Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import counts, load_hardware
from foldray.costs.memory import Memory, ledger
from foldray.costs.network import Network, Travel
from foldray.costs.ops import OpWork
from foldray.costs.rank import RankCosts
from foldray.costs.working import after_backward, buffers, networks, unreduced
from foldray.fold import Fold
from foldray.graph import SliceCost
from foldray.kinds import EMBED, EXPERT, HEAD, MERGE, REDUCE
from foldray.orders import named_ordering, position_list
from tests.foldray.costs.fake_step import Step, run_step
from tests.patches import patched

LENGTH = 8192


@pytest.fixture(autouse=True)
def experts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a step run in a GPU's kernels."""
    monkeypatch.setattr(working, "one_by_one", lambda *sizes: False)


class Case(NamedTuple):
    """A model's block on rank 0 of a fold.

    Args:
        micro: micro-batches of a step, of one sequence each.
        dispatch: what a token travels for.
        wire: how rows are written for the wire.
    """

    preset: str
    ranks: int
    sizes: dict[str, int]
    zero: int = 1
    micro: int = 1
    dispatch: Literal["assignment", "rank"] = "assignment"
    wire: Literal["bfloat16", "float8"] | None = None

    @property
    def candidate(self) -> Candidate:
        # Every other block of GPT-MoE is dense.
        layers = 2 if self.preset.startswith("gpt-moe") else 1
        model = ModelSpec.model_validate({"preset": self.preset, "layers": layers, "dense_first": 0})
        fold = Fold(self.ranks, **self.sizes)
        job = Job(model, LENGTH, fold.dp * self.micro, dispatch=self.dispatch, wire=self.wire)
        return Candidate(job, fold, zero=self.zero)


CASES = [
    Case("mixtral-8x22b", 8, {"ep": 8}),
    Case("mixtral-8x22b-g8t8", 16, {"ep": 8, "etp": 2}, 0),
    Case("qwen2-57b-a14b", 16, {"ep": 8}),
    Case("qwen2-57b-a14b", 16, {"ep": 8}, 2, 2),
    Case("llama3-8x70b", 16, {"ep": 8, "cp": 2}, 0),
    Case("deepseek-moe", 16, {"ep": 16}),
    Case("gpt-oss-120b", 16, {"ep": 16, "tp": 2}, 0),
    Case("gpt-oss-120b", 8, {"ep": 8}, 2),
    Case("qwen3-235b-a22b", 32, {"ep": 32, "tp": 4}),
    Case("gpt-moe-l", 16, {"ep": 16}, 0),
    Case("deepseek-v3", 32, {"ep": 32, "tp": 4}),
    Case("deepseek-v2-lite", 8, {"ep": 8}, 0),
    Case("minimax-m2", 16, {"ep": 16, "tp": 2}),
    Case("gpt-oss-20b", 8, {"ep": 8, "tp": 2}, 0),
    Case("qwen3-30b-a3b", 8, {"ep": 8}, 2),
    Case("qwen3-30b-a3b", 8, {"ep": 8}, 1, 1, "rank"),
    Case("mixtral-8x22b-g8t8", 16, {"ep": 8, "etp": 2}, 0, 1, "rank"),
    Case("deepseek-moe", 16, {"ep": 16}, 1, 1, "rank"),
    Case("deepseek-v3", 32, {"ep": 32, "tp": 4}, 0, 1, "rank"),
    Case("qwen2-57b-a14b", 16, {"ep": 2}, 0, 1, "rank"),
    Case("qwen3-30b-a3b", 8, {"ep": 8, "ep_inside": 4}, 1, 1, "rank"),
    Case("mixtral-8x22b-g8t8", 16, {"ep": 8, "ep_inside": 2, "etp": 2}, 0, 1, "rank"),
    Case("deepseek-moe", 16, {"ep": 16, "ep_inside": 8}, 0, 1, "rank"),
    Case("qwen3-30b-a3b", 8, {"ep": 8}, 1, 1, "assignment", "float8"),
    Case("gpt-oss-20b", 8, {"ep": 8, "tp": 2}, 0, 1, "rank", "float8"),
]


def cases(chosen: Any = lambda case: True) -> Any:
    """Parametrize a test with cases, few of which are in the gate."""
    found = [
        pytest.param(case, id=f"{case.preset}-{'-'.join(f'{key}{size}' for key, size in case.sizes.items())}-zero{case.zero}"
                     + ("-once" if case.dispatch == "rank" else "") + (f"-{case.wire}" if case.wire else ""))
        for case in CASES if chosen(case)
    ]  # fmt: skip
    return lambda test: pytest.mark.gate(2)(pytest.mark.parametrize("case", found)(test))


class Compared(NamedTuple):
    """A candidate with its step, its ledger and the costs of a rank."""

    candidate: Candidate
    step: Step
    rank: RankCosts
    memory: Memory


@cache
def _step(name: str) -> Compared:
    (case,) = (case for case in CASES if str(case) == name)
    candidate = case.candidate
    rank = _rank(candidate)
    return Compared(candidate, run_step(candidate), rank, ledger(candidate, rank))


def _rank(candidate: Candidate) -> RankCosts:
    machines = load_hardware("eos-h100").model_copy(update={"processors": 1})  # the step runs as on a CPU
    device = Device.of(candidate.job, machines)
    return RankCosts(candidate.job, candidate.fold, device, candidate.micro_batch, candidate.zero)


def compared(case: Case) -> Compared:
    """Run a case once for all tests."""
    return _step(str(case))


def summed(found: Compared) -> float:
    """Return the bytes of whole sums of gradients at the end of a step, if they are still held after a micro-batch."""
    several = found.candidate.micro_batches > 1
    return several * unreduced(found.rank, found.candidate.layout.positions.content(0))


def kept(found: Compared) -> float:
    """Return what the ledger counts for all blocks from forward to backward, in bytes."""
    return sum(block_activations(found.rank, block) for block in found.candidate.job.blocks)


@cases()
def test_weights_sums_and_moments(case: Case) -> None:
    found = compared(case)
    counted = found.memory.weights + found.memory.gradients - summed(found) + found.memory.optimizer
    assert found.step.held == pytest.approx(counted, rel=0.001)


@cases()
def test_activations(case: Case) -> None:
    """Before the head, there are the activations of all blocks, and the output of the last one."""
    found = compared(case)
    fold, model = found.candidate.fold, found.candidate.job.model
    ending = LENGTH // (fold.cp * fold.tp) * model.hidden * 2
    assert found.step.find("F", HEAD).before - summed(found) - ending == pytest.approx(kept(found), rel=0.01)
    assert found.memory.activations == pytest.approx(kept(found))


@pytest.mark.gate(1)
@pytest.mark.parametrize("cp", [1, 2])
def test_activations_of_slices(cp: int) -> None:
    """Before the first piece of the head, all slices have gone through the block."""
    candidate = Case("llama3-8x70b", 16, {"ep": 8, "cp": cp}, 0).candidate
    model = candidate.job.model
    ordering = named_ordering("one_a_one_m-even:4", LENGTH, SliceCost.of_model(model.hidden, model.heads))
    candidate = replace(candidate, ordering=ordering)
    head = next(each for each in run_step(candidate).ops if each.op.kind == HEAD)
    counted = block_activations(_rank(candidate), candidate.job.blocks[0], sliced=4)
    assert head.before - LENGTH // cp * model.hidden * 2 == pytest.approx(counted, rel=0.01)


@cases()
def test_the_heads_fullest_moment(case: Case) -> None:
    """Beside the logits, the head has its input, normed and not: at most 4 % of them here."""
    found = compared(case)
    forward, backward = (found.step.find(direction, HEAD) for direction in "FB")
    assert max(forward.peak, backward.peak) - forward.before == pytest.approx(found.memory.logits, rel=0.05)


@cases(lambda case: case.zero < 2 or case.micro > 1)
def test_the_fullest_op_beside_the_head(case: Case) -> None:
    """With a dense block before the MoE block, the ledger lets each be the fullest while the activations of both are there. One
    micro-batch of ZeRO-2 is left out: its sums come one by one, while activations go.
    """
    found = compared(case)
    content, slicing = found.candidate.layout.positions.content(0), found.candidate.pieces.slicing
    peak = max(each.peak for each in found.step.ops if each.op.kind not in (EMBED, HEAD, REDUCE)) - summed(found)
    work = max(networks(found.rank, block, slicing) for block, _ in content.blocks)
    counted = kept(found) + buffers(found.rank, slicing, alone=True) + work
    assert peak <= 1.05 * counted
    assert peak >= (0.95 if len(content.blocks) == 1 else 0.75) * counted


@cases(lambda case: case.zero > 0)
def test_gradients_that_leave_and_weights_that_come(case: Case) -> None:
    found = compared(case)
    content, several = found.candidate.layout.positions.content(0), case.micro > 1
    leaving = max(each.peak for each in found.step.ops if each.op.kind == REDUCE) - summed(found)
    counted = after_backward(found.rank, content, several)
    assert max(leaving, found.step.gather - summed(found)) == pytest.approx(counted, rel=0.01)


@cases()
def test_the_whole_step(case: Case) -> None:
    """The ledger without workspace is at least what a step needs, and little more."""
    found = compared(case)
    peak = found.step.held + found.step.peak
    assert 0.95 * (found.memory.total - found.memory.workspace) <= peak <= found.memory.total - found.memory.workspace


@cases(lambda case: case.zero < 2)
def test_traffic(case: Case) -> None:
    """The bytes that rank 0 sends are those whose seconds the planner counts.

    The planner's backward gathers the inputs of attention and of the head again over TP, as Megatron's does. foldray keeps what
    it has gathered, so it sends less. Exchanges of a few numbers (of the loss, of sequences, of all ranks) have no price.
    """
    found = compared(case)
    fold, sent = found.candidate.fold, Counter[str]()
    for (name, operation), count in found.step.sent.items():
        if name in FAMILIES and (name, operation) not in (("tensor", "all_reduce"), *AFTERWARDS):
            sent[FAMILIES[name]] += count.inside_bytes
    planned = _planned(found)
    again = 2 * LENGTH // fold.cp * found.candidate.job.model.hidden * 2 * (fold.tp - 1) / fold.tp
    assert sent["tp"] == pytest.approx(planned.pop("tp", 0) - again, rel=0.01)
    assert {family: size for family, size in sent.items() if family != "tp"} == pytest.approx(+planned, rel=0.01)


FAMILIES = {"tokens": "ep_across", "tokens_inside": "ep_inside", "tensor": "tp", "context": "cp", "expert_slices": "etp",
            **{f"{name}_gradients": family for name, family in FAMILY.items()}}  # fmt: skip
AFTERWARDS = [(f"{name}_gradients", "all_gather") for name in FAMILY]


def _planned(found: Compared) -> Counter[str]:
    """Return the bytes that a rank sends by group family, as the planner's prices of ops and reductions count them."""
    moved, candidate = Counter[str](), found.candidate

    def ring(network: Network, family: str, whole: float, times: int = 1) -> Travel:
        ranks = network.shape(family).size
        moved[family] += int(times * whole * (ranks - 1) / ranks)
        return Travel("none", 0.0)

    device = found.rank.device
    with (
        patched(Network, "gather", ring),
        patched(Network, "exchange", ring),
        patched(Network, "reduce", lambda network, family, whole: ring(network, family, whole, 2)),
    ):
        work = OpWork(candidate, device)
        for op in position_list(candidate.reducing, 0, candidate.ordering):
            work.work(op)
    return moved


@cases()
def test_kernels(case: Case, record_property: Any) -> None:
    """Experts and sums of rows start at most as many kernels as the planner counts.

    Other ops start more here: a CPU computes norms, rotations and scores in several kernels each.
    """
    found = compared(case)
    for each in found.step.ops:
        record_property(f"{each.op.direction} {each.op.kind}", each.kernels)
    for kind in (EXPERT, MERGE):
        biased = found.candidate.job.model.expert_bias and kind == EXPERT
        most = counts().kernels[kind] + biased * counts().kernels["expert_bias"]
        most += counts().kernels[f"once_{kind}"] * (case.dispatch == "rank")
        most += counts().kernels["once_inside"] * (found.candidate.fold.ep_inside > 1 and kind == EXPERT)
        written = ("scaled", "narrow") if kind == EXPERT else ("narrow",)
        most += sum(counts().kernels[name] for name in written) * (case.wire is not None)
        assert 0 < found.step.find("F", kind).kernels <= most

"""A training step at real sizes on one machine: rank 0 of a fold, with fake tensors and a process group that moves nothing.

Every expert gets equally many rows. The experts run in the kernels that a GPU would choose, and all other code takes a CPU's
ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from foldray.blueprint import ModelSpec, Ownership, ranks_of_a_token
from foldray.comm import DispatchQueue, Groups
from foldray.comm.communicator import Count
from foldray.costs.candidate import Candidate
from foldray.graph import Op
from foldray.kernels import experts
from foldray.model import Batch, Transformer
from foldray.moe import MoeBackend
from foldray.moe.contracts import Received, RowCounts, Sent
from foldray.moe.exchange import AllToAll
from foldray.recipe import OptimizerSpec
from foldray.runtime import Execution
from foldray.runtime.engine import TorchEngine
from foldray.runtime.execution import _Run
from tests.foldray.live import Live
from tests.patches import patched


class Watched(NamedTuple):
    """An op: bytes alive before it, at its fullest moment and after it, beyond parameters, and its number of kernels."""

    op: Op
    before: int
    peak: int
    after: int
    kernels: int


class Step(NamedTuple):
    """The measurements of a step.

    Args:
        held: bytes of weights, sums of gradients and the optimizer's states.
        ops: the ops in their order.
        gather: bytes beyond `held` at the fullest moment of the gather of updated weights.
        sent: calls and bytes by class of traffic and operation.
    """

    held: int
    ops: list[Watched]
    gather: int
    sent: dict[tuple[str, str], Count]

    def find(self, direction: str, kind: str) -> Watched:
        """Return the last op of a kind."""
        return [each for each in self.ops if each.op.direction == direction and each.op.kind == kind][-1]

    @property
    def peak(self) -> int:
        """Bytes beyond `held` at the fullest moment."""
        return max(self.gather, *(each.peak for each in self.ops))


def run_step(candidate: Candidate) -> Step:
    """Run a step of a candidate in bfloat16."""
    with _fakes(candidate), Live() as live:
        groups = Groups.create(candidate.fold, 0)
        backend = MoeBackend(dispatch=candidate.job.dispatch, wire=candidate.job.wire)
        model = Transformer(Ownership(candidate.job.model, candidate.fold), groups, backend, dtype=torch.bfloat16)
        wire = torch.bfloat16 if candidate.job.gradients else None
        engine = TorchEngine(model, groups, OptimizerSpec(), candidate.ordering, candidate.zero, wire)
        moments = [engine._remembered(parameter, key) for parameter in engine.masters for key in ("exp_avg", "exp_avg_sq")]
        held, shape = live.now, (candidate.micro_batch, candidate.job.seq_len)
        text = torch.zeros(shape, dtype=torch.int64)
        ops = _train(engine, [Batch(text, text)] * candidate.micro_batches, live, held)
        live.peak = before = live.now
        engine._spread()
        step = Step(held, ops, live.peak - before, dict(groups.traffic.counts))
        del moments
        groups.close()
    return step


def _train(engine: TorchEngine, batches: list[Batch], live: Live, held: int) -> list[Watched]:
    """Train, and return what each op needed."""
    ops: list[Watched] = []
    start = _Run._start

    def watched(run: Any, op: Op) -> Any:
        live.peak, live.kernels, before = live.now, 0, live.now
        pending = start(run, op)
        ops.append(Watched(op, before - held, live.peak - held, live.now - held, live.kernels))
        return pending

    with patched(_Run, "_start", watched):
        engine.train(batches)
    return ops


@contextmanager
def _fakes(candidate: Candidate) -> Iterator[None]:
    """Replace tensors, the network, and whatever reads numbers or draws weights."""
    dist.init_process_group("fake", rank=0, world_size=candidate.fold.world_size, store=FakeStore())
    model = candidate.job.model
    try:
        with ExitStack() as stack:
            stack.enter_context(patched(Transformer, "_initialise", lambda self, seed: None))
            stack.enter_context(patched(Execution, "_compare", lambda self, order: None))
            stack.enter_context(patched(AllToAll, "start_counts", lambda *given: _even_counts(model, *given)))
            stack.enter_context(patched(experts, "_implementation", _of_a_gpu))
            # Other threads have no fake tensors, and nothing makes anybody wait.
            stack.enter_context(patched(DispatchQueue, "start", lambda queue, begin, ready, device: begin()))
            stack.enter_context(FakeTensorMode())
            yield
    finally:
        dist.destroy_process_group()


def _even_counts(model: ModelSpec, exchange: AllToAll, sent: Sent) -> Received:
    """Return the counts of tokens that choose all experts equally often, and go to as many ranks as tokens do in the mean."""
    fold, slices, members = exchange._fold, exchange._slices, sent.rows_E.numel()
    ranks, nodes, inside, local = fold.ep, fold.ep_across, fold.ep_inside, members // fold.ep
    once = sent.rows_R is not None
    tokens = len(sent.memory[1 if once else 0])
    each, rest = divmod(tokens * model.topk, members)
    assert not rest, "the experts cannot have equally many rows"
    there = _visits(model, tokens, ranks) if once else each * local
    if inside == 1:
        counts = RowCounts([[[each] * local] * ranks] * slices.size, [there] * ranks, [[there] * ranks] * slices.size)
        return Received.of(counts, slices.index)
    rows, passed = [[[each * nodes] * local] * inside] * slices.size, [there * nodes] * inside
    there = _visits(model, tokens, nodes)
    within = RowCounts(rows, passed, [passed] * slices.size)
    return Received.of(RowCounts(rows, [there] * nodes, [[there] * nodes] * slices.size, within), slices.index)


def _visits(model: ModelSpec, tokens: int, places: int) -> int:
    """Return the rows of a rank's tokens that go to each of so many places, in the mean."""
    return round(tokens * ranks_of_a_token(model, places) / places)


def _of_a_gpu(x_NH: torch.Tensor, count: int, inner: int) -> type[torch.autograd.Function]:
    return experts._Grouped if count > 1 else experts._PerExpert

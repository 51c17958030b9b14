"""Measures constants of the planner: the time to start a kernel, and the speeds of permutation, weight updates and slices.

All but the speed of updates come from recorded steps of small models on one rank. The first model has such small pieces that
only the start of kernels takes time. The second one has such thin experts that only routing and permutation take time. The
third one cuts attention into smaller and smaller slices.

On a GPU, all of these would take as long as the host needs. So steps of the first model give the time of a host's call, and the
kernels of sliced attention are measured alone.
"""

from __future__ import annotations

from typing import Any

import torch

from foldray.comm import Groups
from foldray.costs.candidate import DTYPES, Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step
from foldray.graph import Op
from foldray.kernels.attention import Mask, attend, attend_backward, merge
from foldray.kinds import ATTENTION, ROUTE
from foldray.orders import Ordering
from foldray.recipe import Recipe
from foldray.runtime import Trace
from trainers.measure.comparison import random_batch
from trainers.measure.meter import Meter
from trainers.worker.engines import make_engine

_STEPS = 5  # recorded steps; the median of each op counts
_SHORTEST, _LONGEST = 2048, {"cpu": 8192, "cuda": 32768}  # tokens of the sequences whose attention is measured
_DEGREES = (1, 2, 4, 8, 16)  # of sequences that are cut
_PLAIN: dict[str, Any] = {"value_dim": None, "rope_dim": None, "latent_rank": 0, "latent_query_rank": 0, "shared_gate": False}
"""What goes only with some sizes of heads or of the shared expert."""
_TINY: dict[str, Any] = {"preset": None, "hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn_hidden": 32, "experts": 4,
                         "topk": 2, "expert_hidden": 32, "shared_hidden": 0, "vocab": 64, "layers": 2}  # fmt: skip
_THIN: dict[str, Any] = {"preset": None, "heads": 1, "kv_heads": 1, "head_dim": 16, "ffn_hidden": 16, "expert_hidden": 16,
                         "shared_hidden": 0, "vocab": 64, "layers": 2}  # fmt: skip
_LARGE: dict[str, Any] = {"heads": 32, "kv_heads": 32, "head_dim": 128, "hidden": 4096, "expert_hidden": 4096}
"""Sizes of the wide model on a GPU, where those of a CPU would show only the start of kernels."""
_WIDE: dict[str, Any] = {"preset": None, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn_hidden": 1024,
                         "experts": 8, "topk": 2, "expert_hidden": 1024, "shared_hidden": 0, "vocab": 1024,
                         "layers": 1}  # fmt: skip


def of_ops(meter: Meter, recipe: Recipe, hardware: Hardware) -> dict[str, float]:
    """Measure `launch` and `permute`, or on a GPU `issue`, and `optimizer`, with the recipe's router and optimizer."""
    tiny = _small(recipe, _TINY, 64, {"kind": "one_a_one_m", "degree": 4})
    if meter.device.type == "cuda":
        return {"issue": _issue(tiny, meter, hardware), "optimizer": _optimizer(recipe, meter, hardware)}
    took = _recorded(tiny, meter)
    kernels = _priced(tiny, hardware, "launch", {"launch": 1.0})
    kinds = [op for op in took if kernels[op]]
    started = {"launch": meter.slowest(sum(took[op] for op in kinds) / sum(kernels[op] for op in kinds))}

    thin = _small(recipe, _THIN, max(512, recipe.data.seq_len), {})
    took, moved = _recorded(thin, meter), _priced(thin, hardware, "memory", {"permute": 1.0})
    starts = _priced(thin, hardware, "launch", started)
    kinds = [op for op in took if op.kind == ROUTE]
    slower = sum(took[op] - starts[op] for op in kinds) / sum(moved[op] for op in kinds)
    permute = min(1.0, 1 / max(1e-3, meter.slowest(slower)))
    return {**started, "permute": permute, "optimizer": _optimizer(recipe, meter, hardware)}


def _issue(recipe: Recipe, meter: Meter, hardware: Hardware) -> float:
    """Measure the seconds of a host's call, in steps that take as long as the host needs. A recorded step takes longer."""
    engine = make_engine(recipe, Groups.create(recipe.placed_fold), meter.device)
    batches = [random_batch(recipe, 0, 1, 0, meter.device)]
    return meter.plain(lambda: engine.train(batches)) / sum(_calls(recipe, hardware).values())


def _optimizer(recipe: Recipe, meter: Meter, hardware: Hardware) -> float:
    """Measure the bandwidth of weight updates, as a share of memory bandwidth. The planner counts the bytes of an update."""
    wide = _small(recipe, _wide(meter), 64, {})
    engine = make_engine(wide, Groups.create(wide.placed_fold), meter.device)
    engine.train([random_batch(wide, 0, 1, 0, meter.device)])
    took = meter(lambda: engine.update(0.0))
    job = Job(wide.model, 64, 1, DTYPES[recipe.precision])
    candidate = Candidate(job, wide.placed_fold, Ordering(), zero=0)
    work = OpWork(candidate, Device.of(job, hardware, {"optimizer": 1.0}))
    return min(1.0, max(Step(candidate, work).behind) / took)


def attention_length(recipe: Recipe, device: torch.device) -> int:
    """Return the length of the sequences whose attention is measured: the recipe's own, as far as that takes seconds.

    Attention over longer sequences computes fewer masked scores, so it is faster than over short ones.
    """
    return min(_LONGEST[device.type], max(_SHORTEST, recipe.data.seq_len)) // max(_DEGREES) * max(_DEGREES)


def of_slices(meter: Meter, recipe: Recipe, hardware: Hardware) -> list[tuple[int, float]]:
    """Measure the speed of slices: (tokens of a slice, share of the constant `attention`), the smallest slice first.

    The times come from recorded steps of one block. So they include all costs of cutting attention, such as keeping keys and
    values and merging results. On a GPU, ops of small slices take as long as the host needs, so the kernels are measured alone.
    """
    shares: list[tuple[int, float]] = []
    length = attention_length(recipe, meter.device)
    if meter.device.type == "cuda":
        alone = sum(_priced(_small(recipe, _wide(meter), length, {}), hardware, "attention", {}).values())
        dtype = getattr(torch, recipe.precision)
        return [(length // degree, alone / _sliced(meter, dtype, length, length // degree)) for degree in _DEGREES[::-1]]
    for degree in _DEGREES:
        cut = {"kind": "one_a_one_m", "degree": degree, "slicing": "token_uniform"} if degree > 1 else {}
        sliced = _small(recipe, _wide(meter), length, cut)
        took, core = _recorded(sliced, meter), _priced(sliced, hardware, "attention", {})
        rest = [_priced(sliced, hardware, what, {}) for what in ("gemm", "memory", "launch")]
        ops = [op for op in took if op.kind == ATTENTION]
        left = meter.slowest(sum(took[op] - sum(priced[op] for priced in rest) for op in ops))
        predicted = sum(core[op] for op in ops)
        shares.append((length // degree, predicted / max(left, predicted / 10)))
    return shares[::-1]


def _sliced(meter: Meter, dtype: torch.dtype, length: int, size: int) -> float:
    """Measure the seconds of a GPU for attention of a sequence in slices of a size, forward and backward."""
    heads, width = _LARGE["heads"], _LARGE["head_dim"]
    q, k, v, dout = (torch.randn(1, heads, length, width, device=meter.device, dtype=dtype) for _ in range(4))

    def slices() -> None:
        for start in range(0, length, size):
            queries = slice(start, start + size)
            parts: list[tuple[slice, Mask]] = [(queries, "causal")]
            if start:
                parts.append((slice(0, start), None))
            results = [attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], mask) for keys, mask in parts]
            out, lse = merge(*results[0], *results[1]) if start else results[0]
            for keys, mask in parts:
                attend_backward(dout[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], out.to(dtype), lse, mask)

    slices()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the host issues a graph at once
        slices()
    return meter(graph.replay)


def _wide(meter: Meter) -> dict[str, Any]:
    return _WIDE | (_LARGE if meter.device.type == "cuda" else {})


def _small(recipe: Recipe, sizes: dict[str, Any], length: int, schedule: dict[str, Any]) -> Recipe:
    """Return a recipe for one rank, with the model of a recipe except for some sizes."""
    router = {**recipe.model.router.model_dump(), "groups": 1, "topk_groups": 1}  # as few experts as these have no groups
    return Recipe.parse(
        {
            "model": {**recipe.model.model_dump(), **_PLAIN, **sizes, "router": router},
            "data": {"seq_len": length},
            "precision": recipe.precision,
            "engine": {"kind": "torch"},
            "moe": recipe.moe.model_dump(),
            "training": {"global_batch": 1},
            "schedule": schedule,
        }
    )


def _recorded(recipe: Recipe, meter: Meter) -> dict[Op, float]:
    """Return the seconds of every op that computes, in a step on one rank."""
    device = meter.device
    groups = Groups.create(recipe.placed_fold)
    engine = make_engine(recipe, groups, device)
    batches, execution = [random_batch(recipe, 0, 1, 0, device)], engine.execution
    execution.trace = trace = Trace(device)
    graph, _ = execution.step(batches)
    steps: list[dict[Op, float]] = []
    for _ in range(2 + _STEPS):
        pace = meter.pace
        engine.train(batches)
        engine.update(0.0)
        trace.times(graph)
        steps.append({op: (span.end - span.start) / pace for op, span in trace.spans.items() if graph.channel(op) is None})
    return {op: sorted(step[op] for step in steps[2:])[_STEPS // 2] for op in steps[-1]}


def _calls(recipe: Recipe, hardware: Hardware) -> dict[Op, float]:
    """Return the calls of the host for every op, in units of `issue`."""
    work = _work(recipe, hardware, {})
    return {op: sum(item.calls for item in work.work(op)) for op in work.candidate.graph.ops()}


def _priced(recipe: Recipe, hardware: Hardware, what: str, changed: dict[str, float]) -> dict[Op, float]:
    """Return the seconds that the planner predicts for one kind of work in every op."""
    work = _work(recipe, hardware, changed)
    return {op: sum(item.seconds for item in work.work(op) if item.what == what) for op in work.candidate.graph.ops()}


def _work(recipe: Recipe, hardware: Hardware, changed: dict[str, float]) -> OpWork:
    batch, dtype = recipe.training.global_batch, DTYPES[recipe.precision]
    job = Job(recipe.model, recipe.data.seq_len, batch, dtype, dispatch=recipe.moe.dispatch)
    candidate = Candidate(job, recipe.placed_fold, recipe.ordering, zero=recipe.engine.zero)
    return OpWork(candidate, Device.of(job, hardware, changed))

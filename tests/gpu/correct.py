"""Compares one rank on a GPU with the CPU, and with plain implementations."""

from __future__ import annotations

from typing import Any

import torch

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.kernels.attention import attend, attend_backward, merge
from foldray.model import Batch, Transformer, all_losses
from foldray.model.initial import parameters_as
from foldray.moe import MoeBackend, MoELayer
from foldray.moe.exchange import WIRES
from foldray.recipe import OptimizerSpec, Recipe
from foldray.runtime import TorchEngine, Trace
from tests.foldray.parity import batches, make_recipe, weights, worst
from tests.gpu import masks
from tests.gpu.report import Report
from trainers.worker.engines import make_engine

GROUPS = Groups.create(Fold(1))
SPEC = ModelSpec(preset="tiny")
OWNERSHIP = Ownership(SPEC, Fold(1))
SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "stream, 4 pieces": {"schedule": {"kind": "stream", "degree": 4}},
    "weave, 2 pieces": {"schedule": {"kind": "weave", "degree": 2}},
    "a found list, 2 pieces": {"schedule": {"kind": "list", "degree": 2}},
    "recomputation": {"schedule": {"kind": "stream", "degree": 2, "recompute": ["attention", "expert"]}},
    "activations on the host": {"schedule": {"offload": ["attention", "expert", "shared"]}, "model": {"layers": 4}},
    "activations on the host, weights apart, 2 pieces": {
        "schedule": {"kind": "stream", "degree": 2, "weight_gradients": "apart", "offload": ["attention", "expert"]},
        "model": {"layers": 4},
    },
    "weights apart": {"schedule": {"kind": "stream", "degree": 2, "weight_gradients": "apart"}},
    "AdamW": {"optimizer": {"kind": "adamw", "lr": 0.01, "clip": 1.0}},
    "AdamW on the host": {"optimizer": {"kind": "adamw", "lr": 0.01, "clip": 1.0}, "engine": {"offload": "optimizer"}},
    "Muon": {"optimizer": {"kind": "muon", "lr": 0.01, "clip": 1.0}},
    "capacity": {"model": {"router": {"capacity_factor": 0.8, "balance_loss": 0.1}}},
    "capacity and padding": {"model": {"router": {"capacity_factor": 0.8, "pad": True, "balance_loss": 0.1}}},
}


def run(report: Report) -> None:
    for name, sections in SCHEDULES.items():
        report.check("correct", f"float64 equals the CPU's: {name}", lambda sections=sections: schedule_equals_the_cpus(sections))
    report.check("correct", "documents", lambda: schedule_equals_the_cpus(SCHEDULES["stream, 4 pieces"], documents=True))
    report.check("correct", "float64 model equals the CPU's", model_equals_the_cpus)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        report.check("correct", f"grouped experts equal the loop, {dtype}", lambda d=dtype, m=limit: grouped_equals_loop(d, m))
    for parts in (1, 4):
        report.check("correct", f"attention of {parts} slices, bfloat16", lambda n=parts: slices_equal_float64(n))
    for name, masked in masks.MASKED.items():
        report.check("correct", f"masks, bfloat16: {name}", lambda each=masked: masks.equal_float64(each))
    report.check("correct", "masks, bfloat16: memory at 32K tokens", masks.take_no_memory)
    report.check("correct", "rows in float8 equal the CPU's", float8_equals_the_cpus)
    report.check("correct", "bfloat16 step against float64", bfloat16_step)
    report.check("correct", "a traced step", trace_is_whole)
    report.check("correct", "bfloat16 training learns", training_learns)


def float8_equals_the_cpus() -> int:
    """Write and read rows in float8, with a group of zeros, a row that no multiple of 128 fills, and NaN. Return the rows."""
    form = WIRES["float8"].out
    for hidden in (128, 2880):
        x_NH = torch.randn(1000, hidden, generator=torch.Generator().manual_seed(hidden)) * torch.logspace(-9, 9, 1000)[:, None]
        x_NH[3], x_NH[4, 5] = 0.0, float("nan")
        for dtype in (torch.float32, torch.bfloat16):
            read = [form.read(form.write(x_NH.to(device, dtype)), dtype).cpu() for device in ("cpu", "cuda")]
            one, other = (each.nan_to_num(nan=-1.0) for each in read)
            assert torch.equal(one, other), f"{int((one != other).sum())} of {one.numel()} numbers differ, {hidden} {dtype}"
    return len(x_NH)


def schedule_equals_the_cpus(sections: dict[str, Any], documents: bool = False) -> float:
    """Compare the weights after two steps with the CPU's. Return the largest difference."""
    found = []
    for device in ("cpu", "cuda"):
        recipe = make_recipe(1, moe={"experts": "grouped"}, **sections)
        found.append(two_steps(recipe, Groups.create(recipe.placed_fold), torch.device(device), documents))
    off, name = worst([{"weights": found[1]}], {"weights": found[0]}, relative=False)
    assert off < 1e-9, f"{name} differs by {off:.2e}"
    return off


def two_steps(recipe: Recipe, groups: Groups, device: torch.device, documents: bool = False) -> dict[str, Any]:
    """Train two steps, and return the weights on the CPU. A list is found by the times of the first step."""
    engine: Any = make_engine(recipe, groups, device)
    engine.execution.trace = Trace(device)
    for step in range(2):
        if groups.owns_tokens:
            given = batches(recipe, groups.dp_rank, step, documents)
        else:
            given = [Batch.empty(recipe.data.seq_len)] * recipe.accumulation
        engine.train([Batch(*(None if x is None else x.to(device) for x in batch)) for batch in given])
        engine.update(1.0)
        if engine.execution.lacks_costs:
            engine.execution.learn_costs()
    return {name: held._replace(tensor=held.tensor.cpu()) for name, held in weights(engine).items()}


def model_equals_the_cpus() -> float:
    """Compare the loss and all gradients with the CPU's, in float64. Return the largest relative difference."""
    text = _text(2, 65, "cpu")
    results = []
    for device in ("cpu", "cuda"):
        model = Transformer(OWNERSHIP, GROUPS, MoeBackend(experts="loop"), device=device, dtype=torch.float64)
        objective, _ = model(_batch(text.to(device)))
        gradients = torch.autograd.grad(objective, list(model.parameters()))
        results.append([tensor.cpu() for tensor in (objective.detach(), *gradients)])
    return _worst(*results, limit=1e-9)


def grouped_equals_loop(dtype: torch.dtype, limit: float) -> float:
    """Compare the output and gradients of one layer between the fast experts and the plain loop."""
    results = []
    for kind in ("loop", "grouped"):
        torch.manual_seed(0)
        with parameters_as("cuda", dtype):
            layer = MoELayer(OWNERSHIP, SPEC.moe_layers[0], GROUPS, MoeBackend(experts=kind))
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        x = torch.randn(2, 33, SPEC.hidden, device="cuda", dtype=dtype).requires_grad_()
        out, balance = layer(x)
        (out.float().square().sum() + balance.losses()[0]).backward()
        results.append([out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    return _worst(*results, limit=limit)


def slices_equal_float64(slices: int) -> dict[str, float]:
    """Compare attention of slices in bfloat16 with float64, forward and backward. Return relative differences of norms."""
    length, shape = 1024, (2, 8, 1024, 128)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    k, v = k[:, :2].contiguous(), v[:, :2].contiguous()  # four query heads for each key/value head
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    expected.backward(dout.double())
    outs, dq, dk, dv = [], [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for start in range(0, length, length // slices):
        own, before = slice(start, start + length // slices), slice(0, start)
        out, lse = attend(q[:, :, own], k[:, :, own], v[:, :, own], "causal")
        if start:
            out, lse = merge(out, lse, *attend(q[:, :, own], k[:, :, before], v[:, :, before]))
        outs.append(out.bfloat16())
        shares = []
        for keys, mask in ((own, "causal"), (before, None))[: 2 if start else 1]:
            share, more_k, more_v = attend_backward(
                dout[:, :, own], q[:, :, own], k[:, :, keys], v[:, :, keys], outs[-1], lse, mask
            )
            dk[:, :, keys] += more_k
            dv[:, :, keys] += more_v
            shares.append(share.float())
        dq.append(sum(shares))
    pairs = {
        "out": (torch.cat(outs, 2), expected),
        "dq": (torch.cat(dq, 2), wide[0].grad),
        "dk": (dk, wide[1].grad),
        "dv": (dv, wide[2].grad),
    }
    off = {name: float((one.double() - other.detach()).norm() / other.detach().norm()) for name, (one, other) in pairs.items()}
    assert max(off.values()) < 1e-2, off
    return off


def bfloat16_step() -> dict[str, float]:
    """Compare gradients of a bfloat16 step with those of float64, by gradient norm: relative differences, median and worst."""
    model = {"hidden": 128, "head_dim": 16, "expert_hidden": 64, "ffn_hidden": 128, "init_std": 0.05}
    found = {}
    for precision in ("float64", "bfloat16"):
        recipe = make_recipe(
            1, precision=precision, moe={"experts": "grouped"}, model=model, schedule={"kind": "stream", "degree": 2}
        )
        groups = Groups.create(recipe.placed_fold)
        engine: Any = make_engine(recipe, groups, torch.device("cuda"))
        engine.train([Batch(*(None if x is None else x.cuda() for x in batch)) for batch in batches(recipe, 0, 0)])
        found[precision] = {name: engine.gradients.views[p].double() for name, p in engine.model.named_parameters()}
    off = sorted(
        float((found["bfloat16"][name] - exact).norm() / exact.norm().clamp_min(1e-30))
        for name, exact in found["float64"].items()
    )
    assert off[len(off) // 2] < 5e-2, off
    return {"median": off[len(off) // 2], "worst": off[-1]}


def trace_is_whole() -> dict[str, float]:
    """Record a step of a larger model. Its ops must not last longer than the step, and must fill most of it."""
    recipe = Recipe.parse(
        {
            "model": {"preset": "tiny", "hidden": 2048, "expert_hidden": 4096},
            "data": {"seq_len": 4096},
            "precision": "bfloat16",
            "training": {"global_batch": 1},
            "engine": {"kind": "torch"},
            "schedule": {"kind": "stream", "degree": 2},
        }
    )
    groups, device = Groups.create(recipe.placed_fold), torch.device("cuda")
    engine: Any = make_engine(recipe, groups, device)
    engine.execution.trace = trace = Trace(device)
    given = [_batch(_text(1, 4097, "cuda"))]
    graph, order = engine.execution.step(given)
    for _ in range(3):
        engine.train(given)
    times = trace.times(graph)
    assert set(trace.spans) == set(order), "an op has no span"
    late = {str(op): span.end - span.start for op, span in trace.spans.items() if span.end < span.start}
    assert not late, f"ops end before they start: {late}"
    assert times["compute_ms"] <= times["step_ms"] * 1.001, times
    return times


def training_learns() -> float:
    """Return the loss after 30 bfloat16 steps on one batch, divided by the loss before."""
    model = Transformer(OWNERSHIP, GROUPS, device="cuda", dtype=torch.bfloat16)
    engine = TorchEngine(model, GROUPS, OptimizerSpec(lr=3e-3))
    given = [_batch(part) for part in _text(4, 129, "cuda").split(2)]
    losses = []
    for _ in range(30):
        losses.append(float(all_losses(engine.train(given), GROUPS.control).means()[0]))
        engine.update(3e-3)
    assert losses[-1] < 0.7 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
    return losses[-1] / losses[0]


def _text(sequences: int, length: int, device: str) -> torch.Tensor:
    return torch.randint(0, 257, (sequences, length), generator=torch.Generator().manual_seed(0)).to(device)


def _batch(text_BL: torch.Tensor) -> Batch:
    return Batch(text_BL[:, :-1], text_BL[:, 1:])


def _worst(expected: list[torch.Tensor], found: list[torch.Tensor], limit: float) -> float:
    worst = max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(expected, found, strict=True))
    assert worst <= limit, f"differs by {worst:.2e}, more than {limit:.0e}"
    return worst

"""Checks the engine on a GPU. It is a plain script, because a GPU machine may have torch but no test packages.

    python tests/gpu/check.py [--json]

Checks compare with the CPU or with a plain implementation. The last ones measure. Without a GPU the script says so and exits
with 0.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Batch, Transformer, all_losses
from foldray.moe import MoeBackend, MoELayer
from foldray.recipe import OptimizerSpec
from foldray.runtime import TorchEngine
from foldray.runtime.peak import matmul_peak

GROUPS = Groups.create(Fold(1))
SPEC = ModelSpec(preset="tiny")
OWNERSHIP = Ownership(SPEC, Fold(1))


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


def executor_equals_one_graph() -> float:
    """Compare the executor's gradients of two micro-batches with one graph on the CPU, in float64."""
    text, found = _text(4, 65, "cpu"), []
    whole = Transformer(OWNERSHIP, GROUPS, MoeBackend(experts="loop"), dtype=torch.float64)
    found.append(list(torch.autograd.grad(whole(_batch(text))[0], list(whole.parameters()))))
    model = Transformer(OWNERSHIP, GROUPS, MoeBackend(experts="loop"), device="cuda", dtype=torch.float64)
    engine = TorchEngine(model, GROUPS, OptimizerSpec(clip=None))
    engine.train([_batch(part) for part in text.cuda().split(2)])
    found.append([engine.gradients.views[parameter].cpu() for parameter in model.parameters()])
    return _worst(*found, limit=1e-9)


def grouped_equals_loop(dtype: torch.dtype, limit: float) -> float:
    """Compare the output and gradients of one layer between the fast experts and the plain loop."""
    results = []
    for kind in ("loop", "grouped"):
        torch.manual_seed(0)
        layer = MoELayer(
            OWNERSHIP, SPEC.moe_layers[0], GROUPS, MoeBackend(experts=kind), device=torch.device("cuda"), dtype=dtype
        )
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        x = torch.randn(2, 33, SPEC.hidden, device="cuda", dtype=dtype).requires_grad_()
        out, balance = layer(x)
        (out.float().square().sum() + balance.losses()[0]).backward()
        results.append([out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    return _worst(*results, limit=limit)


def training_learns() -> float:
    """Return the loss after 30 bfloat16 steps on one batch, divided by the loss before."""
    model = Transformer(OWNERSHIP, GROUPS, device="cuda", dtype=torch.bfloat16)
    engine = TorchEngine(model, GROUPS, OptimizerSpec(lr=3e-3))
    batches = [_batch(part) for part in _text(4, 129, "cuda").split(2)]
    losses = []
    for _ in range(30):
        losses.append(float(all_losses(engine.train(batches), GROUPS.control).means()[0]))
        engine.update(3e-3)
    assert losses[-1] < 0.7 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
    return losses[-1] / losses[0]


def layer_share_of_peak() -> dict[str, float]:
    """Time one bfloat16 MoE layer, forward and backward: ms, and the FLOP/s of the experts as a share of the peak."""
    spec = ModelSpec(preset="mixtral-8x22b", hidden=4096, expert_hidden=8192)
    layer = MoELayer(Ownership(spec, Fold(1)), 0, GROUPS, MoeBackend(), device=torch.device("cuda"), dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, 8192, spec.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    seconds = []
    for _ in range(23):
        torch.cuda.synchronize()
        start = time.perf_counter()
        layer(x)[0].backward(torch.ones_like(x))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    timed = seconds[3:]
    peak = matmul_peak(torch.device("cuda"), torch.bfloat16)
    flops = 8192 * spec.topk * 3 * 2 * spec.hidden * spec.expert_hidden * 3
    shown = {"min_ms": min(timed), "median_ms": statistics.median(timed), "max_ms": max(timed)}
    return {key: value * 1e3 for key, value in shown.items()} | {
        "share_of_peak": flops / statistics.median(timed) / peak,
        "peak_tflops": peak / 1e12,
    }


def _text(sequences: int, length: int, device: str) -> torch.Tensor:
    return torch.randint(0, 257, (sequences, length), generator=torch.Generator().manual_seed(0)).to(device)


def _batch(text_BL: torch.Tensor) -> Batch:
    return Batch(text_BL[:, :-1], text_BL[:, 1:])


def _worst(expected: list[torch.Tensor], found: list[torch.Tensor], limit: float) -> float:
    worst = max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in zip(expected, found, strict=True))
    assert worst <= limit, f"differs by {worst:.2e}, more than {limit:.0e}"
    return worst


CHECKS: dict[str, Callable[[], object]] = {
    "float64 model equals the CPU's": model_equals_the_cpus,
    "float64 executor equals one graph on the CPU": executor_equals_one_graph,
    "grouped experts equal the loop, float32": lambda: grouped_equals_loop(torch.float32, 1e-4),
    "grouped experts equal the loop, bfloat16": lambda: grouped_equals_loop(torch.bfloat16, 3e-2),
    "bfloat16 training learns": training_learns,
    "MoE layer T=8192 H=4096 F=8192 E=8 k=2, bfloat16": layer_share_of_peak,
}


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing checked")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    failed = 0
    for name, check in CHECKS.items():
        try:
            found[name] = check()
        except Exception as error:  # the other checks run even if one fails
            found[name] = f"FAILED: {type(error).__name__}: {error}"
            failed += 1
        print(f"{name}: {found[name]}", file=sys.stderr)
    print(json.dumps(found) if "--json" in sys.argv else f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

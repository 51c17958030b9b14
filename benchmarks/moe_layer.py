"""Measure one MoE layer, forward and backward, on one core: foldray and other projects.

    python benchmarks/moe_layer.py [--rounds 9] [--json result.json]

All layers have the same weights and get the same tokens, which are new in every round. Before the measurement, all layers
must agree on the output and on the gradient of the tokens. The layers take turns within a round, in one process, with one
thread, on one core. The script leaves out what is not installed or cannot run here, and says so. Hugging Face's layer runs with
each implementation of experts in transformers, and the best one counts.

The work counts only the matrix products of experts: T·K rows × 3 matrices × 2·H·F operations × 3 for forward and backward.
The table compares the speed with two peaks of the same run. A peak is the best median over the layer's own shapes and 2048³.
The first peak is that of `torch.mm`, which all other projects call. The second peak is the faster one of `torch.mm` and
oneDNN's product. "cpu ms" is the processor time of the process, which is steadier than wall-clock time on a busy machine.

Legend: T tokens, K experts per token, H hidden, F inner, E experts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from common import MALLOC
from peers import Weights, Wrapped, deepspeed_layer, transformers_layer, tutel_layer
from torch import Tensor, nn

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.moe import MoeBackend, MoELayer
from foldray.runtime.peak import processor

WARM_UP = 2
HUGGINGFACE = "huggingface "  # and the implementation of its experts


@dataclass(frozen=True)
class Sizes:
    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int

    @property
    def operations(self) -> int:
        """Floating-point operations of the experts' products, forward and backward."""
        return self.tokens * self.topk * 3 * 2 * self.hidden * self.inner * 3


@dataclass
class Times:
    """Milliseconds of each round: wall-clock time and processor time."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main() -> None:
    args = _arguments()
    if not args.plain_malloc and any(os.environ.get(key) != value for key, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = Sizes(args.tokens, args.hidden, args.inner, args.experts, args.topk)
    layers = build(sizes)
    check(sizes, layers)
    times, peaks = measure(sizes, layers, args.rounds)
    report(sizes, times, peaks)
    if args.json:
        measured: dict[str, Any] = {name: asdict(milliseconds) for name, milliseconds in times.items()}
        document = {"cpu": processor(), "torch": torch.__version__, "sizes": asdict(sizes), "operations": sizes.operations}
        Path(args.json).write_text(json.dumps({**document, "gflops_peak": peaks, "ms": measured}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("tokens", 4096), ("hidden", 512), ("inner", 1024), ("experts", 8), ("topk", 2), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to run on")
    parser.add_argument("--plain-malloc", action="store_true", help="leave glibc's defaults, for every variant")
    parser.add_argument("--json", help="write every measurement to this file")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------------- layers


def build(sizes: Sizes) -> dict[str, nn.Module]:
    """Build all layers with the same weights, and return them by name. foldray's layers come first."""
    ours = Foldray(sizes, "grouped")
    loop = Foldray(sizes, "loop")
    loop.load_state_dict(ours.state_dict())
    layers: dict[str, nn.Module] = {"foldray": ours, "foldray, torch.mm only": TorchMm(ours), "foldray loop": loop}
    weights = Weights.of(ours.layer)
    peers: dict[str, Callable[[], nn.Module]] = {
        **{f"{HUGGINGFACE}{kind}": partial(_huggingface, sizes, weights, kind) for kind in _implementations()},
        "deepspeed": lambda: deepspeed_layer(weights),
        "tutel": lambda: tutel_layer(weights),
    }
    _one_process()
    for name, make in peers.items():
        try:
            layers[name] = make()
        except (ImportError, ValueError, MemoryError) as error:
            print(f"left out: {name} ({error})")
    return layers


class Foldray(nn.Module):
    """foldray's layer, on a fold of one rank."""

    def __init__(self, sizes: Sizes, kind: Literal["grouped", "loop"]):
        super().__init__()
        spec = ModelSpec.model_validate(
            {"layers": 1, "hidden": sizes.hidden, "heads": 1, "kv_heads": 1, "head_dim": sizes.hidden, "ffn_hidden": sizes.inner}
            | {"experts": sizes.experts, "topk": sizes.topk, "expert_hidden": sizes.inner, "vocab": 1}
        )
        self.layer = MoELayer(Ownership(spec, Fold(1)), 0, Groups.create(Fold(1)), MoeBackend(experts=kind))
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.layer(x_TH[None])[0][0]


class TorchMm(Wrapped):
    """foldray's layer without oneDNN: the same code with `torch.mm`, which all other projects call."""

    def __init__(self, ours: Foldray):
        super().__init__(ours, ours)


def _implementations() -> list[str]:
    """Return the names of all implementations of experts in transformers."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        print(f"left out: {HUGGINGFACE}({error})")
        return []
    return ["eager", *sorted(ALL_EXPERTS_FUNCTIONS)]


def _huggingface(sizes: Sizes, weights: Weights, implementation: str) -> nn.Module:
    copied = 2 * sizes.tokens * sizes.topk * 3 * sizes.hidden * sizes.inner * 4  # float32, with gradients
    if implementation == "batched_mm" and copied > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"):
        raise MemoryError(f"copies an expert's weights for every row, {copied >> 30} GiB with gradients, which are not free here")
    layer = transformers_layer(weights, implementation)
    step(layer, torch.randn(1, sizes.hidden), torch.randn(1, sizes.hidden))  # raises if the implementation needs what is not here
    return layer


def _one_process() -> None:
    """Make a process group of this process only, which DeepSpeed and Tutel need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# ------------------------------------------------------------------------------------------------------------ measurements


def tokens(sizes: Sizes) -> tuple[Tensor, Tensor]:
    return torch.randn(sizes.tokens, sizes.hidden), torch.randn(sizes.tokens, sizes.hidden)


def step(layer: nn.Module, x_TH: Tensor, dout_TH: Tensor) -> tuple[Tensor, Tensor | None]:
    """Run forward and backward, and return out_TH and dx_TH. All gradients are cleared before."""
    for parameter in layer.parameters():
        parameter.grad = None
    x_TH = x_TH.detach().requires_grad_()
    # torch.backends.mkldnn.flags also changes settings of Intel GPUs, and warns, so it is not used here.
    torch._C._set_mkldnn_enabled(not isinstance(layer, TorchMm))
    out_TH = layer(x_TH)
    out_TH.backward(dout_TH)
    torch._C._set_mkldnn_enabled(True)
    return out_TH.detach(), x_TH.grad


def check(sizes: Sizes, layers: dict[str, nn.Module]) -> None:
    """Check that every layer computes the same output and the same gradient as foldray's reference."""
    x_TH, dout_TH = tokens(sizes)
    reference = step(layers["foldray loop"], x_TH, dout_TH)
    for name, layer in layers.items():
        for what, result_TH, expected_TH in zip(("output", "gradient"), step(layer, x_TH, dout_TH), reference, strict=True):
            assert result_TH is not None
            assert expected_TH is not None
            error = ((result_TH - expected_TH).norm() / expected_TH.norm()).item()
            if error > 1e-5:
                raise SystemExit(f"{name}: the {what} is off by {error:.1e}")


def measure(sizes: Sizes, layers: dict[str, nn.Module], rounds: int) -> tuple[dict[str, Times], dict[str, float]]:
    """Measure layers and products in turns. Return the layers' times, and the peaks in GFLOP/s."""
    times = {name: Times() for name in layers}
    products = [(kind, shape) for kind in ("torch.mm", "onednn") for shape in _shapes(sizes)]
    rates: dict[Any, list[float]] = {product: [] for product in products}
    gc.disable()
    for r in range(WARM_UP + rounds):
        x_TH, dout_TH = tokens(sizes)
        for name, layer in layers.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            step(layer, x_TH, dout_TH)
            if r >= WARM_UP:
                times[name].wall.append((time.perf_counter() - wall) * 1e3)
                times[name].cpu.append((time.process_time() - cpu) * 1e3)
        for product in products:
            rates[product] += [_product(*product) for _ in range(3)]
    gc.enable()
    medians = {product: statistics.median(values) for product, values in rates.items()}
    peaks = {kind: max(rate for (k, _), rate in medians.items() if k == kind) for kind in ("torch.mm", "onednn")}
    return times, peaks


def _shapes(sizes: Sizes) -> list[tuple[int, int, int]]:
    """Return (M, K, N) of every product of one expert with an even load, and of a large square product."""
    n, H, W = sizes.tokens * sizes.topk // sizes.experts, sizes.hidden, 2 * sizes.inner
    return [(n, H, W), (n, W // 2, H), (n, H, W // 2), (n, W, H), (H, n, W), (W // 2, n, H), (2048, 2048, 2048)]


def _product(kind: str, shape: tuple[int, int, int]) -> float:
    """Measure the GFLOP/s of one product, in processor time."""
    M, K, N = shape
    a, b, out = torch.randn(M, K), torch.randn(K, N), torch.zeros(M, N)
    start = time.process_time()
    if kind == "torch.mm":
        torch.mm(a, b, out=out)
    else:
        torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return 2 * M * K * N / (time.process_time() - start) / 1e9


def report(sizes: Sizes, times: dict[str, Times], peaks: dict[str, float]) -> None:
    print(f"{processor()}, one core, torch {torch.__version__}, float32, {sizes}")
    print(f"peak: torch.mm {peaks['torch.mm']:.1f} GFLOP/s, oneDNN {peaks['onednn']:.1f}; {len(times['foldray'].wall)} rounds")
    print(f"{'layer':<24}{'ms':>8}{'min':>8}{'max':>8}{'cpu ms':>8}{'tokens/s':>10}{'% of mm':>9}{'% of best':>11}{'× ours':>8}")
    ours = statistics.median(times["foldray"].wall)
    for name, rounds in times.items():
        wall, cpu = statistics.median(rounds.wall), statistics.median(rounds.cpu)
        low, high, speed = min(rounds.wall), max(rounds.wall), sizes.tokens / wall * 1e3
        columns = f"{wall:>8.1f}{low:>8.1f}{high:>8.1f}{cpu:>8.1f}{speed:>10.0f}"
        rate = sizes.operations / cpu / 1e6  # the peaks use processor time, too
        print(f"{name:<24}{columns}{rate / peaks['torch.mm']:>9.1%}{rate / max(peaks.values()):>11.1%}{wall / ours:>8.2f}")
    peers = [name for name in times if name.startswith(HUGGINGFACE)]
    if peers:
        best = min(peers, key=lambda name: statistics.median(times[name].wall))
        print(f"the best of Hugging Face is {best}: {statistics.median(times[best].wall) / ours:.2f} × the time of foldray")


if __name__ == "__main__":
    main()

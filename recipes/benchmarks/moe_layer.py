"""One MoE layer, forward and backward, on one core: foldray against its peers.

All layers hold the same weights, see the same tokens (new ones each round) and must give the same result before anything is
timed. The variants alternate within a round, under the same process settings, with as many threads (one) on the same core.

    python recipes/benchmarks/moe_layer.py [--rounds 9] [--core 1] [--json result.json]

Peers that are not installed are left out with a line that says so. Only the experts' matrix products count as work
(T·K tokens × 3 matrices × 2·H·F operations × 3 for forward and backward), and there are two peaks to compare with, both the
best median over the layer's own shapes and 2048³, measured in the same run: `torch.mm`, which is what the peers call, and the
faster of `torch.mm` and oneDNN's float32 product, which is the most that this core gives through torch.

Legend: T tokens, K experts per token, H hidden, F inner, E experts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# glibc gives large blocks back to the kernel when they are freed, so every step touches fresh pages, one fault per 4 KiB.
# Keeping them helps every variant (foldray's trainer sets the same for its workers); read only when a process starts.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Sizes:
    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int

    @property
    def flops(self) -> int:
        """Operations of the experts' products, forward and backward."""
        return self.tokens * self.topk * 3 * 2 * self.hidden * self.inner * 3


@dataclass(frozen=True)
class Result:
    """What one variant measured: milliseconds of each round, in order."""

    name: str
    ms: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def main() -> None:
    args = _arguments()
    if not args.plain_malloc and any(os.environ.get(key) != value for key, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    sys.path.insert(0, str(ROOT))
    import torch

    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = Sizes(args.tokens, args.hidden, args.inner, args.experts, args.topk)
    layers = build(sizes)
    load = check(sizes, layers)
    results, mm, best = measure(sizes, layers, args.rounds)
    report(sizes, results, mm, best, load)
    if args.json:
        document = {"sizes": asdict(sizes), "flops": sizes.flops, "load_max_over_mean": load, "peak_mm": mm, "peak_best": best}
        document |= {"cpu": _cpu(), "torch": torch.__version__, "results": [asdict(result) for result in results]}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("tokens", 4096), ("hidden", 512), ("inner", 1024), ("experts", 8), ("topk", 2), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to stay on")
    parser.add_argument("--plain-malloc", action="store_true", help="leave glibc's defaults")
    parser.add_argument("--json", help="write every measurement to this file")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------------- variants


def build(sizes: Sizes) -> dict[str, Callable]:
    """The layers by name, each a function x_TH → out_TH whose parameters are all equal; ours first."""
    ours = _foldray(sizes, "grouped")
    layers: dict[str, Callable] = {"foldray": ours}
    for name, make in (("foldray loop", _foldray_loop), ("huggingface grouped_mm", _hf_grouped), ("huggingface eager", _hf_eager),
                       ("deepspeed", _deepspeed), ("tutel", _tutel)):  # fmt: skip
        try:
            layers[name] = make(sizes, ours)
        except ImportError as error:
            print(f"left out: {name} ({error})")
    return layers


def _foldray(sizes: Sizes, kind: str) -> Callable:
    import torch
    from torch import nn

    from foldray.comm import Groups
    from foldray.fold import Fold
    from foldray.moe import MoeBackend, MoELayer
    from foldray.spec import ModelSpec

    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            spec = ModelSpec(layers=1, hidden=sizes.hidden, heads=1, kv_heads=1, head_dim=sizes.hidden, ffn_hidden=sizes.inner,
                             experts=sizes.experts, topk=sizes.topk, expert_hidden=sizes.inner, vocab=1)  # fmt: skip
            self.layer = MoELayer(spec, Groups.create(Fold(1)), MoeBackend(experts=kind), None)  # type: ignore[arg-type]
            for parameter in self.layer.parameters():
                nn.init.normal_(parameter, std=0.02)

        def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
            return self.layer(x_TH[None])[0][0]

    return Ours()


def _foldray_loop(sizes: Sizes, ours: Callable) -> Callable:
    loop = _foldray(sizes, "loop")
    loop.load_state_dict(ours.state_dict())
    return loop


def _weights(ours: Callable) -> tuple:
    """Router [E, H], up [E, H, 2F], down [E, F, H]."""
    layer = ours.layer
    return layer.router.weight.detach().t(), layer.experts.up.detach(), layer.experts.down.detach()


def _hf_grouped(sizes: Sizes, ours: Callable) -> Callable:
    return _huggingface(sizes, ours, "grouped_mm")


def _hf_eager(sizes: Sizes, ours: Callable) -> Callable:
    return _huggingface(sizes, ours, "eager")


def _huggingface(sizes: Sizes, ours: Callable, implementation: str) -> Callable:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=sizes.hidden, intermediate_size=sizes.inner, num_local_experts=sizes.experts,
                           num_experts_per_tok=sizes.topk, experts_implementation=implementation)  # fmt: skip
    block = MixtralSparseMoeBlock(config).train()
    router, up, down = _weights(ours)
    block.gate.weight.data.copy_(router)
    block.experts.gate_up_proj.data.copy_(up.transpose(1, 2))
    block.experts.down_proj.data.copy_(down.transpose(1, 2))
    return _Call(block, lambda x_TH: block(x_TH[None])[0])


def _deepspeed(sizes: Sizes, ours: Callable) -> Callable:
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(sizes.hidden, 2 * sizes.inner, bias=False)
            self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, value = self.up(x).chunk(2, -1)
            return self.down(nn.functional.silu(gate) * value)

    _one_process()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no compiling while we measure
    deepspeed.init_distributed("gloo", verbose=False)
    # drop_tokens=False is DeepSpeed's dropless: every expert is padded to the busiest one.
    layer = MoE(sizes.hidden, Mlp(), sizes.experts, k=sizes.topk, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False)
    layer.set_deepspeed_parallelism()
    router, up, down = _weights(ours)
    layer.deepspeed_moe.gate.wg.weight.data.copy_(router)
    for e, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        expert.up.weight.data.copy_(up[e].t())
        expert.down.weight.data.copy_(down[e].t())
    return _Call(layer, lambda x_TH: layer(x_TH)[0])


def _tutel(sizes: Sizes, ours: Callable) -> Callable:
    _one_process()
    from tutel import moe

    # capacity_factor 0 is Tutel's dropless: every expert is padded to the busiest one.
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": sizes.topk, "capacity_factor": 0.0},
        experts={"type": "llama_ffn", "num_experts_per_device": sizes.experts, "hidden_size_per_expert": sizes.inner},
        model_dim=sizes.hidden,
    )
    router, up, down = _weights(ours)
    layer.gates[0].wg.weight.data.copy_(router)
    gate, value = up.chunk(2, -1)
    for parameter, weight in zip((layer.experts.W_fc1, layer.experts.W_fc2, layer.experts.W_fc3), (gate, value, down), strict=True):
        parameter.data.copy_(weight.reshape(-1))
    return _Call(layer, layer)


class _Call:
    """A module whose output comes out of `call`."""

    def __init__(self, module, call: Callable):
        self.module, self.call = module, call

    def __call__(self, x_TH):
        return self.call(x_TH)

    def parameters(self) -> Iterator:
        return self.module.parameters()


def _one_process() -> None:
    """A process group of this process alone, which DeepSpeed and Tutel want."""
    import torch.distributed as dist

    if not dist.is_initialized():
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# ------------------------------------------------------------------------------------------------------------ measurements


def tokens(sizes: Sizes) -> tuple:
    """Fresh x_TH and dout_TH."""
    import torch

    return torch.randn(sizes.tokens, sizes.hidden), torch.randn(sizes.tokens, sizes.hidden)


def step(layer: Callable, x_TH, dout_TH) -> tuple:
    """Forward and backward of one layer, from no gradients: out_TH, dx_TH."""
    for parameter in layer.parameters():
        parameter.grad = None
    x_TH = x_TH.detach().requires_grad_()
    out_TH = layer(x_TH)
    out_TH.backward(dout_TH)
    return out_TH.detach(), x_TH.grad


def check(sizes: Sizes, layers: dict[str, Callable]) -> float:
    """All layers agree on the output and on the gradient of the input. Returns the busiest expert's load over the mean."""
    import torch

    x_TH, dout_TH = tokens(sizes)
    reference = step(layers["foldray loop"], x_TH, dout_TH)
    for name, layer in layers.items():
        for what, got, want in zip(("output", "gradient"), step(layer, x_TH, dout_TH), reference, strict=True):
            error = ((got - want).norm() / want.norm()).item()
            if error > 1e-5:
                raise SystemExit(f"{name}: {what} is off by {error:.1e}; a benchmark of different computations means nothing")
    router = _weights(layers["foldray"])[0]
    counts = (x_TH @ router.t()).topk(sizes.topk).indices.flatten().bincount(minlength=sizes.experts)
    return (counts.max() / counts.to(torch.float32).mean()).item()


def measure(sizes: Sizes, layers: dict[str, Callable], rounds: int) -> tuple[list[Result], float, float]:
    """Alternating rounds of every layer and of the peaks; the results and both peaks in GFLOP/s."""
    ms: dict[str, list[float]] = {name: [] for name in layers}
    products = [(kind, shape) for kind in ("mm", "onednn") for shape in _shapes(sizes)]
    rates: dict[tuple, list[float]] = {product: [] for product in products}
    gc.disable()
    for r in range(rounds + 2):  # two rounds to warm up
        x_TH, dout_TH = tokens(sizes)
        for name, layer in layers.items():
            gc.collect()
            start = time.perf_counter()
            step(layer, x_TH, dout_TH)
            if r >= 2:
                ms[name].append((time.perf_counter() - start) * 1e3)
        for product in products:
            rates[product] += [_product(*product) for _ in range(3)]
    gc.enable()
    peaks = {kind: max(statistics.median(rate) for (k, _), rate in rates.items() if k == kind) for kind in ("mm", "onednn")}
    return [Result(name, times) for name, times in ms.items()], peaks["mm"], max(peaks.values())


def _shapes(sizes: Sizes) -> list[tuple[int, int, int]]:
    """(M, K, N) of every product of one expert at even load, and a big cube."""
    n, H, F = sizes.tokens * sizes.topk // sizes.experts, sizes.hidden, sizes.inner
    return [(n, H, 2 * F), (n, F, H), (n, H, F), (n, 2 * F, H), (H, n, 2 * F), (F, n, H), (2048, 2048, 2048)]


def _product(kind: str, shape: tuple[int, int, int]) -> float:
    """GFLOP/s of one product."""
    import torch

    M, K, N = shape
    a, b = torch.randn(M, K), torch.randn(K, N)
    out = torch.empty(M, N)
    start = time.perf_counter()
    if kind == "mm":
        torch.mm(a, b, out=out)
    else:
        torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return 2 * M * K * N / (time.perf_counter() - start) / 1e9


def report(sizes: Sizes, results: list[Result], mm: float, best: float, load: float) -> None:
    """The table."""
    import torch

    print(f"{_cpu()}, one core, torch {torch.__version__}, float32, {sizes}, busiest expert {load:.2f} × the mean")
    print(f"peak {mm:.1f} GFLOP/s with torch.mm, {best:.1f} with the fastest product in torch; {len(results[0].ms)} rounds")
    print(f"{'layer':<24}{'median ms':>10}{'min':>8}{'max':>8}{'tokens/s':>10}{'% of mm':>9}{'% of best':>11}{'× ours':>8}")
    for result in results:
        rate = sizes.flops / result.median / 1e6
        print(
            f"{result.name:<24}{result.median:>10.1f}{min(result.ms):>8.1f}{max(result.ms):>8.1f}"
            f"{sizes.tokens / result.median * 1e3:>10.0f}{rate / mm:>9.1%}{rate / best:>11.1%}{result.median / results[0].median:>8.2f}"
        )


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()

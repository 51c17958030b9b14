"""The command `foldray calibrate`. It measures the speed of a recipe's workers, and writes a hardware file for the planner.

All workers measure at the same time. Every figure is the median of the slowest worker. The speed of the fastest matrix
product is the peak, and a table has the share of the peak for every size. Other figures are shares of the peak, or of the
bandwidth of memory or links.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
import yaml

from foldray.comm import Communicator, Groups, Pending
from foldray.errors import UserError
from foldray.fold import Fold, divisors
from foldray.kernels.experts import expert_ffn
from foldray.planner.candidate import DTYPES
from foldray.planner.hardware import Hardware
from foldray.recipe import Recipe
from trainers.cluster import workers
from trainers.measure.meter import ROUNDS, Meter
from trainers.measure.op_times import attention_length, of_ops, of_slices
from trainers.records import as_json as to_json

_SIDES = (64, 128, 256, 512, 1024, 2048)
_BYTES = (1 << 14, 1 << 18, 1 << 22)  # bytes that a rank sends
_BESIDE = 0.3  # seconds of all-to-alls that run beside computation; with fewer, the measurement is mostly noise
_MESSAGES = 64  # most of these all-to-alls


def calibrate(recipe: Recipe, path: Path, as_json: bool = False) -> int:
    """Measure the workers and write the hardware file.

    Raises:
        UserError: the file cannot be written, or the recipe cannot run here.
    """
    if path.suffix not in (".yaml", ".yml") or not path.absolute().parent.is_dir():
        raise UserError("out", path, "must be a .yaml file in a folder that exists")
    print(f"measuring {recipe.cluster.workers} workers …", file=sys.stderr)
    result = workers.on_workers(recipe, _loop, "calibrate", hardware_name=path.stem)
    hardware = Hardware.model_validate(result["hardware"])
    try:
        path.write_text(yaml.safe_dump(hardware.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise UserError("out", path, f"cannot be written ({error.strerror or error})") from None
    print(to_json(hardware.model_dump()) if as_json else _table(hardware, path))
    return 0


def _loop(config: dict[str, Any]) -> dict[str, Any] | None:
    """Measure on a worker. The first worker returns the content of the file."""
    recipe, groups, device = workers.worker(config)
    node = int(ray.get_runtime_context().get_node_id()[:15], 16)
    hardware = measured(recipe, groups, device, config["hardware_name"], node)
    groups.close()
    return {"hardware": hardware} if groups.rank == groups.fold.offset else None


def measured(recipe: Recipe, everyone: Groups, device: torch.device, name: str, node: int) -> dict[str, Any]:
    """Measure all figures of a hardware file. All ranks must call this, and get the same result.

    Args:
        node: a number of this rank's node.
    """
    dtype, world = getattr(torch, recipe.precision), everyone.fold.world_size
    meter = Meter(device, everyone.control, dtype)
    gemm = _products(meter, device, dtype)
    peak = max(speed for _, speed in gemm)
    memory = _memory(meter, device)
    nodes = everyone.control.all_gather(torch.tensor([node], device=device)).tolist()
    together = math.gcd(*Counter(nodes).values())
    links, exchange, crowding = _links(meter, everyone, together, memory)
    constants = {
        "gemm": 1.0, "memory": 1.0, "optimizer": 1.0, "intra": 1.0, "inter": 1.0, "straggling": 0.0, "contention": 0.0,
        "workspace": 0.0, "attention": _attention(meter, device, dtype, attention_length(recipe)) / peak,
        "grouped": min(1.0, _grouped(meter, device, dtype)), "exchange": exchange, "crowding": crowding,
    }  # fmt: skip
    hardware = {
        "name": name, "about": f"{world} workers of {recipe.name}", "source": "measured by foldray calibrate",
        "gpus_per_node": together, "peak_tflops": {DTYPES[recipe.precision]: peak / 1e12}, "processors": 1,
        "memory_gib": _room(device) / 2**30 / (1 if device.type == "cuda" else together), "memory_gb_s": memory / 1e9, **links,
        "constants": constants, "gemm": [(flops, speed / peak) for flops, speed in gemm],
    }  # fmt: skip
    hardware["constants"] = constants | of_ops(meter, recipe, Hardware.model_validate(hardware))
    return {**hardware, "attention": of_slices(meter, recipe, Hardware.model_validate(hardware))}


def _links(meter: Meter, everyone: Groups, together: int, memory: float) -> tuple[dict[str, dict[str, Any]], float, float]:
    """Measure the links inside and between nodes.

    Args:
        together: number of workers on a node.
        memory: bytes per second of memory, for a kind of link that no two workers share.

    Returns:
        Both links by the size of groups; the bandwidth of all-to-alls over the largest group, as a share of all-gathers; and
        the slowdown of computation beside these all-to-alls (`_crowding`).
    """
    world, device = everyone.fold.world_size, meter.device
    by_size: dict[str, list[tuple[int, float, float]]] = {"intra": [], "inter": []}
    exchange, crowding = 1.0, 0.0
    sizes = {"intra": divisors(together), "inter": divisors(world // together)}
    for name, size in [(lane, size) for lane in by_size for size in sizes[lane] if size > 1]:
        # Ranks of a node have consecutive numbers. So TP groups lie inside a node, and EP groups lie across nodes.
        inside = size if name == "intra" else together
        fold = Fold(world, tp=inside, etp=inside, ep=1 if name == "intra" else size, offset=everyone.fold.offset)
        groups = Groups.create(fold, everyone.rank)
        over = groups.tensor if name == "intra" else groups.tokens
        by_size[name].append((size, *_link(meter, over, device)))
        exchange = _exchange(meter, over, device) / by_size[name][-1][1]
        crowding = _crowding(meter, over, device)
        groups.close()
    no_link = (1, memory / 1e9, 0.0)
    largest = {name: (measured_sizes or [no_link])[-1] for name, measured_sizes in by_size.items()}
    links = {name: {"gb_s": row[1], "latency_us": row[2], "by_size": by_size[name]} for name, row in largest.items()}
    return links, exchange, crowding


def _products(meter: Meter, device: torch.device, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Measure (FLOPs, FLOP/s) of square matrix products, the smallest first."""
    speeds = []
    for side in _SIDES:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        flops = 2.0 * side**3
        speeds.append((flops, flops / meter(partial(torch.matmul, a, b))))
    return speeds


def _memory(meter: Meter, device: torch.device) -> float:
    """Measure the bytes per second that a pass over memory reads and writes."""
    x = torch.randn(1 << 23, device=device)
    y = torch.empty_like(x)
    return 2 * 4 * x.numel() / meter(lambda: torch.mul(x, 1.5, out=y))


def _attention(meter: Meter, device: torch.device, dtype: torch.dtype, length: int) -> float:
    """Measure the FLOP/s of causal attention. Forward and backward together count 3.5 times the forward FLOPs."""
    heads, width = 8, 64
    q, k, v = (torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, heads, length, width, device=device, dtype=dtype)

    def both() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    return 3.5 * 4 * heads * width * length * (length + 1) / 2 / meter(both)


def _grouped(meter: Meter, device: torch.device, dtype: torch.dtype) -> float:
    """Measure the speed of eight experts, as a share of the speed of one expert with all rows."""
    rows, hidden, inner = 2048, 256, 512
    x = torch.randn(rows, hidden, device=device, dtype=dtype)

    def of(experts: int) -> float:
        up = torch.randn(experts, hidden, 2 * inner, device=device, dtype=dtype)
        down = torch.randn(experts, inner, hidden, device=device, dtype=dtype)
        return meter(lambda: expert_ffn(x, [rows // experts] * experts, up, down, "gated_silu", "grouped"))

    return of(1) / of(8)


def _link(meter: Meter, over: Communicator, device: torch.device) -> tuple[float, float]:
    """Measure the GB/s of all-gathers over a group, and the microseconds that each message takes to start."""
    points = []
    for size in _BYTES:
        x = torch.zeros(size // 4, device=device)
        points.append((size * (over.size - 1), meter.plain(partial(over.all_gather, x))))
    per_byte, start = _line(points)
    return 1e-9 / per_byte, start * 1e6 / math.log2(over.size)


def _exchange(meter: Meter, over: Communicator, device: torch.device) -> float:
    """Measure the GB/s of all-to-alls over a group."""
    points = []
    for size in _BYTES:
        rows = size // 4 // over.size
        x, even = torch.zeros(rows * over.size, 1, device=device), [rows] * over.size
        points.append((4 * rows * (over.size - 1), meter.plain(partial(over.all_to_all, x, even, even))))
    return 1e-9 / _line(points)[0]


def _crowding(meter: Meter, over: Communicator, device: torch.device) -> float:
    """Measure how many seconds longer computation takes for each second of all-to-alls that run beside it."""
    rows = _BYTES[-1] // 4 // over.size
    x, even = torch.zeros(rows * over.size, 1, device=device), [rows] * over.size

    def travel(messages: int) -> list[Pending]:
        return [over.start_all_to_all(x, even, even) for _ in range(messages)]

    def arrive(exchanges: Sequence[Pending]) -> None:
        for pending in exchanges:
            pending.wait()

    messages = min(_MESSAGES, math.ceil(_BESIDE / meter.plain(lambda: arrive(travel(1)))))
    alone = meter.plain(lambda: arrive(travel(messages)))
    products = math.ceil(2 * alone / meter.standard)

    def compute(beside: bool) -> float:
        """Return the seconds of the products. Waiting for the all-to-alls afterwards does not count."""
        exchanges = travel(messages) if beside else []
        seconds = meter.took(meter.product, products)
        arrive(exchanges)
        return seconds

    pairs = [(compute(True), compute(False)) for _ in range(ROUNDS)]
    return min(1.0, max(0.0, meter.slowest(statistics.median(beside - by_itself for beside, by_itself in pairs)) / alone))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the seconds per byte and to start, from the smallest and the largest of (bytes, seconds)."""
    (small, first), (large, last) = points[0], points[-1]
    per_byte = (last - first) / (large - small)
    return per_byte, max(0.0, first - per_byte * small)


def _room(device: torch.device) -> float:
    """Return the bytes of memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")]
    return int(line.split()[1]) * 1024.0


def _table(hardware: Hardware, path: Path) -> str:
    lines = [f"{hardware.gpus_per_node} workers per node, {hardware.memory_gib:.1f} GiB each", ""]
    lines += [f"  {'peak ' + dtype:<22}{peak:>10.3f} TFLOP/s" for dtype, peak in hardware.peak_tflops.items()]
    lines += [f"  {'product of ' + f'{(flops / 2) ** (1 / 3):.0f}³':<22}{share:>10.1%} of peak" for flops, share in hardware.gemm]
    lines.append(f"  {'memory':<22}{hardware.memory_gb_s:>10.2f} GB/s")
    lines += [f"  {f'attention, {tokens} tokens':<22}{share:>10.1%} of its best" for tokens, share in hardware.attention]
    for name in ("intra", "inter"):
        link = getattr(hardware, name)
        lines += [
            f"  {f'{name} node, {size} ranks':<22}{gb_s:>10.3f} GB/s, {us:.0f} µs to start" for size, gb_s, us in link.by_size
        ]
    lines += [
        f"  {name:<22}{hardware.constants[name]:>10.3g}"
        for name in ("attention", "grouped", "permute", "exchange", "crowding", "launch")
    ]
    return "\n".join([*lines, "", f"written: {path}; plan with --cluster {path}"])

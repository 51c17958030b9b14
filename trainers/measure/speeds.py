"""Measures the speed of workers, memory and links: the figures of a hardware file.

All workers measure at the same time. Every figure is the median of the slowest worker. The speed of the fastest matrix
product is the peak, and a table has the share of the peak for every size. Other figures are shares of the peak, or of the
bandwidth of memory or links.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from foldray.blueprint import ModelSpec
from foldray.comm import Communicator, Groups, Pending
from foldray.costs.candidate import DTYPES
from foldray.costs.device import full_waves
from foldray.costs.hardware import Hardware
from foldray.fold import Fold, divisors
from foldray.kernels.experts import expert_ffn
from foldray.recipe import Recipe
from trainers.measure.meter import ROUNDS, Meter
from trainers.measure.op_times import attention_length, of_ops, of_slices

_BESIDE = 0.3  # seconds of all-to-alls that run beside computation; with fewer, the measurement is mostly noise
_MESSAGES = 64  # most of these all-to-alls


class Sizes(NamedTuple):
    """What is measured. A GPU computes so fast that small sizes would show only the start of kernels, or its cache.

    Args:
        sides: sides of square matrix products, ascending.
        sent: bytes that a rank sends, ascending.
        passed: numbers that a pass over memory reads, and writes.
        heads: heads of attention, and their width.
        experts: rows, hidden and inner width of the experts.
    """

    sides: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    sent: tuple[int, ...] = (1 << 14, 1 << 18, 1 << 22)
    passed: int = 1 << 23
    heads: tuple[int, int] = (8, 64)
    experts: tuple[int, int, int] = (2048, 256, 512)

    @classmethod
    def of(cls, device: torch.device, model: ModelSpec) -> Sizes:
        if device.type != "cuda":
            return cls()
        return cls(
            sides=(2048, 4096, 8192, 16384), sent=(1 << 16, 1 << 22, 1 << 28), passed=1 << 28,
            heads=(32, 128), experts=(16384, model.hidden, model.expert_hidden),
        )  # fmt: skip


def measured(recipe: Recipe, everyone: Groups, device: torch.device, name: str, node: int) -> dict[str, Any]:
    """Measure all figures of a hardware file. All ranks must call this, and get the same result. `node` numbers this node."""
    dtype, world = getattr(torch, recipe.precision), everyone.fold.world_size
    meter, sizes = Meter(device, everyone.control, dtype), Sizes.of(device, recipe.model)
    gemm = _products(meter, sizes.sides, dtype)
    peak = max(speed for _, speed in gemm)
    memory = _memory(meter, sizes.passed)
    nodes = everyone.control.all_gather(torch.tensor([node], device=device)).tolist()
    together = math.gcd(*Counter(nodes).values())
    links, exchange, crowding = _links(meter, everyone, together, memory, sizes.sent)
    constants = {
        "gemm": 1.0, "memory": 1.0, "optimizer": 1.0, "intra": 1.0, "inter": 1.0, "straggling": 0.0, "contention": 0.0,
        "workspace": 0.0, "attention": _attention(meter, sizes.heads, dtype, attention_length(recipe, device)) / peak,
        "grouped": min(1.0, _grouped(meter, sizes.experts, dtype)), "exchange": exchange, "crowding": crowding,
    }  # fmt: skip
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    # The planner counts waves of tiles by itself.
    shares = [
        (flops, speed / peak / full_waves(processors, side, side)) for side, (flops, speed) in zip(sizes.sides, gemm, strict=True)
    ]
    hardware = {
        "name": name, "about": f"{world} workers of {recipe.name}", "source": "measured by foldray calibrate",
        "gpus_per_node": together, "peak_tflops": {DTYPES[recipe.precision]: peak / 1e12}, "processors": processors,
        "memory_gib": _room(device) / 2**30 / (1 if device.type == "cuda" else together), "memory_gb_s": memory / 1e9, **links,
        "constants": constants, "gemm": shares,
    }  # fmt: skip
    hardware["constants"] = constants | of_ops(meter, recipe, Hardware.model_validate(hardware))
    return {**hardware, "attention": of_slices(meter, recipe, Hardware.model_validate(hardware))}


def _links(
    meter: Meter, everyone: Groups, together: int, memory: float, sent: Sequence[int]
) -> tuple[dict[str, dict[str, Any]], float, float]:
    """Measure the links inside and between nodes.

    Args:
        together: number of workers on a node.
        memory: bytes per second of memory, for a kind of link that no two workers share.

    Returns:
        Both links by the size of groups; the bandwidth of all-to-alls over the largest group, as a share of all-gathers; and
        the slowdown of computation beside these all-to-alls (`_crowding`).
    """
    world = everyone.fold.world_size
    by_size: dict[str, list[tuple[int, float, float]]] = {"intra": [], "inter": []}
    exchange, crowding = 1.0, 0.0
    sizes = {"intra": divisors(together), "inter": divisors(world // together)}
    for name, size in [(lane, size) for lane in by_size for size in sizes[lane] if size > 1]:
        # Ranks of a node have consecutive numbers. So TP groups lie inside a node, and EP groups lie across nodes.
        inside = size if name == "intra" else together
        fold = Fold(world, tp=inside, etp=inside, ep=1 if name == "intra" else size, offset=everyone.fold.offset)
        groups = Groups.create(fold, everyone.rank)
        over = groups.tensor if name == "intra" else groups.tokens
        by_size[name].append((size, *_link(meter, over, sent)))
        exchange = _exchange(meter, over, sent) / by_size[name][-1][1]
        crowding = _crowding(meter, over, sent[-1])
        groups.close()
    no_link = (1, memory / 1e9, 0.0)
    largest = {name: (rows or [no_link])[-1] for name, rows in by_size.items()}
    links = {name: {"gb_s": row[1], "latency_us": row[2], "by_size": by_size[name]} for name, row in largest.items()}
    return links, exchange, crowding


def _products(meter: Meter, sides: Sequence[int], dtype: torch.dtype) -> list[tuple[float, float]]:
    """Measure (FLOPs, FLOP/s) of square matrix products, the smallest first."""
    speeds = []
    for side in sides:
        a, b = (torch.randn(side, side, device=meter.device, dtype=dtype) for _ in range(2))
        flops = 2.0 * side**3
        speeds.append((flops, flops / meter(partial(torch.matmul, a, b))))
    return speeds


def _memory(meter: Meter, numbers: int) -> float:
    """Measure the bytes per second that a pass over memory reads and writes."""
    x = torch.randn(numbers, device=meter.device)
    y = torch.empty_like(x)
    return 2 * 4 * x.numel() / meter(lambda: torch.mul(x, 1.5, out=y))


def _attention(meter: Meter, sizes: tuple[int, int], dtype: torch.dtype, length: int) -> float:
    """Measure the FLOP/s of causal attention. Forward and backward together count 3.5 times the forward FLOPs."""
    (heads, width), device = sizes, meter.device
    q, k, v = (torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, heads, length, width, device=device, dtype=dtype)

    def both() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    return 3.5 * 4 * heads * width * length * (length + 1) / 2 / meter(both)


def _grouped(meter: Meter, sizes: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Measure the speed of eight experts, as a share of the speed of one expert with all rows."""
    (rows, hidden, inner), device = sizes, meter.device
    x = torch.randn(rows, hidden, device=device, dtype=dtype)

    def of(experts: int) -> float:
        up = torch.randn(experts, hidden, 2 * inner, device=device, dtype=dtype)
        down = torch.randn(experts, inner, hidden, device=device, dtype=dtype)
        return meter(lambda: expert_ffn(x, [rows // experts] * experts, up, down, "gated_silu", "grouped"))

    return of(1) / of(8)


def _link(meter: Meter, over: Communicator, sent: Sequence[int]) -> tuple[float, float]:
    """Measure the GB/s of all-gathers over a group, and the microseconds that each message takes to start."""
    points = []
    for size in sent:
        x = torch.zeros(size // 4, device=meter.device)
        points.append((size * (over.size - 1), meter.plain(partial(over.all_gather, x))))
    per_byte, start = _line(points)
    return 1e-9 / per_byte, start * 1e6 / math.log2(over.size)


def _exchange(meter: Meter, over: Communicator, sent: Sequence[int]) -> float:
    """Measure the GB/s of all-to-alls over a group."""
    points = []
    for size in sent:
        rows = size // 4 // over.size
        x, even = torch.zeros(rows * over.size, 1, device=meter.device), [rows] * over.size
        points.append((4 * rows * (over.size - 1), meter.plain(partial(over.all_to_all, x, even, even))))
    return 1e-9 / _line(points)[0]


def _crowding(meter: Meter, over: Communicator, sent: int) -> float:
    """Measure how many seconds longer computation takes for each second of all-to-alls that run beside it."""
    rows = sent // 4 // over.size
    x, even = torch.zeros(rows * over.size, 1, device=meter.device), [rows] * over.size

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
    """Return the seconds per byte and to start, from the smallest and the largest of (bytes, seconds).

    If the largest took no longer, which is noise, it is taken to start at once.
    """
    (small, first), (large, last) = points[0], points[-1]
    if last <= first:
        return last / large, 0.0
    per_byte = (last - first) / (large - small)
    return per_byte, max(0.0, first - per_byte * small)


def _room(device: torch.device) -> float:
    """Return the bytes of memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")]
    return int(line.split()[1]) * 1024.0

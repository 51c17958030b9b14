"""Simulate FlowMoE's four models at the paper's scale with the planner: its main table and its ablation.

    python recipes/papers/flowmoe.py [--json FILE] [--picture FILE]
    python recipes/papers/flowmoe.py --layers [--json FILE]

The cluster has two nodes of eight RTX 3090, with EP16 over all GPUs, attention data-parallel over all GPUs, float32, and no
ZeRO. The paper does not give batches and sequence lengths. This script assumes four sequences of 512 tokens per GPU
(`--batch`, `--length`), and a head size of 64. It simulates one step op by op, until the last reduced gradient has arrived.

| row | schedule | used by |
|---|---|---|
| vanilla | sequential, one reduction at the end | plain expert parallelism |
| buckets | sequential, gradients in buckets of 25 MiB during backward | DistributedDataParallel |
| MoE only | experts overlap their all-to-alls, d = 2, gradients at the end | Tutel, ScheMoE |
| pipeline | attention and experts of two micro-batches in turn (R = 2), gradients at the end | FlowMoE without chunks |
| chunks | sequential, gradients in chunks that give way to all-to-alls | FlowMoE without its pipeline |
| flow | both | FlowMoE |
| 1A1M + chunks | slices of sequences instead of batches, d = 4 | |

The size of chunks is the best one of `SIZES`. The order of models and of rows can be compared with the paper, but times
cannot.

`--layers` sweeps R, the parts of a batch, and S_p, the size of chunks, over 675 models of two equal blocks: as many as the paper
has layers. We do not know its layers, so these are all combinations of `LAYERS`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.progress import track

from foldray.blueprint import ModelSpec
from foldray.costs import hardware
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.ops import OpWork
from foldray.costs.whole import simulate_step
from foldray.fold import Fold
from foldray.graph import SliceCost
from foldray.orders import named_ordering

FOLD = Fold(16, ep=16)
SIZES = tuple(1 << power for power in range(17, 26, 2))
PARTS, CHUNKS = (1, 2, 4, 8), tuple(1 << power for power in range(20, 27, 2))
WIDTHS = (512, 1024, 2048, 4096, 8192)
LAYERS = {"batch": (2, 4, 8), "length": (512, 1024, 2048), "hidden": WIDTHS, "inner": WIDTHS, "topk": (1, 2, 4)}
BASES = ("vanilla", "moe_only")
ROWS = {
    "vanilla": "sequential", "buckets": "sequential+buckets", "MoE only": "moe_only:2", "pipeline": "flow:1@2+end",
    "chunks": "sequential+chunks", "flow": "flow:1@2+chunks", "1A1M + chunks": "one_a_one_m:4+chunks",
}  # fmt: skip
PUBLISHED = {  # ms on 16 GPUs: vanilla expert parallelism, Tutel, FlowMoE
    "GPT2-Tiny-MoE": (169.5, 129.3, 95.6), "BERT-Large-MoE": (537.8, 501.1, 351.9), "LLaMA2-MoE": (1987.7, 1534.1, 1124.0),
    "DeepSeek-V2-S": (5843.3, 4481.4, 3205.3),
}  # fmt: skip


def model(layers: int, hidden: int, inner: int, experts: int, topk: int, vocab: int) -> ModelSpec:
    heads = hidden // 64
    return ModelSpec(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=64, ffn_hidden=inner, experts=experts,
                     topk=topk, expert_hidden=inner, vocab=vocab, ffn="gelu", norm="layernorm")  # fmt: skip


MODELS = {
    "GPT2-Tiny-MoE": model(12, 256, 512, 16, 2, 50257),
    "BERT-Large-MoE": model(24, 512, 1024, 32, 1, 30522),
    "LLaMA2-MoE": model(32, 1024, 4096, 16, 1, 32000),
    "DeepSeek-V2-S": model(4, 5120, 1536, 32, 8, 102400),
}


def seconds(spec: ModelSpec, schedule: str, batch: int, length: int, machines: hardware.Hardware) -> tuple[float, int | None]:
    """Return the seconds of a step, and the best size of chunks; None for a schedule without chunks."""
    if not schedule.endswith("+chunks"):
        return simulated(spec, schedule, batch, length, machines), None
    return min((simulated(spec, f"{schedule}={size}", batch, length, machines), size) for size in SIZES)


def simulated(spec: ModelSpec, schedule: str, batch: int, length: int, machines: hardware.Hardware) -> float:
    """Return the seconds of a step."""
    ordering = named_ordering(schedule, length, SliceCost.of_model(spec.hidden, spec.heads))
    candidate = Candidate(Job(spec, length, batch * FOLD.dp, "fp32"), FOLD, ordering, batch, zero=0)
    return simulate_step(candidate, OpWork(candidate, Device.of(candidate.job, machines))).seconds


class Layer(NamedTuple):
    """The steps of one of `LAYERS`: in sequence, with experts alone in two pieces, and by R and S_p."""

    vanilla: float
    moe_only: float
    flow: dict[tuple[int, int], float]

    @property
    def best(self) -> tuple[int, int]:
        return min(self.flow, key=self.flow.__getitem__)


def swept(machines: hardware.Hardware) -> list[Layer]:
    found = []
    for batch, length, hidden, inner, topk in track([*product(*LAYERS.values())], "layers"):
        spec = model(2, hidden, inner, 16, topk, vocab=256)

        def step(schedule: str, spec: ModelSpec = spec, batch: int = batch, length: int = length) -> float:
            return simulated(spec, schedule, batch, length, machines)

        flow = {
            (parts, size): step(f"{'sequential' if parts == 1 else f'flow:1@{parts}'}+chunks={size}")
            for parts in PARTS if batch % parts == 0 for size in CHUNKS
        }  # fmt: skip
        found.append(Layer(step("sequential"), step("moe_only:2"), flow))
    return found


def tell(layers: list[Layer]) -> dict[str, Any]:
    """Print how often each R and each S_p is the best, and what it costs to keep it for all layers. Return the same."""
    fastest = [layer.flow[layer.best] for layer in layers]
    gains = {name: [getattr(layer, name) / least for layer, least in zip(layers, fastest, strict=True)] for name in BASES}
    rows: dict[str, Any] = {f"over {name}": [median(gain), min(gain), max(gain)] for name, gain in gains.items()}
    for place, (title, values) in enumerate({"R": PARTS, "S_p": CHUNKS}.items()):
        best = Counter(layer.best[place] for layer in layers)
        for value in values:
            kept = [  # by layers that can have it
                min(over) / least for layer, least in zip(layers, fastest, strict=True)
                if (over := [took for key, took in layer.flow.items() if key[place] == value])
            ]  # fmt: skip
            rows[f"{title} {value}"] = {"best": best[value], "layers": len(kept), "median": median(kept), "worst": max(kept)}
    for name, row in rows.items():
        if isinstance(row, list):
            print("{:<16} {:.2f} × ({:.2f} to {:.2f})".format(name, *row))
        else:
            print("{:<16} best for {best} of {layers}; {median:.2f} × the best, at most {worst:.2f} ×".format(name, **row))
    return rows


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    from trainers.pictures.canvas import one_panel, write

    figure, axes = one_panel(11, 5)
    width = 0.8 / len(ROWS)
    for number, name in enumerate(ROWS):
        at = [place + width * number for place in range(len(rows))]
        axes.bar(at, [row["seconds"]["vanilla"] / row["seconds"][name] for row in rows.values()], width, label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(rows))], list(rows))
    axes.set_title("speed over vanilla, simulated", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cluster", default="rtx3090", help="as for `foldray plan` (default %(default)s)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="sequences of a GPU (default %(default)s)")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--layers", action="store_true", help="sweep R and S_p over 675 models of two blocks")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    args = parser.parse_args()
    machines = hardware.load_hardware(args.cluster)
    if args.layers:
        found = tell(swept(machines))
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
        return
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'model':<16}{'vanilla':>11}" + "".join(f"{name:>15}" for name in list(ROWS)[1:]) + f"{'chunk':>12}{'published':>22}")
    for name, spec in MODELS.items():
        times = {row: seconds(spec, schedule, args.batch, args.length, machines) for row, schedule in ROWS.items()}
        base, chunk = times["vanilla"][0], times["flow"][1] or 0
        published = PUBLISHED[name]
        rows[name] = {"seconds": {row: took for row, (took, _) in times.items()}, "chunk": chunk, "published_ms": published}
        cells = "".join(f"{base / times[row][0]:>13.2f} ×" for row in list(ROWS)[1:])
        gain = published[0] / published[2]
        print(f"{name:<16}{base * 1e3:>8.0f} ms{cells}{chunk / 2**20:>8.2f} MiB{published[0]:>10.0f} ms, {gain:.2f} ×")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()

"""Repeat MoE Parallel Folding's two ablations on a small scale: expert traffic between nodes, folded and unfolded.

    python recipes/papers/folding_bytes.py [--json FILE] [--picture FILE]

Eight ranks stand for two nodes of four. Each mapping trains one step of the same model (two MoE blocks, dropless) on real
process groups, and the bytes of every collective are counted by destination. The first table keeps attention at TP4 and
varies the sizes of the experts' grid (section 4.4, figure 5, which has EP×ETP = 8 at TP4). The second table varies CP
(figure 6). An unfolded mapping is as before the paper: ETP equals TP, and EP runs along data parallelism, over ranks that
are TP·CP apart. The bytes do not depend on the machine.

Another column has the bytes that the dispatcher's formula gives for evenly spread tokens. Per rank and block, there are four
all-to-alls (dispatch and combine, forward and backward) of T·K rows, of which EP peers on other nodes get their share. There
are also four gathers or scatters over ETP, which send T·K rows to every ETP peer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Batch, Transformer
from foldray.moe import MoeBackend
from foldray.recipe import OptimizerSpec
from foldray.runtime import TorchEngine

WORLD, PER_NODE, LENGTH, SEQUENCES = 8, 4, 512, 8
MODEL = ModelSpec(
    layers=2, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn_hidden=64, experts=8, topk=2, expert_hidden=64, vocab=64
)  # fmt: skip
EXPERT_TRAFFIC = ("tokens", "expert_slices")


@dataclass(frozen=True)
class Mapping:
    """A fold of attention and experts over the ranks."""

    table: str
    name: str
    fold: Fold
    folded: bool


def mappings() -> list[Mapping]:
    """Return the rows of both tables. Unfolded mappings have `edp` before `ep`, so EP runs along data parallelism."""
    along_dp = "etp-edp-ep-pp"
    rows = [
        Mapping("attention TP4", "ETP4 EP2", Fold(WORLD, tp=4, etp=4, ep=2, moe_order=along_dp), False),
        Mapping("attention TP4", "ETP8 EP1", Fold(WORLD, tp=4, etp=8), True),
        Mapping("attention TP4", "ETP2 EP4", Fold(WORLD, tp=4, etp=2, ep=4), True),
        Mapping("attention TP4", "ETP1 EP8", Fold(WORLD, tp=4, ep=8), True),
        Mapping("attention TP4", "ETP4 EP1", Fold(WORLD, tp=4, etp=4), False),
        Mapping("attention TP4", "ETP2 EP2", Fold(WORLD, tp=4, etp=2, ep=2), True),
        Mapping("attention TP4", "ETP1 EP4", Fold(WORLD, tp=4, ep=4), True),
    ]
    for cp, ep in ((2, 2), (2, 4), (4, 2)):
        unfolded = Fold(WORLD, cp=cp, ep=ep, moe_order=along_dp)
        rows.append(Mapping("context parallel", f"CP{cp} EP{ep}", unfolded, False))
        rows.append(Mapping("context parallel", f"CP{cp} EP{ep}", Fold(WORLD, cp=cp, ep=ep), True))
    return rows


@dataclass(frozen=True)
class Row:
    """The bytes that all ranks together sent for one mapping."""

    table: str
    name: str
    folded: bool
    inside: int
    across: int
    expected_across: float
    by_class: dict[str, tuple[int, int]]


def measure(rank: int, fold: Fold) -> dict[str, tuple[int, int]]:
    """Return the bytes that this rank sent in one step, inside its node and to other nodes, by class of traffic."""
    groups = Groups.create(fold, rank, node=lambda member: member // PER_NODE)
    model = Transformer(Ownership(MODEL, fold), groups, MoeBackend(experts="loop"))
    engine = TorchEngine(model, groups, OptimizerSpec())
    tokens = torch.randint(0, MODEL.vocab, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens[groups.dp_rank :: fold.dp]
    groups.traffic.clear()
    engine.train([Batch(tokens[:, :-1], tokens[:, 1:])])
    sent = {name: (count.inside_bytes, count.across_bytes) for name, count in groups.traffic.by_name().items()}
    groups.close()
    return sent


def expected_across(fold: Fold) -> float:
    """Return the bytes of expert traffic between nodes by the formula, for tokens that are evenly spread over experts."""
    rows = SEQUENCES * LENGTH * MODEL.topk  # rows of all ranks together
    once = 4 * len(MODEL.moe_layers) * rows * MODEL.hidden * 4  # bytes if every row goes to one other rank each time
    far = {family: _far_peers(fold.groups(family)) for family in ("ep", "etp")}
    return once * (far["ep"] / fold.ep + far["etp"])


def _far_peers(groups: Sequence[Sequence[int]]) -> float:
    """Return the mean number of peers on other nodes for a member of these groups."""
    pairs = sum(a // PER_NODE != b // PER_NODE for group in groups for a in group for b in group)
    return pairs / sum(map(len, groups))


def run(mapping: Mapping, ranks: Sequence[dict[str, tuple[int, int]]]) -> Row:
    names = sorted({name for sent in ranks for name in sent})
    by_class = {
        name: tuple(sum(sides) for sides in zip(*(sent.get(name, (0, 0)) for sent in ranks), strict=True)) for name in names
    }
    inside, across = (sum(by_class.get(name, (0, 0))[side] for name in EXPERT_TRAFFIC) for side in (0, 1))
    return Row(mapping.table, mapping.name, mapping.folded, inside, across, expected_across(mapping.fold), by_class)


def serve(rank: int, store: str, folds: Sequence[Fold], results: Any) -> None:
    """Run all mappings on one rank, one after another."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    results.put((rank, [measure(rank, fold) for fold in folds]))
    dist.destroy_process_group()


def measure_all(rows: Sequence[Mapping]) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results, store = context.Queue(), os.path.join(folder, "store")
        folds = [mapping.fold for mapping in rows]
        processes = [context.Process(target=serve, args=(rank, store, folds, results)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        try:
            by_rank = dict(results.get(timeout=600) for _ in processes)
        finally:
            for process in processes:
                process.join(timeout=10)
                process.kill()
    return [run(mapping, [by_rank[rank][i] for rank in range(WORLD)]) for i, mapping in enumerate(rows)]


def show(rows: Sequence[Row]) -> str:
    """Return the two tables in Markdown."""
    lines = []
    for table in dict.fromkeys(row.table for row in rows):
        lines += ["", f"**{table}**", "", "| experts | groups | inside nodes, MiB | across nodes, MiB | formula, MiB |"]
        lines.append("|---|---|---:|---:|---:|")
        for row in (row for row in rows if row.table == table):
            sizes = " | ".join(f"{size / 2**20:.2f}" for size in (row.inside, row.across, row.expected_across))
            lines.append(f"| {row.name} | {'folded' if row.folded else 'unfolded'} | {sizes} |")
    return "\n".join(lines[1:])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw stacked bars of the bytes inside nodes and between nodes, folded and unfolded."""
    from trainers.pictures.canvas import panels, write

    tables = list(dict.fromkeys(row.table for row in rows))
    figure, beside = panels(11, 4.6, 1, len(tables))
    figure.suptitle("Expert traffic of one step on two nodes of four ranks", x=0.01, ha="left", fontweight="bold")
    for axes, table in zip(beside, tables, strict=True):
        shown = [row for row in rows if row.table == table]
        labels = [f"{row.name}{'*' if row.folded else ''}" for row in shown]
        inside, across = ([getattr(row, side) / 2**20 for row in shown] for side in ("inside", "across"))
        places = range(len(shown))
        axes.bar(places, across, color="#d9630b", label="across nodes")
        axes.bar(places, inside, bottom=across, color="#9db8d2", label="inside a node")
        for place, value in zip(places, across, strict=True):
            axes.annotate(f"{value:.1f}", (place, value), ha="center", va="bottom", fontsize=8, color="#1f2937")
        axes.set_xticks(list(places), labels, fontsize=8, rotation=30, ha="right")
        axes.set_title(f"{table}   (* folded)", fontsize=10, loc="left")
    beside[0].set_ylabel("MiB sent by all ranks")
    beside[0].legend(frameon=False, fontsize=9)
    write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes of expert traffic across nodes, folded and unfolded.")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--picture", type=Path, help="file for the PNG")
    args = parser.parse_args()
    rows = measure_all(mappings())
    print(show(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()

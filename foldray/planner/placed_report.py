"""The planner's results for workers of their own: as a document for programs, and as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from foldray.planner.allocator import Allocation, Demand
from foldray.planner.hardware import Hardware
from foldray.planner.memory import GIB
from foldray.planner.nodes import Planned
from foldray.planner.placing import Placed
from foldray.planner.report import schedule


class Comparison(NamedTuple):
    """Placements beside the best plan whose workers have both attention and experts.

    Args:
        placed: the placements, the best first.
        shared: the best such plan.
        demand: FLOPs and bytes of a layer.
        allocation: GPUs and adapters by the roofline alone.
        more_adapters: seconds of the best placement with the allocation's adapters.
    """

    placed: Sequence[Placed]
    shared: Planned
    demand: Demand
    allocation: Allocation
    more_adapters: float

    @property
    def speed(self) -> float:
        """Speed of the best placement relative to that of the best plan with shared workers."""
        return self.shared.prediction.seconds / self.placed[0].seconds


def placement(placed: Placed) -> dict[str, Any]:
    """Return the keys of a recipe for a placement."""
    fold, ordering = placed.candidate.fold, placed.candidate.ordering
    return {
        "fold": {"tp": fold.tp, "pp": fold.pp, "ep": fold.ep},
        "placement": {"attention": fold.attention_ranks, "experts": fold.moe_ranks, "expert_pp": fold.moe_pp},
        "schedule": {
            "virtual_stages": placed.candidate.virtual_stages,
            "recompute": list(ordering.recompute),
            "alive": ordering.alive,
            "kind": ordering.forward.kind,
            "weight_gradients": "apart" if ordering.weights_apart else "together",
            "ahead": ordering.ahead if ordering.forward.row.found else None,
        },
        "training": {"micro_batch": placed.candidate.micro_batch, "global_batch": placed.candidate.job.global_batch},
    }


def placements_document(found: Comparison) -> dict[str, Any]:
    """Return the document that `foldray plan --disaggregate --json` prints. Times are in seconds, memory is in GiB."""
    allocation = found.allocation
    return {
        "placements": [
            {
                **placement(each),
                "step_time_s": each.seconds,
                "mfu_causal": each.mfu,
                "memory_gib": {name: held.total / GIB for name, held in zip(("attention", "experts"), each.memory, strict=True)},
                "fits": each.fits,
            }
            for each in found.placed
        ],
        "shared": {"fold": str(found.shared.candidate.fold), "step_time_s": found.shared.prediction.seconds},
        "speed": found.speed,
        "roofline": {
            "attention": {"gpus": [allocation.attention], "nics": allocation.attention_nics, "seconds": allocation.sides[0]},
            "experts": {"gpus": [allocation.experts], "nics": allocation.expert_nics, "seconds": allocation.sides[1]},
        },
        "step_time_with_these_nics_s": found.more_adapters,
    }


def placements_table(found: Comparison, hardware: Hardware) -> str:
    """Return a text with one line per placement, the best plan with shared workers, and which of both is faster."""
    width, most = max(len(str(each.candidate.fold)) for each in found.placed) + 2, max(map(len, map(order, found.placed))) + 2
    lines = [f"attention and experts on workers of their own, on {hardware.name}", ""]
    lines.append(f"{'':>4}{'A:F':<9}{'fold':<{width}}{'schedule':<{most}}{'step':>9}{'MFU':>8}{'memory of A, F':>18}")
    for number, each in enumerate(found.placed, 1):
        fold, held = each.candidate.fold, [side.total / GIB for side in each.memory]
        line = f"{number:>3} {f'{fold.attention_ranks}:{fold.moe_ranks}':<9}{fold!s:<{width}}"
        line += f"{order(each):<{most}}{each.seconds:>7.2f} s{each.mfu:>8.1%}"
        line += f"{held[0]:>8.0f}, {held[1]:.0f} GiB"
        lines.append(line if each.fits else f"{line}, more than the {hardware.memory_gib:.0f} GiB there are")
    shared, allocation = found.shared, found.allocation
    a, f = allocation.attention, allocation.experts
    lines += [
        "",
        f"with shared workers: {shared.candidate.fold}, {schedule(shared)}, {found.shared.prediction.seconds:.2f} s",
        f"by FLOPs and bytes alone: {a}:{f} GPUs and {allocation.attention_nics}:{allocation.expert_nics} network adapters",
        f"the first placement with so many adapters per GPU: {found.more_adapters:.2f} s",
        "",
        _advice(found),
    ]
    return "\n".join(lines)


def order(placed: Placed) -> str:
    """Return a placement's schedule in short: its kind, micro-batch, stages, micro-batches alive, and what runs again."""
    candidate, ordering = placed.candidate, placed.candidate.ordering
    found, again = ordering.forward.row.found, ordering.recompute
    text = f"list ahead={ordering.ahead:g}" if found else ordering.forward.kind + ("-apart" if ordering.weights_apart else "")
    text += f" b={candidate.micro_batch}" + (f" v={candidate.virtual_stages}" if candidate.virtual_stages > 1 else "")
    text += f" alive={ordering.alive}" if ordering.alive else ""
    return text + (f" again {'+'.join(again)}" if again else "")


def _advice(found: Comparison) -> str:
    if found.speed < 1:
        return f"Shared workers are {1 / found.speed:.2f} × as fast: leave out the section placement."
    fold = found.placed[0].candidate.fold
    keys = f"placement: {{attention: {fold.attention_ranks}, experts: {fold.moe_ranks}, expert_pp: {fold.moe_pp}}}"
    return f"Workers of their own are {found.speed:.2f} × as fast: {keys}"

"""Placements of experts on workers of their own, as a document for programs and as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foldray.clock import Busy, busy_table
from foldray.costs.memory import GIB
from foldray.plan import on_host
from foldray.plan.allocator import Allocation, Demand
from foldray.plan.placing import Placed
from foldray.plan.report import schedule
from foldray.plan.search import Planned
from foldray.plan.space import Space


class Comparison(NamedTuple):
    """Placements beside the best plan whose workers have both attention and experts.

    Args:
        placed: the placements, the best first.
        shared: the best such plan.
        allocation: GPUs and adapters by the roofline alone.
        more_adapters: seconds of the best placement with the allocation's adapters; None if each side has those of its own kind
            of GPU.
        even: the best placement with as many GPUs on both sides, if there is one.
        busy: what the best placement ("own") and the best plan with shared workers ("shared") are busy with.
    """

    placed: Sequence[Placed]
    shared: Planned
    demand: Demand
    allocation: Allocation
    more_adapters: float | None
    even: Placed | None
    busy: Mapping[str, Busy]

    @property
    def over_even(self) -> float | None:
        """Speed of the best placement relative to that of the best even split."""
        return self.even and self.even.seconds / self.placed[0].seconds

    @property
    def intensities(self) -> tuple[float, float]:
        """FLOPs of attention's side and of the experts' side for each byte that travels between them (DisagMoE, figure 6)."""
        return self.demand.attention / self.demand.bytes, self.demand.experts / self.demand.bytes

    @property
    def speed(self) -> float:
        """Speed of the best placement relative to that of the best plan with shared workers."""
        return self.shared.prediction.seconds / self.placed[0].seconds


def placement(placed: Placed) -> dict[str, Any]:
    """Return the keys of a recipe for a placement."""
    fold, ordering = placed.candidate.fold, placed.candidate.ordering
    return {
        "fold": {axis: getattr(fold, axis) for axis in ("tp", "cp", "pp", "ep", "ep_inside")},
        "placement": {"attention": fold.attention_ranks, "experts": fold.moe_ranks, "expert_pp": fold.moe_pp},
        "schedule": {
            "virtual_stages": placed.candidate.virtual_stages,
            "recompute": list(ordering.recompute),
            "alive": ordering.alive,
            "kind": ordering.forward.kind,
            "weight_gradients": ordering.weight_gradients,
            "ahead": ordering.ahead if ordering.forward.row.found else None,
        },
        "training": {"micro_batch": placed.candidate.micro_batch, "global_batch": placed.candidate.job.global_batch},
    }


def placements_document(comparison: Comparison) -> dict[str, Any]:
    """Return the document that `foldray plan --disaggregate --json` prints. Times are in seconds, memory is in GiB."""
    allocation, sides = comparison.allocation, ("attention", "experts")
    return {
        "placements": [
            {
                **placement(placed),
                "step_time_s": placed.seconds,
                "mfu_causal": placed.mfu,
                "memory_gib": {side: memory.total / GIB for side, memory in zip(sides, placed.memory, strict=True)},
                "fits": placed.fits,
            }
            for placed in comparison.placed
        ],
        "shared": {"fold": str(comparison.shared.candidate.fold), "step_time_s": comparison.shared.prediction.seconds},
        "speed": comparison.speed,
        "roofline": {
            "attention": {
                "gpus": [allocation.attention],
                "nics": allocation.attention_nics,
                "seconds": allocation.sides[0],
                "flops_per_byte": comparison.intensities[0],
            },
            "experts": {
                "gpus": [allocation.experts],
                "nics": allocation.expert_nics,
                "seconds": allocation.sides[1],
                "flops_per_byte": comparison.intensities[1],
            },
        },
        "step_time_with_these_nics_s": comparison.more_adapters,
        "even_split": comparison.even and {**placement(comparison.even), "step_time_s": comparison.even.seconds},
        "speed_over_even_split": comparison.over_even,
        "shares": {name: _shares(used) for name, used in comparison.busy.items()},
    }


def _shares(used: Busy) -> dict[str, dict[str, float]]:
    """Return shares of a step by cause, as a mean over its positions and along its critical path."""
    entries = {"positions": used.ranks, "critical_path": used.path}
    return {name: {cause: part / sum(seconds.values()) for cause, part in seconds.items()} for name, seconds in entries.items()}


def placements_table(comparison: Comparison, space: Space) -> str:
    """Return a text with one line per placement, the best plan with shared workers, and which of both is faster."""
    kinds = [space.hardware, space.experts or space.hardware]
    on = kinds[0].name if not space.experts else f"{kinds[0].name} for attention, and on {kinds[1].name} for the experts"
    width = max(len(str(placed.candidate.fold)) for placed in comparison.placed) + 2
    most = max(map(len, map(order, comparison.placed))) + 2
    lines = [f"attention and experts on workers of their own, on {on}", ""]
    lines.append(f"{'':>4}{'A:F':<9}{'fold':<{width}}{'schedule':<{most}}{'step':>9}{'MFU':>8}{'memory of A, F':>18}")
    for number, placed in enumerate(comparison.placed, 1):
        fold, held = placed.candidate.fold, [side.total / GIB for side in placed.memory]
        line = f"{number:>3} {f'{fold.attention_ranks}:{fold.moe_ranks}':<9}{fold!s:<{width}}"
        line += f"{order(placed):<{most}}{placed.seconds:>7.2f} s{placed.mfu:>8.1%}"
        line += f"{held[0]:>8.0f}, {held[1]:.0f} GiB"
        room = " and ".join(dict.fromkeys(f"{kind.memory_gib:.0f}" for kind in kinds))
        lines.append(line if placed.fits else f"{line}, more than the {room} GiB there are")
    shared, allocation = comparison.shared, comparison.allocation
    a, f = allocation.attention, allocation.experts
    lines += [
        "",
        f"with shared workers: {shared.candidate.fold}, {schedule(shared)}, {comparison.shared.prediction.seconds:.2f} s"
        + (", at the pace of the slower kind" if space.experts else ""),
        f"by FLOPs and bytes alone: {a}:{f} GPUs and {allocation.attention_nics}:{allocation.expert_nics} network adapters",
        "FLOPs for each byte between both sides: attention {:.0f}, experts {:.0f}".format(*comparison.intensities),
    ]
    if comparison.more_adapters is not None:
        lines.append(f"the first placement with so many adapters per GPU: {comparison.more_adapters:.2f} s")
    if even := comparison.even:
        split = f"{even.candidate.fold.attention_ranks}:{even.candidate.fold.moe_ranks}"
        lines.append(
            f"the best even split, {split}: {even.seconds:.2f} s; the first placement is {comparison.over_even:.2f} × as fast"
        )
    if space.job.offload:
        lines += [on_host.left_out(kind) for kind in {kind.name: kind for kind in kinds}.values() if kind.host is None]
    lines += ["", "shares of a step without the optimizer, mean of all workers; what travels counts where nothing computes"]
    lines += [busy_table({name: used.ranks for name, used in comparison.busy.items()}), "", _advice(comparison)]
    return "\n".join(lines)


def order(placed: Placed) -> str:
    """Return a placement's schedule in short: its kind, micro-batch, stages, micro-batches alive, and what runs again."""
    candidate, ordering = placed.candidate, placed.candidate.ordering
    is_list, again = ordering.forward.row.found, ordering.recompute
    text = (
        f"list ahead={ordering.ahead:g}"
        if is_list
        else ordering.forward.kind + ("-apart" if ordering.weight_gradients == "apart" else "")
    )
    text += f" b={candidate.micro_batch}" + (f" v={candidate.virtual_stages}" if candidate.virtual_stages > 1 else "")
    text += f" alive={ordering.alive}" if ordering.alive else ""
    return text + (f" again {'+'.join(again)}" if again else "")


def _advice(comparison: Comparison) -> str:
    if comparison.speed < 1:
        return f"Shared workers are {1 / comparison.speed:.2f} × as fast: leave out the section placement."
    fold = comparison.placed[0].candidate.fold
    keys = f"placement: {{attention: {fold.attention_ranks}, experts: {fold.moe_ranks}, expert_pp: {fold.moe_pp}}}"
    return f"Workers of their own are {comparison.speed:.2f} × as fast: {keys}"

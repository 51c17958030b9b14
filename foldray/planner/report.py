"""The planner's results, as a document for programs and as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from foldray.amounts import in_bytes
from foldray.planner.allocator import Allocation, Demand
from foldray.planner.hardware import Hardware, constants
from foldray.planner.listed import Listed
from foldray.planner.memory import GIB
from foldray.planner.placing import Placed
from foldray.planner.score import Scored, mape
from foldray.planner.search import Found, Planned
from foldray.planner.shares import COMPUTING


def document(planned: Sequence[Planned], lists: Sequence[Listed] = ()) -> dict[str, Any]:
    """Return the document that `foldray plan --json` prints. Times are in seconds, memory is in GiB."""
    candidates = [_candidate(each) for each in planned]
    for candidate, other in zip(candidates, lists, strict=False):
        ordering = other.candidate.ordering
        candidate["with_list"] = {
            "degree": ordering.degree, "ahead": ordering.ahead, "step_time_s": other.seconds, "over_bound": other.over_bound,
            "memory_gib": other.memory_gib, "fits": other.fits, "recompute": list(ordering.recompute),
        }  # fmt: skip
    return {"candidates": candidates}


def _candidate(planned: Planned) -> dict[str, Any]:
    candidate, prediction = planned.candidate, planned.prediction
    fold, ordering = candidate.fold, candidate.ordering
    return {
        "fold": {axis: getattr(fold, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "ep_inside", "etp", "edp")},
        "schedule": {
            "kind": ordering.forward.kind,
            "degree": ordering.degree,
            "slicing": "time_uniform" if ordering.slicing else None,
            "lag": ordering.forward.lag if ordering.forward.row.has_lag else None,
            "backward_lag": ordering.backward.lag if ordering.backward.row.has_lag else None,
            "batch_degree": ordering.batch_degree,
            "reduction": ordering.reduction.kind,
            "sp_bytes": ordering.reduction.most,
            "micro_batch": candidate.micro_batch,
            "virtual_stages": candidate.virtual_stages,
            "stage_layers": candidate.stage_layers and list(candidate.stage_layers),
            "recompute": list(ordering.recompute),
        },
        "step_time_s": prediction.seconds,
        "mfu_causal": prediction.mfu_causal,
        "mfu_full": prediction.mfu_full,
        "memory_gib": planned.memory.total / GIB,
        "memory": {name: held / GIB for name, held in planned.memory._asdict().items()},
        "fits": planned.fits,
        "breakdown": breakdown(prediction.breakdown),
        "traffic": prediction.traffic,
    }


def breakdown(shares: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by name, with the sum of all computation first, as `compute`."""
    computing = sum(shares.get(name, 0.0) for name in COMPUTING)
    return {"compute": computing} | {name: seconds for name, seconds in shares.items() if name not in COMPUTING}


def table(found: Found, hardware: Hardware, imbalance: float = 1.0, lists: Sequence[Listed] = ()) -> str:
    """Return a text with one line per candidate, the breakdown of the first one, and its gain over another fold.

    `lists` are the first candidates with found lists.
    """
    planned = found.best
    fold, most = max(len(str(each.candidate.fold)) for each in planned) + 2, max(len(schedule(each)) for each in planned) + 2
    uneven = f"; memory for experts with {imbalance:g} times the mean number of rows" if imbalance > 1 else ""
    lines = [f"{found.legal} legal folds on {hardware.name}{uneven}", ""]
    lines.append(f"{'':>4}{'fold':<{fold}}{'schedule':<{most}}{'step':>9}{'MFU':>8}{'memory':>10}")
    for number, each in enumerate(planned, 1):
        prediction, held = each.prediction, each.memory.total / GIB
        line = f"{number:>3} {each.candidate.fold!s:<{fold}}{schedule(each):<{most}}{prediction.seconds:>7.2f} s"
        line += f"{prediction.mfu_causal:>8.1%}{held:>6.0f} GiB"
        lines.append(line if each.fits else f"{line}, more than the {hardware.memory_gib:.0f} GiB there are")
    lines += _with_lists(planned, lists)
    return "\n".join([*lines, "", *_of_first(planned[0]), *(["", why(planned)] if len(planned) > 1 else [])])


def _with_lists(planned: Sequence[Planned], lists: Sequence[Listed]) -> list[str]:
    if not lists:
        return []
    lines = ["", "the same with found lists (schedule.kind: list), by list scheduling without local moves:"]
    for number, (each, other) in enumerate(zip(planned, lists, strict=False), 1):
        ordering = other.candidate.ordering
        line = (
            f"{number:>3} d={ordering.degree} ahead={ordering.ahead:g} b={other.candidate.micro_batch}{other.seconds:>9.2f} s, "
        )
        line += f"{each.prediction.seconds / other.seconds:.2f} × as fast, {other.over_bound:.2f} × the least possible time, "
        more = set(ordering.recompute) - set(each.candidate.ordering.recompute)
        line += f"{other.memory_gib:.0f} GiB" + (f", again {'+'.join(ordering.recompute)}" if more else "")
        lines.append(line + ("" if other.fits else ", more than there are"))
    return lines


def schedule(planned: Planned) -> str:
    """Return a candidate's schedule in a few words."""
    candidate, ordering = planned.candidate, planned.candidate.ordering
    text = ordering.forward.kind + (f" d={ordering.slicing.degree}" if ordering.slicing else "")
    text += f" R={ordering.batch_degree}" if ordering.batch_degree > 1 else ""
    text += f" b={candidate.micro_batch}" + (f" v={candidate.virtual_stages}" if candidate.virtual_stages > 1 else "")
    text += f" stages {_runs(candidate.stage_layers)}" if candidate.stage_layers else ""
    text += f" {ordering.reduction.kind}" + (f"={in_bytes(size)}" if (size := ordering.reduction.most) else "")
    return text + (f" again {'+'.join(ordering.recompute)}" if ordering.recompute else "")


def _runs(sizes: Sequence[int]) -> str:
    """Return numbers of blocks in short: 2,30×3,2 for [2, 3, …, 3, 2]."""
    runs = ((size, len(list(run))) for size, run in groupby(sizes))
    return ",".join(f"{count}×{size}" if count > 1 else str(size) for size, count in runs)


def _of_first(planned: Planned) -> list[str]:
    shares, whole = breakdown(planned.prediction.breakdown), planned.prediction.seconds
    rows = sorted(((name, seconds) for name, seconds in shares.items() if seconds > 5e-4 * whole), key=lambda row: -row[1])
    bars = (f"  {name:<18}{seconds * 1e3:>9.0f} ms  {'█' * round(40 * seconds / whole)}" for name, seconds in rows)
    return ["the first one's step:", *bars]


def why(planned: Sequence[Planned]) -> str:
    """Return one sentence about the gain of the first candidate over the best one with another fold.

    If no other candidate has another fold, the sentence compares the first with the second. There must be two candidates.
    """
    first = planned[0]
    other = next((each for each in planned[1:] if each.candidate.fold != first.candidate.fold), planned[1])
    mine, theirs = (breakdown(each.prediction.breakdown) for each in (first, other))
    gains = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in mine | theirs}
    most = max(gains, key=gains.__getitem__)
    apart = other.prediction.seconds - first.prediction.seconds
    return (
        f"{first.candidate.fold} is {apart * 1e3:.0f} ms a step ahead of {other.candidate.fold}: "
        f"it saves {gains[most] * 1e3:.0f} ms of {most.replace('_', ' ')}"
    )


def scores(scored: Sequence[Scored]) -> dict[str, Any]:
    """Return the document that `foldray plan --score --json` prints. MFU and errors are fractions."""
    rows = [
        {
            "row_id": each.row.name,
            "mfu_causal": each.prediction.mfu_causal,
            "mfu_full": each.prediction.mfu_full,
            "step_time_s": each.prediction.seconds,
            "memory_gib": each.memory.total / GIB,
            "fits": each.fits,
        }
        for each in scored
    ]
    measured = [each for each in scored if each.error is not None]
    return {"rows": rows, "mape": mape(measured) if measured else {}}


def score_table(scored: Sequence[Scored]) -> str:
    """Return a text with every row, the mean absolute errors, and the row with the largest error."""
    lines = [f"{'row':<10}{'model':<24}{'method':<19}{'GPUs':>5}{'measured':>10}{'predicted':>10}{'error':>8}{'memory':>10}"]
    for each in scored:
        job, fold = each.row.candidate.job, each.row.candidate.fold
        error = f"{each.error:>+8.1%}" if each.error is not None else " " * 8
        known = f"{each.row.mfu:>10.1%}" if each.row.mfu is not None else " " * 10
        lines.append(
            f"{each.row.name:<10}{job.model.preset or '':<24}{each.row.method:<19}{fold.world_size:>5}{known}"
            f"{each.prediction.mfu_causal:>10.1%}{error}{each.memory.total / GIB:>6.0f} GiB{'' if each.fits else ' does not fit'}"
        )
    measured = [each for each in scored if each.error is not None]
    if measured:
        worst = max(measured, key=lambda each: abs(each.error or 0.0))
        lines += ["", "mean absolute error of MFU:", *(f"  {name:<20}{value:>6.1%}" for name, value in mape(measured).items())]
        lines.append(f"worst: {worst.row.name}, {worst.error:+.1%}")
    return "\n".join(lines)


def constants_table(found: Mapping[str, float]) -> str:
    """Return a text with all constants, their bounds and units. Some may have fitted values, by name."""
    rows = [(name, found.get(name, each.value), each) for name, each in constants().items()]
    return "\n".join(
        f"{name:<12}{value:>10.4g}  {each.low:g}…{each.high:g} {each.unit}{'' if each.fitted else ', not fitted'}"
        for name, value, each in rows
    )


class Comparison(NamedTuple):
    """Placements beside the best plan whose workers have both attention and experts.

    Args:
        placed: the placements, the best first.
        shared: the best such plan.
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

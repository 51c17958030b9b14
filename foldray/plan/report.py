"""The planner's results, as a document for programs and as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from foldray.amounts import in_bytes
from foldray.costs.hardware import Hardware, constants
from foldray.costs.memory import GIB
from foldray.costs.shares import COMPUTING
from foldray.plan import copies, on_host
from foldray.plan.copies import WithCopies
from foldray.plan.listed import Listed
from foldray.plan.score import Pair, Scored, mape, median_errors, pairs
from foldray.plan.search import Found, Planned


def document(
    planned: Sequence[Planned], lists: Sequence[Listed] = (), copied: Mapping[int, WithCopies] | None = None
) -> dict[str, Any]:
    """Return the document that `foldray plan --json` prints. Times are in seconds, memory is in GiB."""
    candidates = [_candidate(plan) for plan in planned]
    for number, each in (copied or {}).items():
        candidates[number]["with_copies"] = copies.document(each)
    for candidate, listed in zip(candidates, lists, strict=False):
        ordering = listed.candidate.ordering
        candidate["with_list"] = {
            "degree": ordering.degree, "ahead": ordering.ahead, "step_time_s": listed.seconds, "over_bound": listed.over_bound,
            "memory_gib": listed.memory_gib, "fits": listed.fits, "recompute": list(ordering.recompute),
            "weight_gradients": ordering.weight_gradients,
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
            "attention_degree": ordering.fewer_slices,
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
            "offload": list(ordering.offload),
        },
        "step_time_s": prediction.seconds,
        "mfu_causal": prediction.mfu_causal,
        "mfu_full": prediction.mfu_full,
        "memory_gib": planned.memory.total / GIB,
        "memory": {name: held / GIB for name, held in planned.memory._asdict().items()},
        "fits": planned.fits,
        **({"host": on_host.document(planned.host)} if planned.host else {}),
        **({"activations_on_host": on_host.activations(planned.moved)} if planned.moved else {}),
        "breakdown": breakdown(prediction.breakdown),
        "traffic": prediction.traffic,
    }


def breakdown(shares: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by name, with the sum of all computation first, as `compute`."""
    computing = sum(shares.get(name, 0.0) for name in COMPUTING)
    return {"compute": computing} | {name: seconds for name, seconds in shares.items() if name not in COMPUTING}


def table(
    result: Found,
    hardware: Hardware,
    imbalance: float = 1.0,
    lists: Sequence[Listed] = (),
    copied: Mapping[int, WithCopies] | None = None,
) -> str:
    """Return a text with one line per candidate, the breakdown of the first one, and its gain over another fold.

    Args:
        lists: the first candidates with found lists.
        copied: candidates with copies of hot experts, by their numbers from 0.
    """
    planned = result.best
    fold, most = max(len(str(plan.candidate.fold)) for plan in planned) + 2, max(len(schedule(plan)) for plan in planned) + 2
    uneven = f"; memory for experts with {imbalance:g} times the mean number of rows" if imbalance > 1 else ""
    lines = [f"{result.legal} legal folds on {hardware.name}{uneven}", ""]
    lines.append(f"{'':>4}{'fold':<{fold}}{'schedule':<{most}}{'step':>9}{'MFU':>8}{'memory':>10}")
    for number, plan in enumerate(planned, 1):
        prediction, held = plan.prediction, plan.memory.total / GIB
        line = f"{number:>3} {plan.candidate.fold!s:<{fold}}{schedule(plan):<{most}}{prediction.seconds:>7.2f} s"
        line += f"{prediction.mfu_causal:>8.1%}{held:>6.0f} GiB"
        lines.append(line if plan.fits else f"{line}, more than the {hardware.memory_gib:.0f} GiB there are")
    lines += _with_lists(planned, lists)
    lines += copies.lines(planned, copied or {})
    lines += on_host.lines(planned[0].host, planned[0].moved, hardware)
    return "\n".join([*lines, "", *_of_first(planned[0]), *(["", why(planned)] if len(planned) > 1 else [])])


def _with_lists(planned: Sequence[Planned], lists: Sequence[Listed]) -> list[str]:
    if not lists:
        return []
    lines = ["", "the same with found lists (schedule.kind: list), by list scheduling without local moves:"]
    for number, (plan, listed) in enumerate(zip(planned, lists, strict=False), 1):
        ordering = listed.candidate.ordering
        line = f"{number:>3} d={ordering.degree} ahead={ordering.ahead:g} b={listed.candidate.micro_batch}"
        line += " whole weights" if ordering.weight_gradients == "whole" else ""
        line += f"{listed.seconds:>9.2f} s, "
        line += f"{plan.prediction.seconds / listed.seconds:.2f} × as fast, {listed.over_bound:.2f} × the least possible time, "
        more = set(ordering.recompute) - set(plan.candidate.ordering.recompute)
        line += f"{listed.memory_gib:.0f} GiB" + (f", again {'+'.join(ordering.recompute)}" if more else "")
        lines.append(line + ("" if listed.fits else ", more than there are"))
    return lines


def schedule(planned: Planned) -> str:
    """Return a candidate's schedule in a few words."""
    candidate, ordering = planned.candidate, planned.candidate.ordering
    text = ordering.forward.kind + (f" d={ordering.slicing.degree}" if ordering.slicing else "")
    text += f"/{slices}" if (slices := ordering.fewer_slices) else ""
    text += f" R={ordering.batch_degree}" if ordering.batch_degree > 1 else ""
    text += f" b={candidate.micro_batch}" + (f" v={candidate.virtual_stages}" if candidate.virtual_stages > 1 else "")
    text += f" stages {_runs(candidate.stage_layers)}" if candidate.stage_layers else ""
    text += f" {ordering.reduction.kind}" + (f"={in_bytes(size)}" if (size := ordering.reduction.most) else "")
    text += f" again {'+'.join(ordering.recompute)}" if ordering.recompute else ""
    return text + (f" to host {'+'.join(ordering.offload)}" if ordering.offload else "")


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
    second = next((plan for plan in planned[1:] if plan.candidate.fold != first.candidate.fold), planned[1])
    mine, theirs = (breakdown(plan.prediction.breakdown) for plan in (first, second))
    gains = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in mine | theirs}
    most = max(gains, key=gains.__getitem__)
    gap = second.prediction.seconds - first.prediction.seconds
    return (
        f"{first.candidate.fold} is {gap * 1e3:.0f} ms a step ahead of {second.candidate.fold}: "
        f"it saves {gains[most] * 1e3:.0f} ms of {most.replace('_', ' ')}"
    )


def scores(scored: Sequence[Scored]) -> dict[str, Any]:
    """Return the document that `foldray plan --score --json` prints. MFU, ratios and errors are fractions."""
    rows = [
        {
            "row_id": result.row.name,
            "mfu_causal": result.prediction.mfu_causal,
            "mfu_full": result.prediction.mfu_full,
            "step_time_s": result.prediction.seconds,
            "memory_gib": result.memory.total / GIB,
            "fits": result.fits,
            "error": result.error,
            "memory_error": result.memory_error,
            "assumed": list(result.row.assumed),
            "unpriced": list(result.row.unpriced),
        }
        for result in scored
    ]
    measured, found = [result for result in scored if result.error is not None], pairs(scored)
    ratios = [
        {"rows": [pair.first.row.name, pair.second.row.name], "thing": pair.thing, "published": pair.published,
         "predicted": pair.predicted, "priced": pair.priced}
        for pair in found
    ]  # fmt: skip
    return {"rows": rows, "mape": mape(measured) if measured else {}, "pairs": ratios, "median_pairs": median_errors(found)}


def score_table(scored: Sequence[Scored]) -> str:
    """Return a text with every row, the mean absolute errors, the row with the largest error, and the pairs of rows."""
    wide = max(len(result.row.name) for result in scored) + 2 if scored else 0
    method = max(len(result.row.method) for result in scored) + 2 if scored else 0
    held = any(result.memory_error is not None for result in scored)
    lines = [
        f"{'row':<{wide}}{'model':<24}{'method':<{method}}{'GPUs':>5}{'measured':>10}{'predicted':>10}{'error':>8}{'memory':>10}"
    ]
    lines[0] += f"{'published':>14}{'error':>8}" if held else ""
    for result in scored:
        row, job, fold = result.row, result.row.candidate.job, result.row.candidate.fold
        error = f"{result.error:>+8.1%}" if result.error is not None else " " * 8
        known = f"{row.mfu:>10.1%}" if row.mfu is not None else " " * 10
        published = f"{row.memory / GIB:>10.1f} GiB{result.memory_error:>+8.1%}" if row.memory else ""
        more = [
            *(["does not fit"] if not result.fits else []),
            *(f"{key}?" for key in row.assumed),
            *(f"{key}!" for key in row.unpriced),
        ]
        line = f"{row.name:<{wide}}{job.model.preset or '':<24}{row.method:<{method}}{fold.world_size:>5}{known}"
        line += f"{result.prediction.mfu_causal:>10.1%}{error}{result.memory.total / GIB:>6.0f} GiB{published:<{22 * held}}"
        lines.append(f"{line} {' '.join(more)}".rstrip())
    measured = [result for result in scored if result.error is not None]
    if any(result.row.assumed or result.row.unpriced for result in scored):
        lines += [
            "",
            "?: the row does not say it, so the plainest is assumed; !: the row has it, and the planner has no price for it",
        ]
    if held:
        lines.append("errors of memory are those of what the allocator holds: the prediction without the workspace")
    if measured:
        worst = max(measured, key=lambda result: abs(result.error or 0.0))
        lines += [
            "",
            "mean absolute error of MFU:",
            *(f"  {name:<{method}} {value:>6.1%}" for name, value in mape(measured).items()),
        ]
        lines.append(f"worst: {worst.row.name}, {worst.error:+.1%}")
    return "\n".join([*lines, *_pair_lines(pairs(scored), wide)])


def _pair_lines(found: Sequence[Pair], wide: int) -> list[str]:
    """Return lines about pairs of rows that differ in one thing: the ratios of their speeds, and the median of their errors."""
    if not found:
        return []
    lines = ["", "pairs of rows that differ in one thing, and the speed of the second over that of the first:"]
    lines.append(f"  {'first':<{wide}}{'second':<{wide}}{'compared':<16}{'published':>9}{'predicted':>11}{'error':>8}")
    for pair in found:
        names = f"  {pair.first.row.name:<{wide}}{pair.second.row.name:<{wide}}{pair.thing:<16}"
        priced = f"{pair.predicted:>11.3f}{pair.error:>+8.1%}" if pair.priced else f"{'no price':>11}"
        lines.append(f"{names}{pair.published:>9.3f}{priced}")
    lines += ["", "median absolute error of pairs:"]
    return [*lines, *(f"  {name:<16}{value:>6.1%}" for name, value in median_errors(found).items())]


def constants_table(fitted: Mapping[str, float]) -> str:
    """Return a text with all constants, their bounds and units. Some may have fitted values, by name."""
    rows = [(name, fitted.get(name, constant.value), constant) for name, constant in constants().items()]
    return "\n".join(
        f"{name:<12}{value:>10.4g}  {constant.low:g}…{constant.high:g} {constant.unit}{'' if constant.fitted else ', not fitted'}"
        for name, value, constant in rows
    )

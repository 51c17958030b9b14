"""Published measurements, read from CSV files, as candidates of the planner.

A file has the columns of one of two formats.

`PAPER` is that of MoE Parallel Folding's tables: a method, a fold, and MFU. Such a row leaves some settings open. They are
assumed as the paper's experiments state or suggest: blocks run one after another, interleaved 1F1B with one block per virtual
stage, bf16, capacity factor 1 and balanced experts, no recomputation, micro-batches of one sequence, gradients reduced in
buckets during backward.

`STACK` is that of rows of training software, with its GPU, settings and source. What such a row leaves empty is assumed and
named (`Row.assumed`), and what the planner has no price for is named as well (`Row.unpriced`). The words are Megatron-LM's.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from foldray.blueprint import ModelSpec, even_sizes
from foldray.costs.candidate import PARTS, Candidate, Job, Software
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware, load_hardware
from foldray.costs.memory import GIB
from foldray.errors import UserError
from foldray.files import read_text
from foldray.fold import Fold, divisors
from foldray.graph import PipelineGraph, Reduction
from foldray.kinds import FFN, SHARED
from foldray.orders import Ordering, Overlap
from foldray.plan.space import in_two_levels

METHODS: dict[str, dict[str, int]] = {
    "FSDP": {"zero": 3, "ep": 1},
    "FSDP + EP": {"zero": 3},
    "TP + EP + DP": {"zero": 1},
    "MCore": {"zero": 1},
    "MCore w/ Folding": {"zero": 1},
}
"""Method → the values that its name implies: the stage of ZeRO, and ep if it does not come from the row."""

PAPER = ("row_id", "model", "method", "gpus", "seq_len", "gbs", "cp", "tp", "ep", "pp", "etp_effective", "mfu_pct")
STACK = (
    "id", "model", "gpus", "gpu", "seq", "gbs", "mbs", "tp", "pp", "cp", "vp", "ep", "etp", "precision", "step_s", "tokens_s_gpu",
    "tflops_gpu", "mem_gib", "recompute", "dispatcher", "overlap", "graphs", "balanced", "source",
)  # fmt: skip
"""Columns of a file. A file of the second format may also have `skew`, `schedule` and `note`."""

_T = TypeVar("_T")
_MOST = {"seq": 2**24, "seq_len": 2**24, "gbs": 2**20}  # larger sizes would exhaust the machine

_SEQ, _ROUNDS = 4096, 8
"""What a row of software is assumed to have where it says nothing: tokens of a sequence, micro-batches per position."""

THINGS: Mapping[str, tuple[str, ...]] = {
    "TP": ("tp",), "CP": ("cp",), "VP": ("vp",), "EP/PP": ("ep", "etp", "pp", "vp"), "GPUs": ("gpus",), "GPU": ("gpu",),
    "sequence": ("seq",), "batch": ("gbs",), "micro-batch": ("mbs",), "precision": ("precision",), "dispatcher": ("dispatcher",),
    "recomputation": ("recompute",), "overlap": ("overlap",), "graphs": ("graphs",), "routing": ("balanced", "skew"),
    "schedule": ("schedule",),
}  # fmt: skip
"""What two rows may differ in, and the settings that belong to it."""

_AGAIN: Mapping[str, tuple[str, ...]] = {"mlp": (FFN,), "shared_experts": (SHARED,)}
"""Module that Megatron-LM recomputes → the kinds of ops that run again. `moe_act` is what foldray's experts never keep."""
_MEGATRON = Software(apart=False, fused_loss=True)
_SOFTWARE: Mapping[str, Software] = {
    "NVIDIA-NeMo/Megatron-Bridge": _MEGATRON._replace(gradients=2),
    "NVIDIA-NeMo/Megatron-Bridge moonlight-16b-a3b": _MEGATRON._replace(gradients=2, moments=2),
}
"""Repository, or repository and model → what the software holds, by its recipes (`grad_reduce_in_fp32`, `exp_avg_dtype`). Others
are Megatron-LM's, with float32 gradients that its distributed optimizer reduces in place. All fuse the loss
(`cross_entropy_loss_fusion`)."""
_RECOMPUTED = (*_AGAIN, *PARTS, "moe_act", "none")
_DISPATCHERS: Mapping[str, tuple[Literal["assignment", "rank"], int, int]] = {
    "": ("assignment", 0, 0), "alltoall": ("assignment", 0, 0), "deepep": ("rank", 20, 6), "hybridep": ("rank", 32, 2),
}  # fmt: skip
"""Dispatcher → what a token travels for, how many multiprocessors its kernels take from computation beside them, and how many
kernels are around them (`Software.relay_kernels`). Multiprocessors are those of Megatron-LM's `moe_deepep_num_sms`, and of
`moe_hybridep_num_sms` in Megatron-Bridge's recipes. NCCL's are not published. Around DeepEP's kernels, Megatron-LM's
`token_dispatcher.py` and `fused_a2a.py` start two for the top-k of a mask, one each for the layout, its notification, the mask of
what has arrived, and the notification of the way back; around HybridEP's, two for the layout and the map of rows."""
_OVERLAPS: Mapping[str, tuple[str, Literal["together", "apart"]]] = {
    "": ("sequential", "together"), "none": ("sequential", "together"),
    "ep overlap": ("weave", "together"), "1f1b ep overlap": ("weave", "together"),
    "ep overlap + delayed wgrad": ("weave", "apart"),
}  # fmt: skip
"""What a row overlaps → the kind of schedule, and when gradients of weights are computed."""
_ASSUMED = ("seq", "gbs", "mbs", "dispatcher", "overlap", "recompute")
_INTERLEAVED = ("", "1f1b", "1f1b-interleaved")


class Row(NamedTuple):
    """A published measurement.

    Args:
        name: the row's id.
        method: a name of `METHODS`, or the software's repository.
        hardware: the machines that the row is priced on.
        mfu: model FLOPs over peak, from 0 to 1, with causal attention; None if the file has no measurement.
        memory: most bytes that the allocator held, without what is beside it (`Memory.workspace`); None if unknown.
        stack: rows of one stack were measured with the same software.
        settings: the settings of `THINGS`, as the row has them.
        assumed: columns that are empty and needed.
        constants: the planner's constants that are other for this row.
        unpriced: the things that differ from what is priced, because the planner has no price for them.
    """

    name: str
    method: str
    candidate: Candidate
    hardware: Hardware
    mfu: float | None
    memory: float | None = None
    stack: str = ""
    settings: Mapping[str, str] = {}
    assumed: tuple[str, ...] = ()
    unpriced: tuple[str, ...] = ()
    constants: Mapping[str, float] = {}


def read_rows(path: Path, cluster: str | None = None) -> list[Row]:
    """Read published measurements from a CSV file with the columns `PAPER` or `STACK`. Measurements may be empty.

    Args:
        cluster: the machines to price rows on. None takes the GPU that each row names.
    """
    reader = csv.DictReader(io.StringIO(read_text("score", path), newline=""))
    given = reader.fieldnames or ()
    of_stack = "id" in given
    columns = STACK if of_stack else PAPER
    missing = [name for name in columns if name not in given]
    if missing:
        raise UserError("score", str(path), f"has no column {missing[0]}", columns)
    if not of_stack and cluster is None:
        raise UserError("cluster", "nothing", "is required, because these rows name no GPU")
    name, make = ("id", _stack_row) if of_stack else ("row_id", _paper_row)
    try:
        return [_checked(make, name, fields, cluster) for fields in reader]
    except csv.Error as error:
        raise UserError("score", str(path), f"is not a table in CSV (line {reader.line_num}: {error})") from None


def _checked(make: Callable[..., Row], name: str, fields: Mapping[str, str | None], cluster: str | None) -> Row:
    """Return a row. A UserError names the row."""
    try:
        return make({key: (value or "").strip() for key, value in fields.items() if key}, cluster)
    except UserError as error:
        raise UserError(f"{fields[name]}: {error.field}", error.value, error.rule, error.legal) from None


def _paper_row(fields: Mapping[str, str], cluster: str | None) -> Row:
    name, method = fields["row_id"], fields["method"]
    if method not in METHODS:
        raise UserError("method", method, "is no known method", METHODS)
    numbers = {key: _whole(key, fields[key]) for key in ("gpus", "seq_len", "gbs", "cp", "tp", "ep", "pp", "etp_effective")}
    how = METHODS[method]
    model = ModelSpec.model_validate({"preset": fields["model"]})
    tp, cp, pp, etp = (numbers[key] for key in ("tp", "cp", "pp", "etp_effective"))
    fold = Fold(numbers["gpus"], tp, cp, pp, how.get("ep", numbers["ep"]), etp)
    job = Job(model, numbers["seq_len"], numbers["gbs"])
    # One block per stage, where Megatron's interleaved schedule can run at all.
    interleaved = pp > 1 and pp in divisors(model.layers) and PipelineGraph(pp, max(1, job.global_batch // fold.dp)).full_rounds
    virtual = model.layers // pp if interleaved else 1
    candidate = Candidate(job, fold, Ordering(reduction=Reduction("buckets")), 1, virtual, how["zero"])
    sizes = {key: str(getattr(fold, key)) for key in ("tp", "cp", "pp", "ep", "etp")}
    settings = {"model": fields["model"], "gpus": fields["gpus"], "seq": fields["seq_len"], "gbs": fields["gbs"], **sizes}
    stack = method.removesuffix(" w/ Folding")
    return Row(name, method, candidate, load_hardware(str(cluster)), _share(fields["mfu_pct"]), None, stack, settings)


def _stack_row(fields: Mapping[str, str], cluster: str | None) -> Row:
    hardware = load_hardware(cluster or fields["gpu"], "cluster" if cluster else "gpu")
    tp, cp, pp, ep, etp = (_whole(axis, fields[axis], 1) for axis in ("tp", "cp", "pp", "ep", "etp"))
    fold, micro_batch = Fold(_whole("gpus", fields["gpus"]), tp, cp, pp, ep, etp), _whole("mbs", fields["mbs"], 1)
    dispatch, taken, around = _known(fields, "dispatcher", _DISPATCHERS)
    repository = fields["source"].partition("@")[0].partition(":")[0]
    modules = fields["recompute"].lower().split()
    for module in modules:
        if module not in _RECOMPUTED:
            raise UserError("recompute", module, "is no module that can run again", _RECOMPUTED)
    model = ModelSpec.model_validate({"preset": fields["model"], "router": {"skew": _number(fields, "skew") or 0.0}})
    software = _SOFTWARE.get(f"{repository} {model.preset}", _SOFTWARE.get(repository, _MEGATRON))
    job = Job(
        model, _whole("seq", fields["seq"], _SEQ), _whole("gbs", fields["gbs"], _ROUNDS * pp * fold.dp * micro_batch),
        _dtype(fields["precision"]), dispatch=dispatch, again=tuple(part for part in PARTS if part in modules),
        software=software._replace(relay_kernels=around),
    )  # fmt: skip
    if dispatch == "rank":
        fold = in_two_levels(fold, Device.of(job, hardware))
    virtual = _whole("vp", fields["vp"], 1)
    stages = virtual, 1, _split(model.layers, pp * virtual)
    measured, memory = _measured(fields, job, fold) / hardware.peak(job.dtype) or None, _number(fields, "mem_gib")
    settings = {key: fields.get(key, "") for things in THINGS.values() for key in things} | {"model": fields["model"]}
    return Row(
        fields["id"], repository, Candidate(job, fold, _ordering(fields, modules), micro_batch, *stages), hardware, measured,
        memory and memory * GIB, stack=re.sub(r":[\d-]+( .*)?$", "", fields["source"]), settings=settings,
        assumed=tuple(key for key in _ASSUMED if not fields[key]), unpriced=_unpriced(fields),
        constants={"crowding": taken / hardware.processors} if taken else {},
    )  # fmt: skip


def _ordering(fields: Mapping[str, str], modules: Sequence[str]) -> Ordering:
    """Return a row's schedule. Megatron-LM overlaps the all-to-alls of one micro-batch with another one, as `weave` does."""
    kind, weights = _known(fields, "overlap", _OVERLAPS)
    again = tuple(dict.fromkeys(kind for module in modules for kind in _AGAIN.get(module, ())))
    both = Overlap(kind), Overlap(kind)
    return Ordering(*both, recompute=again, reduction=Reduction("buckets"), weight_gradients=weights)


def _measured(fields: Mapping[str, str], job: Job, fold: Fold) -> float:
    """Return the measured model FLOP/s of a GPU, with causal attention as Megatron-LM counts it; 0 if there are none.

    Tokens go before TFLOP/s, whose count of FLOPs is the software's own.
    """
    per_token = job.flops[0] / (job.global_batch * job.seq_len)
    if tokens := _number(fields, "tokens_s_gpu"):
        return tokens * per_token
    if seconds := _number(fields, "step_s"):
        return job.flops[0] / seconds / fold.world_size
    return (_number(fields, "tflops_gpu") or 0.0) * 1e12


def _unpriced(fields: Mapping[str, str]) -> tuple[str, ...]:
    """Return the things that a row has and the planner has no price for.

    Graphs start kernels in the host's place. Learned routing has an overload that nobody published. foldray has no pipeline
    whose stages lie in a V.
    """
    graphs, schedule, routing = fields["graphs"] not in ("", "none"), fields.get("schedule", ""), fields["balanced"]
    of_its_own = schedule.lower() not in _INTERLEAVED
    things = {"graphs": graphs, "schedule": of_its_own, "routing": "learned" in routing and not fields.get("skew")}
    return tuple(thing for thing, is_so in things.items() if is_so)


def _split(layers: int, stages: int) -> tuple[int, ...] | None:
    """Return the numbers of blocks of stages; None for even ones.

    Where blocks do not fill the stages evenly, the embedding and the head count as a block each, as in Megatron-LM's options
    `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`; the head does not if no block would be
    left beside it.
    """
    if layers % stages == 0:
        return None
    cuts = (tuple(even_sizes(layers, stages, 1, last)) for last in (1, 0))
    return next((cut for cut in cuts if min(cut) > 0), None)


def _dtype(precision: str) -> str:
    """Return a dtype of hardware files: the first word of what a row says, such as FP8 of "FP8 (default)"."""
    return (precision.split() or ["bf16"])[0].lower()


def _known(fields: Mapping[str, str], key: str, table: Mapping[str, _T]) -> _T:
    value = fields[key].lower()
    if value not in table:
        raise UserError(key, fields[key], "is not known", [name for name in table if name])
    return table[value]


def _whole(key: str, text: str, default: int | None = None) -> int:
    if not text and default is not None:
        return default
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= _MOST.get(key, 2**17):
        raise UserError(key, text, f"must be a whole number, at least 1 and at most {_MOST.get(key, 2**17)}")
    return int(text)


def _number(fields: Mapping[str, str], key: str) -> float | None:
    """Return a positive number; None if the row does not have it."""
    text = fields.get(key, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e12:
        raise UserError(key, text, "must be a positive number")
    return number


def _share(text: str) -> float | None:
    if not text:
        return None
    try:
        share = float(text) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise UserError("mfu_pct", text, "must be a percentage above 0, at most 100")
    return share


def thing_between(one: Row, other: Row) -> str | None:
    """Return the one thing in which two rows of the same stack differ; None if they differ in none or in several."""
    if one.stack != other.stack:
        return None
    changed = {key for key in one.settings.keys() | other.settings.keys() if _differs(one, other, key)}
    return next((thing for thing, keys in THINGS.items() if changed and changed <= {*keys}), None)


def _differs(one: Row, other: Row, key: str) -> bool:
    mine, theirs = (row.settings.get(key, "") for row in (one, other))
    return mine != theirs and {mine, theirs} != {"", "none"}

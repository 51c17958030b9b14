"""The sections of a recipe: their keys, defaults and single rules."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, field_validator, model_validator

from foldray.blueprint import Strict
from foldray.errors import UserError
from foldray.kinds import RECOMPUTABLE
from foldray.schedule import OVERLAPS, SEARCHED, SEQUENTIAL, overlap_kind
from foldray.tables import OWN, among
from foldray.urls import without_secrets

# Bounds far above what can be trained. What lies beyond would not be refused elsewhere: it would take the machine along.
_MOST_WORKERS = 2**17  # a fold's tables of many more ranks take minutes and gigabytes
_MOST_SEQUENCES = 2**20  # of a step: its micro-batches are ops of one list
_MOST_PIECES = 2**8  # of a sequence
_MOST_LAYERS = 2**12
_MOST_BYTES = 2**40
_MOST_STEPS = 10**9
_MOST_TURNS = 10**6
_LONGEST = 2**24  # sequence, in tokens
_MOST_S = 10**9  # seconds
MOST_SETTINGS = 2**14  # of a tuner's table; each takes milliseconds to check, and more to predict

Beta = Annotated[float, Field(ge=0, lt=1)]
Cost = Annotated[float, Field(ge=0, le=1e30)]
Size = Annotated[int, Field(ge=1, le=_MOST_BYTES)]
Few = Field(min_length=1, max_length=16)  # each is tried while training, or multiplies what a tuner tries
Sizes = Annotated[tuple[Size, ...], Few]
Operations = Annotated[tuple[Annotated[str, among(RECOMPUTABLE)], ...], Field(max_length=len(RECOMPUTABLE))]
OverlapName = Annotated[str, among((*OVERLAPS, OWN), overlap_kind)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
"""Also a part of a path."""
SamplerName = Literal["ratio", "gp", "tpe", "random", "planner"]
Url = Annotated[str, PlainSerializer(without_secrets, when_used="json")]
"""Its secrets stay in this process: files, logs and workers get a recipe as JSON has it."""


class ValidationSplit(Strict):
    """What is held back to measure the model on text it has not seen."""

    fraction: float = Field(0.05, gt=0, lt=1, description="share of the files held back, chosen by name")
    path: str | None = Field(None, description="file or glob of a validation set of its own, instead of a share")


class DataSpec(Strict):
    """Where text comes from and how it is cut into sequences."""

    source: Literal["stdlib", "text", "jsonl", "parquet"] = Field("stdlib", description="stdlib is Python's own standard library")
    path: str | None = Field(None, description="file or glob (text, jsonl, parquet)")
    text_field: str = Field("text", description="key or column that holds a document (jsonl, parquet)")
    tokenizer: str = Field("byte", description='"byte", or a folder with a Hugging Face tokenizer')
    seq_len: int = Field(256, ge=1, le=_LONGEST, description="tokens of a sequence")
    mask_documents: bool = Field(False, description="attention stops at document boundaries")
    validation: ValidationSplit = ValidationSplit()
    cache: str | None = Field(None, description="folder of packed data; null is `data` in the run storage")


class FoldSpec(Strict):
    """Parallel sizes; dp and edp follow from the number of workers."""

    tp: int = Field(1, ge=1, le=_MOST_WORKERS, description="tensor parallel")
    cp: int = Field(1, ge=1, le=_MOST_WORKERS, description="context parallel")
    pp: int = Field(1, ge=1, le=_MOST_WORKERS, description="pipeline parallel")
    ep: int = Field(1, ge=1, le=_MOST_WORKERS, description="expert parallel")
    etp: int = Field(1, ge=1, le=_MOST_WORKERS, description="expert tensor parallel; 1 whatever tp is")
    order: str = Field("tp-cp-dp-pp", description="attention's axes, those of neighbouring ranks first")
    moe_order: str = Field("etp-ep-edp-pp", description="the experts' axes, those of neighbouring ranks first")


class ScheduleSpec(Strict):
    """In which order a step's pieces run."""

    kind: OverlapName = Field(SEQUENTIAL.name, description="hides all-to-alls")
    backward: Annotated[str, among(("a kind",), overlap_kind)] | None = Field(None, description="going backward; null is as kind")
    degree: int = Field(1, ge=1, le=_MOST_PIECES, description="pieces that a sequence is cut into")
    degrees: Sizes | None = Field(None, description="degrees that training tries in its first steps; null keeps degree")
    slicing: Literal["token_uniform", "algorithm1", "time_uniform"] = Field("time_uniform", description="how attention is cut")
    slices: Annotated[tuple[Size, ...], Field(max_length=_MOST_PIECES)] | None = Field(
        None, description="lengths of attention's slices; null is as slicing finds them"
    )
    slice_cost: tuple[Cost, Cost] | None = Field(None, description="what a slice costs, as bench measures it; null is FLOPs")
    lag: int = Field(2, ge=1, le=_MOST_PIECES, description="stream: attention steps between a piece's router and its experts")
    backward_lag: int = Field(2, ge=1, le=_MOST_PIECES, description="stream: the same going backward")
    recompute: Operations = Field((), description="forwards that are computed again before their backward, to save memory")
    batch_degree: int = Field(
        1, ge=1, le=_MOST_SEQUENCES, description="parts that a micro-batch is cut into along the batch; of flow 2"
    )
    reduction: Literal["end", "buckets", "chunks"] = Field(
        "end", description="when gradients travel: last, once there, in gaps (flow)"
    )
    sp_bytes: Size | Literal["auto"] | None = Field(
        None, description="bytes of gradients at once; null is 25 or 2.5 MiB; auto searches"
    )
    virtual_stages: int = Field(
        1, ge=1, le=_MOST_LAYERS, description="stages per pipeline position: 1 is 1F1B, more are interleaved"
    )
    stage_layers: Annotated[tuple[Size, ...], Field(max_length=_MOST_LAYERS)] | None = Field(
        None, description="blocks of every stage; null shares them out evenly"
    )
    context: Literal["ring", "all_gather"] = Field(
        "ring", description="how keys and values travel between context-parallel ranks"
    )

    @property
    def opened(self) -> list[str]:
        """Keys that training finds values for."""
        return ["degrees"] * (self.degrees is not None) + ["sp_bytes"] * (self.sp_bytes == "auto")

    @field_validator("sp_bytes", mode="before")
    @classmethod
    def _size(cls, given: Any) -> Any:
        if given in (None, "auto") or (isinstance(given, int) and 0 < given <= _MOST_BYTES):
            return given
        raise UserError(
            "schedule.sp_bytes",
            given,
            "must be a whole number of bytes, at least 1, or auto",
            [f"1…{_MOST_BYTES}", "auto", "null"],
        )

    @model_validator(mode="before")
    @classmethod
    def _as_kind_has_it(cls, given: Any) -> Any:
        try:
            row = overlap_kind(given["kind"])
        except (UserError, TypeError, KeyError, AttributeError):
            return given  # which is refused, or the default
        return {"batch_degree": row.batch_degree, "reduction": row.reduction, **given}


class MoeSpec(Strict):
    """Which kernels run the MoE layer."""

    backend: Literal["torch", "tutel", "deepspeed"] = Field("torch", description="gating and permutation")
    experts: Literal["grouped", "loop"] = Field("grouped", description="expert products; loop is the plain reference")


class OptimizerSpec(Strict):
    """The update rule and the learning rate's course."""

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="adamw only")
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="on matrices; norms and biases have none")
    momentum: float = Field(0.0, ge=0, lt=1, description="sgd only")
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null does not clip")
    warmup_steps: int = Field(0, ge=0, le=_MOST_STEPS)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr: float = Field(0.1, ge=0, le=1, description="last learning rate, as a share of lr")


class TrainingSpec(Strict):
    """How long, with how much data at once, and when to look."""

    steps: int = Field(100, ge=1, le=_MOST_STEPS, description="optimizer steps of the whole training")
    stop_after: int | None = Field(None, ge=1, le=_MOST_STEPS, description="stop after this step and leave the rest to --resume")
    global_batch: int = Field(8, ge=1, le=_MOST_SEQUENCES, description="sequences per optimizer step")
    micro_batch: int = Field(1, ge=1, le=_MOST_SEQUENCES, description="sequences per worker and pass")
    eval_every: int | None = Field(None, ge=1, le=_MOST_STEPS, description="steps between validations; null is only at the end")
    eval_sequences: int | None = Field(None, ge=1, le=_MOST_STEPS, description="validation sequences; null is all of them")
    seed: int = Field(0, ge=0, lt=2**32)


class EngineSpec(Strict):
    """Who holds the optimizer."""

    kind: Literal["deepspeed", "torch"] = "deepspeed"
    zero: Literal[0, 1, 2] = Field(1, description="ZeRO stage; the torch engine has 0 unless told")

    @model_validator(mode="before")
    @classmethod
    def _torch_has_stage_0(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("kind") == "torch":
            return {"zero": 0, **given}
        return given


class CheckpointSpec(Strict):
    """When state is saved, and how much of it is kept."""

    every: int | None = Field(None, ge=1, le=_MOST_STEPS, description="steps between checkpoints; null is only at the end")
    keep: int = Field(2, ge=1, le=_MOST_STEPS, description="newest checkpoints kept")
    asynchronous: bool = Field(True, description="write while training goes on")


class TrackingSpec(Strict):
    """Where metrics go."""

    experiment: str = Field("foldray", min_length=1)
    uri: Url | None = Field(None, description="MLflow tracking URI; null is SQLite in the run storage")


class ClusterSpec(Strict):
    """What the run takes of a Ray cluster."""

    workers: int = Field(1, ge=1, le=_MOST_WORKERS, description="ranks of the fold, one Ray actor each")
    cpus_per_worker: int = Field(1, ge=1, le=_MOST_WORKERS)
    gpu: bool = Field(False, description="one GPU per worker, over NCCL; else CPU, over gloo")
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    address: Url | None = Field(None, description="Ray cluster to join; null starts one on this machine")
    storage: Url | None = Field(None, description="folder (or URI) that every node sees, for runs; null is ./runs")
    max_failures: int = Field(3, ge=0, le=_MOST_STEPS, description="worker losses survived by going on from the last checkpoint")


class SpaceSpec(Strict):
    """What `foldray tune` tries; a list of one value settles it. Only what is legal together is ever tried."""

    tp: Sizes | None = Field(None, description="null is every size that is legal; so for cp, pp, ep and etp")
    cp: Sizes | None = None
    pp: Sizes | None = None
    ep: Sizes | None = None
    etp: Sizes | None = None
    virtual_stages: Sizes | None = Field(None, description="null is the recipe's")
    micro_batch: Sizes | None = Field(None, description="null is the recipe's")
    kind: tuple[OverlapName, ...] | None = Field(None, min_length=1, max_length=16, description=f"null is {', '.join(SEARCHED)}")
    degree: Sizes = (1, 2, 4, 8)
    slicing: Annotated[tuple[Literal["token_uniform", "algorithm1", "time_uniform"], ...], Few] = ("time_uniform",)
    batch_degree: Sizes = (1,)
    recompute: Annotated[tuple[Operations, ...], Few] = ((),)
    sp_bytes: Annotated[tuple[Size | None, ...], Few] = Field((None,), description="chunks of gradients; null reduces at the end")

    @property
    def settings_of_a_fold(self) -> int:
        """How many settings the lists make, at most, for one choice of parallel sizes."""
        lists = (self.virtual_stages, self.micro_batch, self.kind, self.degree, self.slicing, self.batch_degree, self.recompute)
        return math.prod(len(values) for values in (*lists, self.sp_bytes) if values is not None)


class TuneSpec(Strict):
    """How `foldray tune` looks for the fastest way to train this recipe."""

    trials: int = Field(15, ge=1, le=_MOST_TURNS, description="settings that are measured, over all tuners of a study")
    sampler: SamplerName = Field("ratio", description="ratio learns measured over predicted")
    seed: int = Field(0, ge=0, lt=2**32)
    hardware: str | None = Field(None, description="what the planner knows, or a file; null predicts nothing")
    starts: int = Field(5, ge=0, le=_MOST_TURNS, description="of the planner's best, measured first")
    turns: int = Field(4, ge=1, le=_MOST_TURNS, description="of a trial and the reference, alternating")
    steps: int = Field(3, ge=1, le=_MOST_TURNS, description="of each turn, behind one to warm up")
    prune: float | None = Field(1.3, gt=1, description="stop what is surely so many times slower than the best")
    trial_s: float = Field(600, gt=0, le=_MOST_S, description="seconds after which a trial has failed")
    beside: bool = Field(True, description="keep the reference in memory beside a trial (torch engine)")
    memory_gib: float | None = Field(None, gt=0, description="most that a worker may need; null is what it has")
    second: Literal["memory"] | None = Field(None, description="what is to be small as well; null is time alone")
    parallel: int = Field(1, ge=1, le=_MOST_WORKERS, description="trials at once, each on nodes of its own")
    pairs: int = Field(9, ge=2, le=_MOST_TURNS, description="turns of the winner and the recipe as it stands, at the end")
    study: Name = Field("foldray", description="name; tuners with the same storage and name share their work")
    storage: Url | None = Field(None, description="Optuna storage URL; null is SQLite in the run storage")
    learn: str | None = Field(None, description="hardware file to write, corrected by what was measured")
    space: SpaceSpec = SpaceSpec()

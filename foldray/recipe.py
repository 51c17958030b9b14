"""The recipe: the one description that train, plan, tune, verify, bench and submit read."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from foldray.errors import UserError, multiples_near, nearest
from foldray.fold import Fold, nearest_folds
from foldray.schedule import Ordering, Overlap, PipelineGraph, SliceCost, Slicing, check_pipeline, slice_sequence
from foldray.spec import ModelSpec, Ownership, Strict, check_length, smallest_slice

_MOST_WORKERS = 2**17  # a fold's tables of many more ranks take minutes and gigabytes
_PLAIN = {
    "int": "is not a valid integer",
    "float": "is not a valid number",
    "bool": "is not a valid boolean",
    "string_type": "is not a text; quotes make it one",
    "tuple_type": "is not a list",
    "model_type": "is a section and needs a valid dictionary of its keys",
}
"""Plain words for pydantic's error types, or for what they begin with."""

Beta = Annotated[float, Field(ge=0, lt=1)]


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
    seq_len: int = Field(256, ge=1, description="tokens of a sequence")
    mask_documents: bool = Field(False, description="attention stops at document boundaries")
    validation: ValidationSplit = ValidationSplit()
    cache: str | None = Field(None, description="folder of packed data; null is `data` in the run storage")


class FoldSpec(Strict):
    """Parallel sizes; dp and edp follow from the number of workers."""

    tp: int = Field(1, ge=1, description="tensor parallel")
    cp: int = Field(1, ge=1, description="context parallel")
    pp: int = Field(1, ge=1, description="pipeline parallel")
    ep: int = Field(1, ge=1, description="expert parallel")
    etp: int = Field(1, ge=1, description="expert tensor parallel; 1 whatever tp is")
    order: str = Field("tp-cp-dp-pp", description="attention's axes, those of neighbouring ranks first")
    moe_order: str = Field("etp-ep-edp-pp", description="the experts' axes, those of neighbouring ranks first")


class ScheduleSpec(Strict):
    """In which order a step's pieces run."""

    kind: Literal["sequential", "moe_only", "aaam", "one_a_one_m", "stream"] = Field(
        "sequential", description="what of a block runs while its all-to-alls travel"
    )
    backward: Literal["moe_only", "aaam", "one_a_one_m", "stream"] | None = Field(
        None, description="the same going backward; null is as kind"
    )
    degree: int = Field(1, ge=1, description="pieces that a sequence is cut into")
    slicing: Literal["token_uniform", "algorithm1", "time_uniform"] = Field("time_uniform", description="how attention is cut")
    slices: tuple[int, ...] | None = Field(None, description="lengths of attention's slices; null is as slicing finds them")
    lag: int = Field(2, ge=1, description="stream: attention steps between a piece's router and its experts")
    backward_lag: int = Field(2, ge=1, description="stream: the same going backward")
    recompute: tuple[Literal["attention", "ffn", "expert"], ...] = Field(
        (), description="forwards that are computed again before their backward, to save memory"
    )
    virtual_stages: int = Field(1, ge=1, description="stages per pipeline position: 1 is 1F1B, more are interleaved")
    stage_layers: tuple[int, ...] | None = Field(None, description="blocks of every stage; null shares them out evenly")
    context: Literal["ring", "all_gather"] = Field(
        "ring", description="how keys and values travel between context-parallel ranks"
    )


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
    warmup_steps: int = Field(0, ge=0)
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr: float = Field(0.1, ge=0, le=1, description="last learning rate, as a share of lr")


class TrainingSpec(Strict):
    """How long, with how much data at once, and when to look."""

    steps: int = Field(100, ge=1, description="optimizer steps of the whole training")
    stop_after: int | None = Field(None, ge=1, description="stop after this step and leave the rest to --resume")
    global_batch: int = Field(8, ge=1, description="sequences per optimizer step")
    micro_batch: int = Field(1, ge=1, description="sequences per worker and pass")
    eval_every: int | None = Field(None, ge=1, description="steps between validations; null is only at the end")
    eval_sequences: int | None = Field(None, ge=1, description="validation sequences; null is all of them")
    seed: int = Field(0, ge=0, lt=2**32)


class EngineSpec(Strict):
    """Who holds the optimizer."""

    kind: Literal["deepspeed", "torch"] = "deepspeed"
    zero: Literal[0, 1, 2] = Field(1, description="ZeRO stage; the torch engine has stage 0")

    @model_validator(mode="before")
    @classmethod
    def _torch_has_stage_0(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("kind") == "torch":
            return {"zero": 0, **given}
        return given


class CheckpointSpec(Strict):
    """When state is saved, and how much of it is kept."""

    every: int | None = Field(None, ge=1, description="steps between checkpoints; null is only at the end")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")
    asynchronous: bool = Field(True, description="write while training goes on")


class TrackingSpec(Strict):
    """Where metrics go."""

    experiment: str = Field("foldray", min_length=1)
    uri: str | None = Field(None, description="MLflow tracking URI; null is SQLite in the run storage")


class ClusterSpec(Strict):
    """What the run takes of a Ray cluster."""

    workers: int = Field(1, ge=1, le=_MOST_WORKERS, description="ranks of the fold, one Ray actor each")
    cpus_per_worker: int = Field(1, ge=1)
    gpu: bool = Field(False, description="one GPU per worker, over NCCL; else CPU, over gloo")
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    address: str | None = Field(None, description="Ray cluster to join; null starts one on this machine")
    storage: str | None = Field(None, description="folder (or URI) that every node sees, for runs; null is ./runs")
    max_failures: int = Field(3, ge=0, description="worker losses survived by going on from the last checkpoint")


class Recipe(Strict):
    """One training, fully described.

    Raises:
        UserError: from `load` and `parse`, with the field, the value, the rule and the legal values.
    """

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, description="first part of the run's id")
    model: ModelSpec
    data: DataSpec = DataSpec()
    fold: FoldSpec = FoldSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    moe: MoeSpec = MoeSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    training: TrainingSpec = TrainingSpec()
    engine: EngineSpec = EngineSpec()
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    cluster: ClusterSpec = ClusterSpec()

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a YAML file, apply `key.sub=value` overrides (values are YAML) and validate."""
        try:
            given = _read_yaml(Path(path).read_text())
        except OSError as error:
            raise UserError("recipe", path, f"cannot be read ({error.strerror or error})") from None
        except Exception as error:  # PyYAML promises no type: ValueError (a date), KeyError (a tag), RecursionError were seen
            raise UserError("recipe", path, f"is not YAML ({_one_line(error)})") from None
        if not isinstance(given, dict):
            raise UserError("recipe", path, "must be a mapping of sections", cls.model_fields)
        for override in overrides:
            _apply(given, override)
        return cls.parse(given)

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Recipe:
        """Validate a mapping; the first mistake is raised as a UserError."""
        _refuse_booleans(cls, given)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _first_mistake(cls, error) from None

    @property
    def placed_fold(self) -> Fold:
        """The fold on this recipe's workers."""
        return Fold(self.cluster.workers, **self.fold.model_dump())

    @property
    def ownership(self) -> Ownership:
        """Which worker holds what of the model."""
        return Ownership(self.model, self.placed_fold, self.schedule.virtual_stages, self.schedule.stage_layers)

    @property
    def slicing(self) -> Slicing | None:
        """How a sequence is cut; None where it is not."""
        schedule, length = self.schedule, self.data.seq_len
        if schedule.degree == 1:
            return None
        cost, unit = SliceCost.of_model(self.model.hidden, self.model.heads), smallest_slice(self.fold.cp, self.fold.tp)
        found = slice_sequence(schedule.slicing, length, schedule.degree, cost, unit)
        return found._replace(attention=(length,) if schedule.kind == "moe_only" else schedule.slices or found.attention)

    @property
    def ordering(self) -> Ordering:
        """How sequences are cut, and in which order their pieces go."""
        schedule = self.schedule
        return Ordering(
            Overlap(schedule.kind, schedule.lag),
            Overlap(schedule.backward or schedule.kind, schedule.backward_lag),
            self.slicing,
            schedule.recompute,
        )

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on every data-parallel place."""
        return self.training.global_batch // (self.placed_fold.dp * self.training.micro_batch)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        for check in (_check_fold, _check_batch, _check_schedule, _check_data, _check_backend, _check_engine):
            check(self)
        return self


def _check_fold(recipe: Recipe) -> None:
    workers, sizes = recipe.cluster.workers, recipe.fold
    try:
        fold = recipe.placed_fold
    except UserError as error:
        if error.field in ("order", "moe_order"):
            raise UserError(f"fold.{error.field}", error.value, error.rule, error.legal) from None
        near = nearest_folds(workers, sizes.model_dump(include={"tp", "cp", "pp", "ep", "etp"}))
        options = "; ".join(" ".join(f"{axis}={size}" for axis, size in option.items()) for option in near)
        rule = f"{error.rule} (cluster.workers); nearest legal folds: {options}"
        raise UserError("fold", error.value, rule, error.legal) from None
    assert recipe.ownership
    check_length(recipe.data.seq_len, fold.cp, fold.tp)


def _check_schedule(recipe: Recipe) -> None:
    check_pipeline(PipelineGraph(recipe.fold.pp, recipe.accumulation, recipe.schedule.virtual_stages))
    schedule, router, ranks = recipe.schedule, recipe.model.router, recipe.fold.cp * recipe.fold.tp
    if schedule.kind == "sequential" and schedule.degree > 1:
        raise UserError("schedule.degree", schedule.degree, "kind=sequential cuts nothing; choose a kind that overlaps", [1])
    slicing = recipe.slicing
    if slicing is None:
        return
    if schedule.slices is not None:
        _check_slices(recipe, slicing)
    if router.capacity_factor is not None and router.drop_scope == "sequence":
        if router.drop == "probability":
            rule = "dropping the least probable of whole sequences needs them whole; model.router.drop=position does not"
            raise UserError("schedule.degree", schedule.degree, rule, [1])
        if ranks > 1 and slicing.attention != slicing.moe:
            rule = "dropping the latest of whole sequences needs equal slices where ranks share a sequence (tp, cp)"
            raise UserError("schedule.slicing", schedule.slicing, rule, ["token_uniform"])


def _check_slices(recipe: Recipe, slicing: Slicing) -> None:
    given, length, degree = recipe.schedule.slices or (), recipe.data.seq_len, recipe.schedule.degree
    unit, cost = smallest_slice(recipe.fold.cp, recipe.fold.tp), SliceCost.of_model(recipe.model.hidden, recipe.model.heads)
    legal = ["null", list(slice_sequence("time_uniform", length, degree, cost, unit).attention)]
    if recipe.schedule.kind == "moe_only":
        raise UserError("schedule.slices", list(given), "kind=moe_only does not cut attention", ["null"])
    if len(given) != degree or sum(given) != length or min(given) < 1 or any(tokens % unit for tokens in given):
        multiples = f"multiples of {unit}" if unit > 1 else "at least 1"
        rule = f"must be {degree} lengths, {multiples}, that sum to seq_len={length}"
        raise UserError("schedule.slices", list(given), rule, legal)
    if not slicing.supplies():
        rule = f"must have made the tokens of j micro-batches {list(slicing.moe)} behind their first j slices, for any j"
        raise UserError("schedule.slices", list(given), rule, legal)


def _check_batch(recipe: Recipe) -> None:
    training, dp = recipe.training, recipe.placed_fold.dp
    unit, batch = dp * training.micro_batch, training.global_batch
    if batch % unit:
        rule = f"must be a multiple of dp × micro_batch = {dp} × {training.micro_batch}"
        raise UserError("training.global_batch", batch, rule, multiples_near(batch, unit))
    if training.stop_after is not None and training.stop_after > training.steps:
        raise UserError("training.stop_after", training.stop_after, f"must be at most steps={training.steps}")
    if recipe.optimizer.warmup_steps > training.steps:
        raise UserError("optimizer.warmup_steps", recipe.optimizer.warmup_steps, f"must be at most steps={training.steps}")


def _check_data(recipe: Recipe) -> None:
    data, model = recipe.data, recipe.model
    if data.source == "stdlib" and data.path is not None:
        raise UserError(
            "data.path", data.path, "has no meaning with source=stdlib; name the kind of file", ["text", "jsonl", "parquet"]
        )
    if data.source != "stdlib" and data.path is None:
        raise UserError("data.path", "null", f"source={data.source} needs a file or a glob")
    if model.positions == "learned" and data.seq_len > model.max_positions:
        raise UserError("data.seq_len", data.seq_len, f"must be at most model.max_positions={model.max_positions}")


def _check_engine(recipe: Recipe) -> None:
    engine, optimizer = recipe.engine, recipe.optimizer
    if engine.kind == "torch" and engine.zero:
        raise UserError("engine.zero", engine.zero, "the torch engine does not shard its optimizer; use kind=deepspeed", [0])
    if engine.kind == "deepspeed" and recipe.precision == "bfloat16" and engine.zero == 0:
        raise UserError("engine.zero", 0, "DeepSpeed's stage 0 keeps no sharded float32 state of a bfloat16 model", [1, 2])
    if engine.kind == "deepspeed" and recipe.precision == "float64":
        raise UserError(
            "precision", "float64", "DeepSpeed keeps float32 master weights; use engine.kind=torch", ["float32", "bfloat16"]
        )
    if optimizer.kind == "adamw" and optimizer.momentum:
        raise UserError("optimizer.momentum", optimizer.momentum, "has no meaning with kind=adamw", [0])


def _check_backend(recipe: Recipe) -> None:
    backend, router = recipe.moe.backend, recipe.model.router
    if backend == "tutel" and recipe.precision != "float32":
        raise UserError("moe.backend", backend, f"Tutel's kernels run in float32, not in {recipe.precision}", ["torch"])
    if backend == "deepspeed":
        same = router.score == "softmax" and (router.normalize or router.softmax == "after_topk") == (recipe.model.topk > 1)
        if not same or router.scale != 1:
            rule = "DeepSpeed's gates are a softmax over all experts, rescaled to one for topk > 1, with scale 1"
            raise UserError("moe.backend", backend, rule, ["torch", "tutel"])


def describe(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Rows (key, legal values, default, meaning) of every recipe key, for help texts."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield from describe(section, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else _as_yaml(field.default)
            yield f"{prefix}{name}", _legal(field), default, field.description or ""


def _apply(given: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError("override", override, "must read key.sub=value")
    try:
        value = _read_yaml(text)
    except Exception:  # PyYAML promises no type
        raise UserError(key, text, "is not a YAML value") from None
    *parents, last = key.split(".")
    for parent in parents:
        given = given.setdefault(parent, {})
        if not isinstance(given, dict):
            raise UserError(key, value, f"{parent} is not a section")
    given[last] = value


class _Loader(yaml.SafeLoader):
    """YAML whose keys stand once each: PyYAML would take the last of several, and drop the others in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ValueError(f"the key {key.value!r} stands twice, the second time in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if "\0" in str(node.value):
            raise ValueError(f"a zero byte in line {node.start_mark.line + 1}, which no name or path may hold")
        return super().construct_scalar(node)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _refuse_booleans(model: type[BaseModel], given: Any, prefix: str = "") -> None:
    """Keep `true` (and `yes`, `on`) from passing for the number 1."""
    for key, value in given.items() if isinstance(given, dict) else ():
        field = model.model_fields.get(key)
        if field is None:
            continue
        section = _section(field.annotation)
        if section is not None:
            _refuse_booleans(section, value, f"{prefix}{key}.")
        elif isinstance(value, bool) and {int, float} & {field.annotation, *get_args(field.annotation)}:
            raise UserError(f"{prefix}{key}", str(value).lower(), "is not a valid number")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).replace('"<unicode string>", ', "").split())


def _first_mistake(model: type[BaseModel], error: ValidationError) -> UserError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    field, kind = ".".join(path), first["type"]
    value = "null" if first["input"] is None else first["input"]
    if kind in ("extra_forbidden", "invalid_key"):
        known = list(_lookup(model, path[:-1]))
        return UserError(field, value, f"is no known key{nearest(path[-1], known)}", known)
    if kind == "missing":
        return UserError(field, "nothing", "is required")
    if kind == "literal_error":
        return UserError(field, value, "is none of the legal values", _choices(_lookup(model, path[:-1])[path[-1]]))
    if kind == "string_pattern_mismatch":
        return UserError(field, value, "may hold letters, digits, '.', '_' and '-', a letter or digit first")
    return UserError(field, value, _rule(kind, first["msg"]), _lookup(model, path) if kind == "model_type" else None)


def _rule(kind: str, message: str) -> str:
    """What pydantic says, in plain words."""
    plain = _PLAIN.get(kind) or _PLAIN.get(kind.split("_")[0])
    return plain or f"must {message.split(' should ')[-1].replace(' after validation', '')}"


def _lookup(model: type[BaseModel], path: list[str]) -> dict[str, FieldInfo]:
    for part in path:
        model = _section(model.model_fields[part].annotation) or model
    return model.model_fields


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _choices(field: FieldInfo) -> list[Any]:
    return list(get_args(field.annotation))


def _legal(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    parts = get_args(annotation) if get_origin(annotation) is types.UnionType else (annotation,)
    plain = {type(None): "null", tuple: "list"}
    names = [plain.get(get_origin(part) or part) or getattr(part, "__name__", str(part)) for part in parts]
    return "|".join(names)


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True).split("\n")[0]

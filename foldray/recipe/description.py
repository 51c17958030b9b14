"""A recipe without the rules between its keys: its sections, its way in, and the values that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError, field_validator, model_validator

from foldray.blueprint import ModelSpec, Ownership, Strict, smallest_slice
from foldray.errors import UserError
from foldray.files import load_yaml, parse_yaml
from foldray.fold import Fold, divisors
from foldray.graph import Reduction, SliceCost, Slicing
from foldray.orders import AF_PIPE, AUTO, LIST, OVERLAPS, SEQUENTIAL, Ordering, Overlap, Sequences, named_ordering
from foldray.recipe import shipped
from foldray.recipe.bounds import Name
from foldray.recipe.data import DataSpec
from foldray.recipe.reading import apply, first_mistake, refuse_booleans, refuse_own, refuse_secrets
from foldray.recipe.schedule import ScheduleSpec
from foldray.recipe.sections import (
    CheckpointSpec,
    ClusterSpec,
    EngineSpec,
    ExportSpec,
    FoldSpec,
    MoeSpec,
    OptimizerSpec,
    PlacementSpec,
    RoutesSpec,
    TrackingSpec,
    TrainingSpec,
)
from foldray.recipe.tuning import TuneSpec


class Description(Strict):
    """One training. The section `model` is required; every other key has a default.

    `Recipe` is a description whose rules have been checked.
    """

    name: Name = "run"
    """First part of the run's id, which names its folder and its MLflow run."""
    model: ModelSpec
    data: DataSpec = DataSpec()
    fold: FoldSpec = FoldSpec()
    placement: PlacementSpec | None = None
    schedule: ScheduleSpec = ScheduleSpec()
    moe: MoeSpec = MoeSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    training: TrainingSpec = TrainingSpec()
    engine: EngineSpec = EngineSpec()
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of weights and activations. `bfloat16` halves their memory and traffic; gradient sums
    and the optimizer stay in float32. `float64` is for checks, with `engine.kind: torch`. There is
    no float16, which has fewer exponents: small gradients would be lost without a factor on the
    loss."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    routes: RoutesSpec = RoutesSpec()
    tracking: TrackingSpec = TrackingSpec()
    cluster: ClusterSpec = ClusterSpec()
    tune: TuneSpec = TuneSpec()
    export: ExportSpec = ExportSpec()

    @field_validator("precision", mode="before")
    @classmethod
    def _has_the_exponents_of_float32(cls, given: Any) -> Any:
        if given in ("float16", "fp16", "half"):
            rule = "has too few exponents for gradients without a factor on the loss; bfloat16 has those of float32"
            raise UserError("precision", given, rule, ["float32", "bfloat16", "float64"])
        return given

    @model_validator(mode="before")
    @classmethod
    def _placement_has_af_pipe(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("placement") is None:
            return given
        schedule = given.get("schedule", {})
        return {**given, "schedule": {"kind": AF_PIPE.name, **schedule}} if isinstance(schedule, dict) else given

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a YAML file, apply `key.sub=value` overrides (values are YAML) and validate.

        Args:
            path: the file, or the name of one of foldray's recipes (`shipped.py`).

        Raises:
            UserError: the recipe is illegal, or a value has a secret that files would show.
        """
        given = cls._sections(str(path), load_yaml("recipe", shipped.find(path)))
        for override in overrides:
            apply(given, override)
        recipe = cls.parse(given)
        refuse_secrets(recipe.model_dump(mode="json"))
        return recipe

    @classmethod
    def stored(cls, path: str, text: str, trust: bool = False) -> Self:
        """Read a recipe that lies beside a trained model, and may come from another person.

        Args:
            path: where it lies, for messages.
            trust: whether to import the modules that it names (`module:NAME`), which runs their code.

        Raises:
            UserError: the recipe is illegal, or names a module without `trust`.
        """
        given = cls._sections(path, parse_yaml("recipe", path, text))
        if not trust:
            refuse_own(given)
        return cls.parse(given)

    @classmethod
    def _sections(cls, path: str, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise UserError("recipe", path, "must be a mapping of sections", cls.model_fields)
        return given

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Self:
        """Validate a mapping, and raise the first mistake as a UserError."""
        refuse_booleans(cls, given)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise first_mistake(cls, error) from None

    @property
    def placed_fold(self) -> Fold:
        """The fold on this recipe's workers."""
        sizes, placement = self.fold.model_dump(), self.placement
        if placement is not None:
            sizes |= {"expert_ranks": placement.experts, "expert_pp": placement.expert_pp}
        return Fold(self.cluster.workers, **sizes)

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The label of Ray's nodes that each worker needs; None for a worker that may run on any node."""
        if self.placement is None:
            return (None,) * self.cluster.workers
        placement = self.placement
        return (placement.attention_nodes,) * placement.attention + (placement.expert_nodes,) * placement.experts

    @property
    def adapters(self) -> tuple[tuple[str, ...] | None, ...]:
        """The network adapters that each worker takes; None for those of the job's own setting."""
        if self.placement is None:
            return (None,) * self.cluster.workers
        placement = self.placement
        return (placement.attention_adapters,) * placement.attention + (placement.expert_adapters,) * placement.experts

    @property
    def ownership(self) -> Ownership:
        """The pieces of the model that each worker holds."""
        return Ownership(self.model, self.placed_fold, self.schedule.virtual_stages, self.schedule.stage_layers)

    @property
    def slicing(self) -> Slicing | None:
        """How a sequence is cut; None for a sequence that is not cut."""
        return self.ordering.slicing

    def cut(self, kind: str, degree: int, attention_degree: int | None = None) -> Slicing:
        """Cut this recipe's sequences into slices of another kind (`slice_sequence`)."""
        return self._sequences.cut(kind, degree, attention_degree)

    @property
    def _sequences(self) -> Sequences:
        return Sequences(self.data.seq_len, self.slice_cost, self.slice_unit)

    @property
    def slice_cost(self) -> SliceCost:
        """The cost of a slice of attention: the measured cost of the recipe, or its FLOPs."""
        measured = self.schedule.slice_cost
        return SliceCost.of(self.model) if measured is None else SliceCost(*measured)

    @property
    def slice_unit(self) -> int:
        """The length of every slice is a multiple of this number of tokens."""
        return smallest_slice(self.fold.cp, self.fold.tp)

    @property
    def ordering(self) -> Ordering:
        """How sequences are cut, and the order of their pieces."""
        schedule = self.schedule
        kind = SEQUENTIAL.name if schedule.kind == AUTO.name else schedule.kind
        return Ordering(
            Overlap(kind, _number(schedule.lag)),
            Overlap(schedule.backward or kind, _number(schedule.backward_lag)),
            self._sequences.cut_for(kind, schedule.degree, schedule.slicing, schedule.slices, schedule.attention_degree),
            schedule.recompute,
            schedule.batch_degree,
            Reduction(schedule.reduction, _number(schedule.sp_bytes)),
            schedule.weight_gradients,
            1 if schedule.ahead is None else schedule.ahead,
            schedule.alive,
            offload=schedule.offload,
        )

    @property
    def orderings(self) -> dict[int, Ordering]:
        """The orderings that training may choose from, by degree."""
        return {degree: self.at_degree(degree).ordering for degree in self.schedule.degrees or (self.schedule.degree,)}

    def named_ordering(self, name: str) -> Ordering:
        """Return the ordering of a short name such as `stream:4:2` (`schedule.named_ordering`), with this recipe's
        recomputation, activations on the host and micro-batches alive.

        Raises:
            UserError: the name is illegal, or the ordering does not fit this recipe.
        """
        ordering = named_ordering(name, self.data.seq_len, self.slice_cost, self.slice_unit)
        row = ordering.forward.row
        if row.order is None if self.placement is None else not row.for_placement:
            rule = "needs the section placement" if self.placement is None else "orders no experts with workers of their own"
            raise UserError("schedule", name, rule, OVERLAPS if self.placement is None else [AF_PIPE.name, LIST.name])
        if self.training.micro_batch % ordering.batch_degree:
            rule = f"has {ordering.batch_degree} parts along the batch; this number must divide training.micro_batch"
            raise UserError("schedule", name, rule, divisors(self.training.micro_batch))
        if ordering.batch_degree > 1 and self.model.router.balance_scope == "batch":
            rule = "has parts along the batch, and model.router.balance_scope=batch counts whole micro-batches"
            raise UserError("schedule", name, rule)
        if self.engine.kind == "deepspeed" and self.schedule.reduction == "end" != ordering.reduction.kind:
            rule = "reduces gradients within the step; with DeepSpeed this needs schedule.reduction=chunks or buckets"
            raise UserError("schedule", name, rule)
        schedule = self.schedule
        return ordering._replace(recompute=schedule.recompute, offload=schedule.offload, alive=schedule.alive)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on every data-parallel place. With uneven shares, the last one has fewer sequences,
        or none, on some places."""
        return -(-self.training.global_batch // (self.placed_fold.dp * self.training.micro_batch))

    def at_degree(self, degree: int) -> Self:
        """Return the same recipe with this degree, at most as many slices of attention, and no other degree to try.

        Raises:
            UserError: the recipe is illegal with this degree.
        """
        given = self.model_dump()
        slices = self.schedule.slices if degree == self.schedule.degree else None
        fewer = self.schedule.attention_degree and min(self.schedule.attention_degree, degree)
        given["schedule"] |= {"degree": degree, "degrees": None, "slices": slices, "attention_degree": fewer}
        return self.parse(given)


def _number(given: int | str | None) -> int | None:
    return given if isinstance(given, int) else None

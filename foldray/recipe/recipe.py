"""The recipe: the one description that train, plan, tune, verify, bench and submit read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from foldray.errors import UserError
from foldray.files import load_yaml
from foldray.fold import Fold, divisors
from foldray.recipe.checks import check_all
from foldray.recipe.reading import apply, first_mistake, refuse_booleans
from foldray.recipe.sections import (
    CheckpointSpec,
    ClusterSpec,
    DataSpec,
    EngineSpec,
    FoldSpec,
    MoeSpec,
    OptimizerSpec,
    ScheduleSpec,
    TrackingSpec,
    TrainingSpec,
    TuneSpec,
)
from foldray.schedule import Ordering, Reduction, Sequences, SliceCost, Slicing, make_ordering, named_ordering
from foldray.spec import ModelSpec, Ownership, Strict, smallest_slice


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
    tune: TuneSpec = TuneSpec()

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
        """Read a YAML file, apply `key.sub=value` overrides (values are YAML) and validate."""
        given = load_yaml("recipe", path)
        if not isinstance(given, dict):
            raise UserError("recipe", path, "must be a mapping of sections", cls.model_fields)
        for override in overrides:
            apply(given, override)
        return cls.parse(given)

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Recipe:
        """Validate a mapping; the first mistake is raised as a UserError."""
        refuse_booleans(cls, given)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise first_mistake(cls, error) from None

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
        return self.ordering.slicing

    def cut(self, kind: str, degree: int) -> Slicing:
        """This recipe's sequences in slices of another kind (`slice_sequence`)."""
        return self._sequences.cut(kind, degree)

    @property
    def _sequences(self) -> Sequences:
        return Sequences(self.data.seq_len, self.slice_cost, self.slice_unit)

    @property
    def slice_cost(self) -> SliceCost:
        """What a slice of attention costs: as measured, or by its FLOPs."""
        measured = self.schedule.slice_cost
        return SliceCost.of_model(self.model.hidden, self.model.heads) if measured is None else SliceCost(*measured)

    @property
    def slice_unit(self) -> int:
        """What every slice's length is a multiple of."""
        return smallest_slice(self.fold.cp, self.fold.tp)

    @property
    def ordering(self) -> Ordering:
        """How sequences are cut, and in which order their pieces go."""
        schedule = self.schedule
        reduction = Reduction(schedule.reduction, None if schedule.sp_bytes == "auto" else schedule.sp_bytes)
        return make_ordering(
            self._sequences, schedule.kind, schedule.degree, schedule.lag, schedule.backward, schedule.backward_lag,
            schedule.slicing, schedule.slices, schedule.batch_degree, reduction, schedule.recompute,
        )  # fmt: skip

    @property
    def orderings(self) -> dict[int, Ordering]:
        """By degree: those that training may choose from."""
        return {degree: self.at_degree(degree).ordering for degree in self.schedule.degrees or (self.schedule.degree,)}

    def at_degree(self, degree: int) -> Recipe:
        """The same with sequences in so many pieces, and no other degree to try.

        Raises:
            UserError: that cannot be.
        """
        given = self.model_dump()
        slices = self.schedule.slices if degree == self.schedule.degree else None
        given["schedule"] |= {"degree": degree, "degrees": None, "slices": slices}
        return Recipe.parse(given)

    def named_ordering(self, name: str) -> Ordering:
        """What a short name such as `stream:4:2` stands for (`schedule.named_ordering`), with this recipe's recomputation."""
        found = named_ordering(name, self.data.seq_len, self.slice_cost, self.slice_unit)
        if self.training.micro_batch % found.batch_degree:
            rule = f"cuts into {found.batch_degree} along the batch, which must divide training.micro_batch"
            raise UserError("schedule", name, rule, divisors(self.training.micro_batch))
        if self.engine.kind == "deepspeed" and self.schedule.reduction == "end" != found.reduction.kind:
            rule = "reduces within the step, which DeepSpeed leaves to foldray with schedule.reduction=chunks or buckets only"
            raise UserError("schedule", name, rule)
        return found._replace(recompute=self.schedule.recompute)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on every data-parallel place."""
        return self.training.global_batch // (self.placed_fold.dp * self.training.micro_batch)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        check_all(self)
        return self

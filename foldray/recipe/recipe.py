"""The recipe: the one description that train, plan, tune, verify, bench and submit read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import model_validator

from foldray.errors import UserError
from foldray.files import load_yaml, parse_yaml
from foldray.fold import divisors
from foldray.orders import AF_PIPE, LIST, OVERLAPS, Ordering, named_ordering
from foldray.recipe import shipped
from foldray.recipe.checks import check_all
from foldray.recipe.description import Description
from foldray.recipe.reading import apply, refuse_own, refuse_secrets


class Recipe(Description):
    """One training, fully described.

    Raises:
        UserError: from `load` and `parse`, with the field, the value, the rule and the legal values.
    """

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
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
    def stored(cls, path: str, text: str, trust: bool = False) -> Recipe:
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

    @property
    def orderings(self) -> dict[int, Ordering]:
        """The orderings that training may choose from, by degree."""
        return {degree: self.at_degree(degree).ordering for degree in self.schedule.degrees or (self.schedule.degree,)}

    def named_ordering(self, name: str) -> Ordering:
        """Return the ordering of a short name such as `stream:4:2` (`schedule.named_ordering`), with this recipe's
        recomputation and micro-batches alive.

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
        if self.engine.kind == "deepspeed" and self.schedule.reduction == "end" != ordering.reduction.kind:
            rule = "reduces gradients within the step; with DeepSpeed this needs schedule.reduction=chunks or buckets"
            raise UserError("schedule", name, rule)
        return ordering._replace(recompute=self.schedule.recompute, alive=self.schedule.alive)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        check_all(self)
        return self

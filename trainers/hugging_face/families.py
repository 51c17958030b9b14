"""The table of the families of models in Hugging Face's transformers that foldray's models can be told as."""

from __future__ import annotations

from foldray.blueprint import ModelSpec, parameter_table
from foldray.errors import UserError
from foldray.tables import find_row
from trainers.hugging_face.family import Family, value_at
from trainers.hugging_face.names import Tensor
from trainers.hugging_face.with_latent import WITH_LATENT
from trainers.hugging_face.with_sigmoid import WITH_SIGMOID
from trainers.hugging_face.with_softmax import WITH_SOFTMAX

FAMILIES: tuple[Family, ...] = (*WITH_SOFTMAX, *WITH_SIGMOID, *WITH_LATENT)


def own_family(name: str | None) -> Family | None:
    """Return the user's own family that `export.family` names."""
    return None if name is None else find_row("export.family", {}, Family, name)


def family_of(model: ModelSpec, own: Family | None = None) -> Family:
    """Return the family that a model belongs to: the user's own one, if there is one, or one of the table."""
    families = FAMILIES if own is None else (own,)
    nearest = min(families, key=lambda family: len(family.misses(model)))
    if missing := nearest.misses(model):
        key, legal = missing[0]
        known = ", ".join(family.architecture for family in families)
        rule = f"is in no model that transformers knows and foldray exports ({known})"
        raise UserError(f"model.{key}", value_at(model, key), rule, list(legal))
    return nearest


def tensors_of(family: Family, model: ModelSpec) -> list[Tensor]:
    """Return all tensors of a model. Every parameter is in one of them, and every router's bias if it chooses experts.

    The routers of a dense family's models are in none.
    """
    tensors = list(family.tensors(model))
    ours = sorted(tensor.ours for tensor in tensors if not tensor.ours.endswith(".router.bias"))
    wanted = (row.name for row in parameter_table(model) if not (family.dense and row.name.endswith(".router.weight")))
    assert ours == sorted(wanted), f"{family.model_type} leaves out a parameter"
    return tensors

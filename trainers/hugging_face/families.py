"""The table of the families of models in Hugging Face's transformers that foldray's models can be told as."""

from __future__ import annotations

from foldray.blueprint import ModelSpec, parameter_table
from foldray.errors import UserError
from foldray.tables import find_row
from trainers.hugging_face.family import Family, value_at
from trainers.hugging_face.names import Tensor, columns_together, mlp
from trainers.hugging_face.with_factors import WITH_FACTORS
from trainers.hugging_face.with_latent import KIMI_AS_WRITTEN, WITH_LATENT
from trainers.hugging_face.with_sigmoid import WITH_SIGMOID
from trainers.hugging_face.with_softmax import WITH_SOFTMAX

FAMILIES: tuple[Family, ...] = (*WITH_SOFTMAX, *WITH_FACTORS, *WITH_SIGMOID, *WITH_LATENT)
_QWEN3 = next(family for family in FAMILIES if family.model_type == "qwen3_moe")
_GLM = next(family for family in FAMILIES if family.model_type == "glm4_moe")
_ARIA = next(family for family in FAMILIES if family.model_type == "aria_text")
_QWEN35 = next(family for family in FAMILIES if family.model_type == "qwen3_5_moe_text")._replace(
    model_type="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration", inside=("text_config",),
    called={"model.": "model.language_model."}, ahead=("model.visual.", "mtp."), leaves="qwen3_5_moe_text",
)  # fmt: skip
WITHIN: tuple[Family, ...] = (
    _QWEN3._replace(
        model_type="qwen3_vl_moe", architecture="Qwen3VLMoeForConditionalGeneration", block=columns_together,
        inside=("text_config",), called={"model.": "model.language_model."}, ahead=("model.visual.",), leaves="qwen3_moe",
        read=lambda config: config | {"norm_topk_prob": True},
    ),
    _QWEN3._replace(
        model_type="qwen3_omni_moe", architecture="Qwen3OmniMoeForConditionalGeneration",
        inside=("thinker_config", "text_config"), called={"model.": "thinker.model.", "lm_head.": "thinker.lm_head."},
        ahead=("thinker.audio_tower.", "thinker.visual.", "talker.", "code2wav."), leaves="qwen3_moe",
    ),
    _GLM._replace(
        model_type="glm4v_moe", architecture="Glm4vMoeForConditionalGeneration", inside=("text_config",),
        called={"model.": "model.language_model."}, ahead=("model.visual.",), leaves="glm4_moe",
        read=lambda config: config | {"use_qk_norm": False},
    ),
    _ARIA._replace(
        model_type="aria", architecture="AriaForConditionalGeneration", inside=("text_config",),
        called={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        ahead=("vision_tower.", "multi_modal_projector."), leaves="aria_text",
    ),
    _QWEN35._replace(block=mlp("shared_expert", stack=True), holds=".mlp.experts.gate_up_proj"),  # as released
    _QWEN35,  # as transformers writes it
    KIMI_AS_WRITTEN,
)  # fmt: skip
"""Families whose text models are read, or which name their tensors otherwise. They leave as one of the families above."""


def named_family(name: str | None) -> Family | None:
    """Return the family that `export.family` names: a row of the table, or the user's own one."""
    return None if name is None else find_row("export.family", {row.model_type: row for row in FAMILIES}, Family, name)


def family_of(model: ModelSpec, named: Family | None = None) -> Family:
    """Return the family that a model belongs to: the one that the recipe names, or the first of the table that has the model."""
    families = FAMILIES if named is None else (named,)
    nearest = min(families, key=lambda family: len(family.misses(model)))
    if missing := nearest.misses(model):
        key, legal = missing[0]
        known = ", ".join(family.architecture for family in families)
        rule = f"is in no model that transformers knows and foldray exports ({known})"
        raise UserError(f"model.{key}", value_at(model, key), rule, list(legal))
    return nearest


def tensors_of(family: Family, model: ModelSpec) -> list[Tensor]:
    """Return all tensors of a model without adapters. Every parameter is in one of them, and every router's bias if it chooses
    experts.

    The routers of a dense family's models are in none.
    """
    tensors = list(family.tensors(model))
    ours = sorted(tensor.ours for tensor in tensors if not tensor.ours.endswith(".router.bias"))
    wanted = (row.name for row in parameter_table(model.base) if not (family.dense and row.name.endswith(".router.weight")))
    assert ours == sorted(wanted), f"{family.model_type} leaves out a parameter"
    return tensors

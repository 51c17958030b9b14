"""What a model is: sizes and choices, validated. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foldray.activations import ACTIVATIONS, Activation, find_activation
from foldray.blueprint.block import AttentionSpec, BlockSpec, FeedForwardSpec, MixtureSpec
from foldray.blueprint.presets import PRESETS
from foldray.errors import UserError, nearest
from foldray.fold import divisors
from foldray.tables import OWN, among
from foldray.windows import FULL, LEGAL, find_window

# Far above what can be trained; but what is larger cannot even be refused in time, for some of it is counted one by one.
_MOST_LAYERS, _MOST_EXPERTS, _WIDEST, _LARGEST = 2**12, 2**14, 2**20, 2**24


Windows = Annotated[tuple[Annotated[str, among(LEGAL, find_window)], ...], Field(min_length=1, max_length=_MOST_LAYERS)]


class Strict(BaseModel):
    """A frozen section of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, str_max_length=4096)


class RouterSpec(Strict):
    """How tokens find experts, and what keeps the experts evenly used."""

    score: Literal["softmax", "sigmoid"] = Field("softmax", description="what turns router logits into scores")
    softmax: Literal["before_topk", "after_topk"] = Field(
        "after_topk", description="softmax over all experts, or over the chosen ones"
    )
    normalize: bool = Field(False, description="chosen scores are rescaled to sum to one (softmax before top-k, or sigmoid)")
    scale: float = Field(1.0, gt=0, description="factor on the chosen scores")
    balance_loss: float = Field(0.01, ge=0, description="weight of the Switch/GShard balance loss, per sequence")
    z_loss: float = Field(0.0, ge=0, description="weight of the router z-loss")
    bias_rate: float = Field(0.0, ge=0, description="step of the auxiliary-loss-free balancing bias (sigmoid scores)")
    capacity_factor: float | None = Field(
        None, gt=0, le=_MOST_EXPERTS, description="tokens per expert and sequence, over the even share; null is dropless"
    )
    drop: Literal["probability", "position"] = Field(
        "probability", description="who is dropped beyond capacity: least probable, or latest"
    )
    drop_scope: Literal["sub_sequence", "sequence"] = Field(
        "sub_sequence", description="who competes: a worker's part of a sequence, or all of it"
    )
    pad: bool = Field(False, description="pad every expert to its capacity (static shapes)")


class ModelSpec(Strict):
    """A decoder-only Transformer with Mixture-of-Experts blocks.

    Block i is a MoE block if i ≥ `dense_first` and (i − `dense_first` + 1) is a multiple of `moe_every`.
    Sizes are in elements; `vocab` may exceed the tokenizer's (padding), never fall below it.
    """

    preset: str | None = Field(None, description="a named model; every other key changes it")
    layers: int = Field(ge=1, le=_MOST_LAYERS, description="blocks")
    hidden: int = Field(ge=1, le=_WIDEST, description="width of the residual stream")
    heads: int = Field(ge=1, le=2**14, description="query heads")
    kv_heads: int = Field(ge=1, le=2**14, description="key/value heads (fewer than heads: grouped-query attention)")
    head_dim: int = Field(ge=1, le=2**14, description="size of a head; heads × head_dim is free of hidden")
    value_dim: int | None = Field(None, ge=1, le=2**14, description="width of a head's values; null is head_dim")
    windows: Windows = Field((FULL.name,), description="how far back queries see: a row for each block, again from the first one")
    ffn_hidden: int = Field(ge=1, le=_WIDEST, description="inner width of dense blocks")
    experts: int = Field(ge=1, le=_MOST_EXPERTS, description="experts in a MoE block")
    topk: int = Field(ge=1, le=_MOST_EXPERTS, description="experts per token")
    expert_hidden: int = Field(ge=1, le=_WIDEST, description="inner width of an expert")
    shared_hidden: int = Field(0, ge=0, le=_WIDEST, description="inner width of the shared expert; 0 is none")
    vocab: int = Field(ge=1, le=_LARGEST, description="rows of the embedding")
    moe_every: int = Field(1, ge=1, le=_MOST_LAYERS, description="every n-th block is a MoE block")
    dense_first: int = Field(0, ge=0, le=_MOST_LAYERS, description="leading dense blocks")
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = Field(1e-5, gt=0)
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = Field(10000.0, gt=0)
    max_positions: int = Field(2048, ge=1, le=_LARGEST, description="longest sequence with learned positions")
    ffn: Annotated[str, among((*ACTIVATIONS, OWN), find_activation)] = "gated_silu"
    tied_embeddings: bool = Field(False, description="head shares the embedding's weight")
    init_std: float = Field(0.02, gt=0)
    router: RouterSpec = RouterSpec()

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        name = str(given["preset"]).lower()
        if name not in PRESETS:
            raise UserError("model.preset", given["preset"], f"is no known model{nearest(name, PRESETS)}", PRESETS)
        base = PRESETS[name]
        router = given.get("router") or {}
        merged = {**base, **given, "preset": name}
        if isinstance(router, dict):
            merged["router"] = {**base.get("router", {}), **router}
        return merged

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.heads % self.kv_heads:
            raise UserError("model.kv_heads", self.kv_heads, f"must divide heads={self.heads}", divisors(self.heads))
        if self.positions == "rope" and self.head_dim % 2:
            raise UserError("model.head_dim", self.head_dim, "must be even with rotary positions")
        if self.topk > self.experts:
            raise UserError("model.topk", self.topk, f"must be at most experts={self.experts}")
        if self.dense_first > self.layers:
            raise UserError("model.dense_first", self.dense_first, f"must be at most layers={self.layers}")
        router = self.router
        if router.score == "sigmoid" and router.softmax != "after_topk":
            raise UserError("model.router.softmax", router.softmax, "has no meaning with score=sigmoid", ["after_topk"])
        if router.bias_rate and router.score != "sigmoid":
            raise UserError("model.router.bias_rate", router.bias_rate, "needs score=sigmoid", [0])
        if router.normalize and router.score == "softmax" and router.softmax == "after_topk":
            raise UserError("model.router.normalize", True, "a softmax after top-k sums to one already", [False])
        if router.drop_scope == "sequence" and router.capacity_factor is None:
            raise UserError("model.router.drop_scope", router.drop_scope, "needs a capacity_factor", ["sub_sequence"])
        if router.pad and router.capacity_factor is None:
            raise UserError("model.router.pad", True, "needs a capacity_factor to pad to", [False])
        return self

    @property
    def activation(self) -> Activation:
        """What stands between the products of a feed-forward network."""
        return find_activation(self.ffn)

    def is_moe(self, layer: int) -> bool:
        return layer >= self.dense_first and (layer - self.dense_first + 1) % self.moe_every == 0

    def block(self, layer: int) -> BlockSpec:
        """What a block is made of."""
        window = self.windows[layer % len(self.windows)]
        attention = AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.value_dim or self.head_dim, window)
        if not self.is_moe(layer):
            return BlockSpec(attention, FeedForwardSpec(self.ffn_hidden, self.ffn), None)
        shared = FeedForwardSpec(self.shared_hidden, self.ffn) if self.shared_hidden else None
        expert = FeedForwardSpec(self.expert_hidden, self.ffn)
        return BlockSpec(attention, None, MixtureSpec(self.experts, self.topk, expert, shared))

    def block_kind(self, layer: int) -> Literal["dense", "moe"]:
        return "moe" if self.is_moe(layer) else "dense"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.layers) if self.is_moe(layer))

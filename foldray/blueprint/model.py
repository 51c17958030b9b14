"""The validated sizes and choices of a model. No torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from foldray.activations import ACTIVATIONS, Activation, find_activation
from foldray.blueprint.block import (
    AttentionBias,
    AttentionGate,
    AttentionSpec,
    BlockSpec,
    FeedForwardSpec,
    GrowthSpec,
    LatentSpec,
    LinearKind,
    LinearSpec,
    MixtureSpec,
    QkNorm,
    RopeSpec,
    make_block,
)
from foldray.blueprint.presets import PRESETS
from foldray.blueprint.sections import (
    MOST_DEPTH,
    MOST_LAYERS,
    AdapterSpec,
    Experts,
    Heads,
    Layers,
    Positions,
    RopeScaling,
    RouterSpec,
    Strict,
    Width,
    WidthOrZero,
    check_router,
)
from foldray.errors import UserError, nearest
from foldray.fold import divisors
from foldray.tables import OWN, among
from foldray.windows import FULL, LEGAL, LINEAR, find_window

Windows = Annotated[tuple[Annotated[str, among(LEGAL, find_window)], ...], Field(min_length=1, max_length=MOST_LAYERS)]


class ModelSpec(Strict):
    """A decoder-only Transformer with Mixture-of-Experts blocks. Sizes are in elements.

    Block i is a MoE block if i ≥ `dense_first` and (i − `dense_first` + 1) is a multiple of `moe_every`. The blocks of
    multi-token prediction follow the `layers` blocks, have the next numbers, and are like the last one.
    `vocab` may exceed the tokenizer's vocabulary (padding), but never be smaller.
    """

    preset: str | None = None
    """Named model, which sets all required keys of `model` and some others; other keys in the
    recipe change it. Null starts without one."""
    layers: Layers
    """Number of blocks. Compute, parameters and activation memory grow in proportion."""
    hidden: Width
    """Width of the residual stream. It is also the width of the rows that all-to-alls carry."""
    heads: Heads
    """Number of query heads. Attention's compute grows with heads × head_dim. `fold.tp` must divide
    it."""
    kv_heads: Heads
    """Number of key/value heads; it must divide `heads`. Fewer (grouped-query attention) make keys
    and values smaller in memory and on the network. `fold.tp` must divide it, or be a multiple of
    it: then workers have copies."""
    head_dim: Heads
    """Size of a head. Keys and values grow with it. heads × head_dim may differ from `hidden`."""
    value_dim: Heads | None = None
    """Width of a head's values, where it differs from its queries and keys. Null is head_dim."""
    qk_norm: QkNorm = "none"
    """RMSNorm of queries and keys before they turn. `head` normalizes each head by itself, with one
    weight for all heads, and `turned_head` does so after they have turned; `all` normalizes all heads
    of a token together. It keeps attention's scores from growing."""
    attention_bias: AttentionBias = "none"
    """Biases of attention's products. `inputs` has them for queries, keys and values; `all` also
    has one behind the heads."""
    attention_scale: PositiveFloat | None = None
    """Factor on attention's scores. Null is 1 / √head_dim. `rope_scaling` may change it further."""
    attention_gate: AttentionGate = "none"
    """The sigmoid of a product of the block's input weighs what heads put out: each `head`, or each
    `element` (Trinity)."""
    attention_sinks: bool = False
    """Every head has a learnt score that takes a share of the softmax and adds nothing to the
    output (GPT-OSS)."""
    latent_rank: WidthOrZero = 0
    """Width of the vector from which all heads make keys and values (multi-head latent attention,
    DeepSeek-V2). The last `rope_dim` columns of a head turn, and heads share those of keys, also if
    `full_positions: none` lets none turn. 0 leaves it out."""
    latent_query_rank: WidthOrZero = 0
    """Width of the vector from which heads make queries with latent attention. 0 makes them from
    the block's input."""
    latent_norm_eps: PositiveFloat | None = None
    """Number that the norms of latent attention's vectors add before they divide. Null is
    `norm_eps`."""
    windows: Windows = (FULL.name,)
    """How far back queries see, one entry for each block; the list repeats. `full`
    sees all earlier tokens, `sliding:TOKENS` the newest ones, `chunked:TOKENS` those of its own
    chunk. Smaller windows take less time on long sequences. `linear` is linear attention (gated
    delta rule, arXiv:2412.06464), which keeps a state of fixed size in place of keys and values."""
    linear_heads: Heads | None = None
    """Number of heads of linear attention's values, states and outputs. Null is `heads`. `fold.tp`
    must divide it."""
    linear_key_heads: Heads | None = None
    """Number of heads of linear attention's queries and keys; it must divide `linear_heads`, and
    `fold.tp` must divide it. Null is `linear_heads`."""
    linear_key_dim: Heads | None = None
    """Width of a head's queries and keys in linear attention. Null is head_dim."""
    linear_value_dim: Heads | None = None
    """Width of a head's values in linear attention. Null is `linear_key_dim`."""
    linear_taps: Annotated[int, Field(ge=1, le=2**8)] = 4
    """Tokens that the convolution of linear attention's queries, keys and values sees."""
    linear_kind: LinearKind = "gated_delta"
    """Kind of linear attention. With `gated_delta`, a head's whole state decays alike (Qwen3-Next);
    with `kimi_delta`, each column of keys has a decay of its own (Kimi Linear, arXiv:2510.26692)."""
    ffn_hidden: Width
    """Inner width of the feed-forward network in dense blocks. Their compute and parameters grow
    with it."""
    experts: Experts
    """Experts per MoE block. More experts need more memory, but no more compute per token."""
    topk: Experts
    """Experts per token. The experts' compute and the bytes of all-to-alls grow in proportion."""
    expert_hidden: Width
    """Inner width of an expert. Its compute and parameters grow in proportion."""
    shared_hidden: WidthOrZero = 0
    """Inner width of the shared expert, which computes every token and needs no all-to-all. 0
    leaves it out."""
    expert_bias: bool = False
    """Biases of the experts' products, as in GPT-OSS. ETP cannot cut such experts."""
    shared_gate: bool = False
    """Every token weighs the shared expert's output with the sigmoid of a product, as in Qwen2-MoE.
    It needs `shared_hidden`."""
    vocab: Positions
    """Rows of the embedding and the output head, at least as many as the tokenizer has. Memory and
    the head's compute grow with it. `fold.tp` must divide it."""
    moe_every: Layers = 1
    """Every n-th block after `dense_first` is a MoE block. 1 makes all of them MoE blocks."""
    dense_first: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 0
    """Number of dense blocks at the start of the model. They need no all-to-all."""
    norm: Literal["rmsnorm", "zero_rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization. `layernorm` also subtracts the mean and has a bias; `rmsnorm` computes
    less. With `zero_rmsnorm`, a weight w multiplies by 1 + w, also in norms of queries and keys
    (Qwen3-Next)."""
    norms: Literal["before", "after", "both"] = "before"
    """What a block normalizes: what attention and networks take (`before`), what they add to the
    residual stream (`after`, as in OLMo 2), or `both` (Trinity)."""
    norm_eps: PositiveFloat = 1e-5
    """Number that normalization adds before it divides, against division by zero."""
    positions: Literal["rope", "learned"] = "rope"
    """How attention knows positions. `rope` rotates queries and keys; `learned` trains a vector per
    position."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotation angles; longer sequences take a larger base. With `rope_scaling` it must
    be more than 1. `learned` positions do not use it."""
    rope_dim: Annotated[int, Field(ge=2, le=2**14)] | None = None
    """Number of a head's columns that `rope` rotates, from the first one. Null rotates all of
    head_dim."""
    rope_scaling: RopeScaling | None = None
    """Slower rotations, for sequences that are longer than those of an earlier training. Null
    leaves them out."""
    full_positions: Literal["rope", "none"] = "rope"
    """How attention knows positions in blocks with the window `full`. `none` leaves them to the
    other blocks (NoPE), as in EXAONE-MoE."""
    window_rope_theta: PositiveFloat | None = None
    """Base of the rotation angles in blocks with another window than `full`, without
    `rope_scaling`. Null is that of all blocks."""
    query_growth: NonNegativeFloat = 0.0
    """Growth of queries with their position p in a document, by the factor 1 + query_growth ·
    ln(1 + ⌊p / query_growth_positions⌋), as in Mistral-Small-4. 0 leaves it out."""
    query_growth_positions: Positions = 8192
    """Positions after which queries begin to grow, and between two of their sizes."""
    rope_pairs: Literal["halves", "interleaved"] = "halves"
    """Which columns `rope` rotates together: i and i + rope_dim / 2 (`halves`, as GPT-NeoX and
    Llama in transformers), or 2i and 2i + 1 (`interleaved`, as GPT-J and ERNIE)."""
    max_positions: Positions = 2048
    """Longest sequence with `learned` positions, in tokens. `rope` does not use it."""
    ffn: Annotated[str, among((*ACTIVATIONS, OWN), find_activation)] = "gated_silu"
    """Activation of dense blocks and experts. `gated_silu` needs three matrices per network, `gelu`
    two. `gated_clamped` is GPT-OSS's: (up + 1) · gate · sigmoid(1.702 · gate), with up and gate
    within 7. `module:NAME` names an activation of your own."""
    tied_embeddings: bool = False
    """The output head shares the embedding's weight, which saves vocab × hidden parameters."""
    embedding_scale: PositiveFloat = 1.0
    """Factor on the embedding of a token (Granite)."""
    residual_scale: PositiveFloat = 1.0
    """Factor on all that attention, networks and experts add to the residual stream (Granite)."""
    logit_scale: PositiveFloat = 1.0
    """Factor on the logits of the head (Granite)."""
    mtp_depth: Annotated[int, Field(ge=0, le=MOST_DEPTH)] = 0
    """Further tokens that training predicts at every position (multi-token prediction,
    DeepSeek-V3). Each takes one more block like the last one, behind the last block, and the head
    once more. Generation and evaluation leave these blocks out."""
    mtp_weight: PositiveFloat = 0.3
    """Weight of the mean loss of all further tokens, beside the loss of the next token. DeepSeek-V3
    trains with 0.3, and with 0.1 at the end."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. Matrices that end a residual branch start
    smaller."""
    router: RouterSpec = RouterSpec()
    adapter: AdapterSpec | None = None
    """Low-rank adapters (LoRA), which training changes in place of the model's own weights. Null
    trains all weights."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        name = str(given["preset"]).lower()
        if name not in PRESETS:
            raise UserError("model.preset", given["preset"], f"is not a known model{nearest(name, PRESETS)}", PRESETS)
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
        if self.positions == "rope" and self.rope_dim is None and self.head_dim % 2:
            raise UserError("model.head_dim", self.head_dim, "must be even with rotary positions")
        if self.rope_dim is not None and (self.rope_dim % 2 or self.rope_dim > self.head_dim):
            raise UserError("model.rope_dim", self.rope_dim, f"must be even, and at most head_dim={self.head_dim}")
        self._check_latent()
        self._check_linear()
        self._check_adapter()
        if self.shared_gate and not self.shared_hidden:
            raise UserError("model.shared_gate", True, "needs a shared expert (shared_hidden)", [False])
        if self.topk > self.experts:
            raise UserError("model.topk", self.topk, f"must be at most experts={self.experts}")
        if self.dense_first > self.layers:
            raise UserError("model.dense_first", self.dense_first, f"must be at most layers={self.layers}")
        check_router(self.router, self.experts, self.topk)
        return self

    def _check_latent(self) -> None:
        if self.rope_scaling is not None and self.positions != "rope":
            raise UserError("model.rope_scaling", "given", f"has no meaning with positions={self.positions}", ["null"])
        if self.rope_scaling is not None and self.rope_theta <= 1:
            rule = "must be more than 1 with rope_scaling, which takes its logarithm"
            raise UserError("model.rope_theta", self.rope_theta, rule)
        for key in ("full_positions", "window_rope_theta"):
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default and self.positions != "rope":
                raise UserError(f"model.{key}", value, "needs positions=rope", [default or "null"])
        if not self.latent_rank:
            if self.latent_query_rank:
                raise UserError("model.latent_query_rank", self.latent_query_rank, "needs latent_rank", [0])
            if self.latent_norm_eps is not None:
                raise UserError("model.latent_norm_eps", self.latent_norm_eps, "needs latent_rank", ["null"])
            return
        if self.positions != "rope" or self.rope_dim in (None, self.head_dim):
            raise UserError("model.rope_dim", self.rope_dim, f"must be less than head_dim={self.head_dim} with latent_rank")
        for field, value, legal in (
            ("kv_heads", self.kv_heads, self.heads), ("qk_norm", self.qk_norm, "none"),
            ("attention_bias", self.attention_bias, "none"), ("attention_gate", self.attention_gate, "none"),
        ):  # fmt: skip
            if value != legal:
                raise UserError(f"model.{field}", value, "does not go with latent_rank", [legal])
        if self.norm == "zero_rmsnorm":
            raise UserError("model.norm", self.norm, "does not go with latent_rank", ["rmsnorm", "layernorm"])

    def _check_linear(self) -> None:
        if LINEAR.name not in self.windows:
            for key in ("linear_heads", "linear_key_heads", "linear_key_dim", "linear_value_dim", "linear_kind"):
                if (value := getattr(self, key)) != (default := type(self).model_fields[key].default):
                    raise UserError(f"model.{key}", value, f"needs a block with the window {LINEAR.name}", [default or "null"])
            return
        heads, key_heads = self.linear_heads or self.heads, self.linear_key_heads
        if key_heads and heads % key_heads:
            raise UserError("model.linear_key_heads", key_heads, f"must divide linear_heads={heads}", divisors(heads))

    def _check_adapter(self) -> None:
        if (adapter := self.adapter) is None:
            return
        if self.mtp_depth:
            raise UserError("model.mtp_depth", self.mtp_depth, "must be 0 with adapters (model.adapter)", [0])
        if self.router.bias_rate:
            rule = "must be 0 with adapters (model.adapter), which leave the router as it is"
            raise UserError("model.router.bias_rate", self.router.bias_rate, rule, [0])
        if adapter.attention and (self.latent_rank or LINEAR.name in self.windows):
            kind = "latent attention (latent_rank)" if self.latent_rank else f"linear attention (windows: {LINEAR.name})"
            rule = f"has no adapters for {kind}"
            raise UserError("model.adapter.targets", list(adapter.targets), rule, ["gate_up_proj", "down_proj"])
        if not adapter.attention and not self.moe_layers:
            rule = "names products of experts alone, and the model has none"
            raise UserError("model.adapter.targets", list(adapter.targets), rule, ["q_proj", "k_proj", "v_proj", "o_proj"])

    @property
    def base(self) -> ModelSpec:
        """The same model without adapters."""
        return self.model_copy(update={"adapter": None})

    @property
    def activation(self) -> Activation:
        """The activation between the two matrix products of a feed-forward network."""
        return find_activation(self.ffn)

    @property
    def all_layers(self) -> range:
        """Numbers of all blocks, with those of multi-token prediction."""
        return range(self.layers + self.mtp_depth)

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage needs the embedding, too: for its head, or for multi-token prediction."""
        return self.tied_embeddings or self.mtp_depth > 0

    @property
    def has_dense(self) -> bool:
        """Whether there is a dense block. If so, the first one is dense."""
        return not self.is_moe(0)

    @property
    def has_moe(self) -> bool:
        return any(map(self.is_moe, self.all_layers))

    def is_moe(self, layer: int) -> bool:
        layer = min(layer, self.layers - 1)
        return layer >= self.dense_first and (layer - self.dense_first + 1) % self.moe_every == 0

    def window(self, layer: int) -> str:
        """Return the name of a block's window. Blocks of multi-token prediction have that of the last block before."""
        return self.windows[min(layer, self.layers - 1) % len(self.windows)]

    def block(self, layer: int) -> BlockSpec:
        """Return the sizes and choices of a block."""
        window, mtp = self.window(layer), layer >= self.layers
        attention, after = self._attention(window), self.norms != "before"
        if not self.is_moe(layer):
            return make_block(attention, FeedForwardSpec(self.ffn_hidden, self.ffn), None, mtp, after)
        shared = FeedForwardSpec(self.shared_hidden, self.ffn) if self.shared_hidden else None
        expert = FeedForwardSpec(self.expert_hidden, self.ffn, self.expert_bias)
        return make_block(attention, None, MixtureSpec(self.experts, self.topk, expert, shared, self.shared_gate), mtp, after)

    def copies_keys(self, tp: int) -> bool:
        """Whether several of so many TP ranks have the same key/value head (`AttentionSpec.copies`)."""
        return tp > self.kv_heads

    @property
    def linear(self) -> AttentionSpec | None:
        """The attention of linear blocks; None if there is none."""
        return self._attention(LINEAR.name) if LINEAR.name in self.windows else None

    def _attention(self, window: str) -> AttentionSpec:
        """Return the attention of blocks with this window."""
        if window == LINEAR.name:
            heads, width = self.linear_heads or self.heads, self.linear_key_dim or self.head_dim
            sizes = heads, self.linear_key_heads or heads, width, self.linear_value_dim or width
            return AttentionSpec(*sizes, window, linear=LinearSpec(self.linear_taps, self.linear_kind))
        rope, scale = self._rope(window)
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.value_dim or self.head_dim,
            window,
            rope,
            self.qk_norm,
            self.attention_bias,
            LatentSpec(self.latent_query_rank, self.latent_rank, self.rope_dim or 0) if self.latent_rank else None,
            scale if self.attention_scale is None else scale * self.attention_scale * math.sqrt(self.head_dim),
            self.attention_sinks,
            GrowthSpec(self.query_growth, self.query_growth_positions) if self.query_growth else None,
            self.attention_gate,
        )

    def _rope(self, window: str) -> tuple[RopeSpec | None, float]:
        """Return the rotary positions of blocks with this window, and the factor on their scores."""
        full, scaling = window == FULL.name, self.rope_scaling
        if self.positions != "rope" or (full and self.full_positions == "none"):
            return None, 1.0
        dim, theta, interleaved = self.rope_dim or self.head_dim, self.rope_theta, self.rope_pairs == "interleaved"
        if self.window_rope_theta is not None and not full:
            return RopeSpec(dim, self.window_rope_theta, interleaved), 1.0
        if scaling is None:
            return RopeSpec(dim, theta, interleaved), 1.0
        return RopeSpec(dim, theta, interleaved, scaling.spec), scaling.scale

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the MoE blocks, with those of multi-token prediction."""
        return tuple(filter(self.is_moe, self.all_layers))

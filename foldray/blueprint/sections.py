"""The sections of a model's description: the router, scaled rotary positions, and adapters. No torch."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator

from foldray.blueprint.block import RopeKind, ScalingSpec
from foldray.errors import UserError
from foldray.fold import divisors

# These bounds are far above any model that can be trained. Checks loop over some of the sizes, so the sizes need bounds.
MOST_LAYERS, MOST_EXPERTS, WIDEST, LARGEST, MOST_DEPTH = 2**12, 2**14, 2**20, 2**24, 16

Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Experts = Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
Width = Annotated[int, Field(ge=1, le=WIDEST)]
WidthOrZero = Annotated[int, Field(ge=0, le=WIDEST)]
Positions = Annotated[int, Field(ge=1, le=LARGEST)]


class Strict(BaseModel):
    """A frozen section of a recipe. It refuses unknown keys. The text below a key is the key's description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        str_max_length=4096,
        use_attribute_docstrings=True,
    )


# Keys of scaled rotary positions that a kind needs beside its factor, and those that it does not have.
_NEEDED = {"yarn": ("original_positions",), "llama3": ("original_positions", "beta_fast"), "linear": ()}
_OF_YARN = ("truncate", "attention_factor", "mscale", "mscale_all_dim")
_FOREIGN = {"yarn": (), "llama3": _OF_YARN, "linear": ("original_positions", "beta_fast", "beta_slow", *_OF_YARN)}


class RopeScaling(Strict):
    """Rotary positions for sequences that are longer than those of an earlier training."""

    kind: RopeKind = "yarn"
    """Which pairs of columns turn more slowly. `yarn` (arXiv:2309.00071, section 3) goes from fast
    pairs to slow ones by the number of the pair, `llama3` (Llama 3.1) by its turns. With `linear`,
    all turn `factor` times as slowly."""
    factor: Annotated[float, Field(ge=1)]
    """How many times as long sequences may be."""
    original_positions: Positions | None = None
    """Tokens of a sequence in the earlier training. `linear` alone does not need it."""
    beta_fast: PositiveFloat = 32.0
    """Pairs of columns that turn more often than this within `original_positions` stay as they are.
    Llama 3.1 has 4, and `llama3` needs the key."""
    beta_slow: PositiveFloat = 1.0
    """Pairs that turn less often than this turn `factor` times as slowly; between both, it is
    linear."""
    truncate: bool = True
    """Round both bounds to whole pairs of columns."""
    attention_factor: PositiveFloat | None = None
    """Factor on cosines and sines. Null is 0.1 · ln(factor) + 1, or follows from `mscale`."""
    mscale: PositiveFloat | None = None
    """DeepSeek's weight m of the logarithm, in 0.1 · m · ln(factor) + 1. It needs
    `mscale_all_dim`."""
    mscale_all_dim: PositiveFloat | None = None
    """The same weight for whole heads. Scores get the square of this factor, and cosines and sines
    are divided by it."""

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.mscale is not None and self.mscale_all_dim is None:
            raise UserError("model.rope_scaling.mscale", self.mscale, "needs mscale_all_dim", ["null"])
        self._check_kind()
        if self.beta_fast < self.beta_slow or (self.kind == "llama3" and self.beta_fast == self.beta_slow):
            rule = "at least" if self.kind == "yarn" else "more than"
            raise UserError("model.rope_scaling.beta_fast", self.beta_fast, f"must be {rule} beta_slow={self.beta_slow:g}")
        return self

    def _check_kind(self) -> None:
        for key in _NEEDED[self.kind]:
            if key not in self.model_fields_set or getattr(self, key) is None:
                raise UserError(f"model.rope_scaling.{key}", "not given", f"must be given with kind={self.kind}")
        for key in _FOREIGN[self.kind]:
            if (value := getattr(self, key)) != (default := type(self).model_fields[key].default):
                raise UserError(f"model.rope_scaling.{key}", value, f"has no meaning with kind={self.kind}", [default])

    def _logarithm(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._logarithm(self.mscale) / self._logarithm(self.mscale_all_dim)
        return self._logarithm(1.0)

    @property
    def scale(self) -> float:
        """Factor on scores."""
        return 1.0 if self.mscale_all_dim is None else self._logarithm(self.mscale_all_dim) ** 2

    @property
    def spec(self) -> ScalingSpec:
        bounds = self.original_positions or 1, self.beta_fast, self.beta_slow
        return ScalingSpec(self.kind, self.factor, *bounds, self.truncate, self.magnitude)


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
_OF_ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}


class AdapterSpec(Strict):
    """Low-rank adapters (LoRA, arXiv:2106.09685, section 4.1). The model's own weights stay as they are: they get no gradients,
    and have no state of the optimizer. Checkpoints hold the adapters alone."""

    rank: Width = 16
    """Columns between the two matrices of an adapter (PEFT's `r`). Its parameters, and what it
    computes, grow in proportion."""
    alpha: PositiveFloat = 32.0
    """Weight of the adapters: each adds alpha / rank times its product (PEFT's `lora_alpha`)."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1, max_length=6)] = get_args(Target)
    """Products that get an adapter, by their names in transformers: those of attention, those into
    experts (gate and up together), and those out of experts. Every expert has adapters of its own."""

    @property
    def attention(self) -> tuple[str, ...]:
        """foldray's names of attention's products that have an adapter, in their order."""
        return tuple(part for name, part in _OF_ATTENTION.items() if name in self.targets)

    @property
    def inwards(self) -> bool:
        """Whether the products into experts have adapters."""
        return "gate_up_proj" in self.targets

    @property
    def outwards(self) -> bool:
        """Whether the products out of experts have adapters."""
        return "down_proj" in self.targets

    @property
    def scale(self) -> float:
        """Factor on what an adapter adds."""
        return self.alpha / self.rank


BalanceScope = Literal["sequence", "batch", "global_batch"]
BiasUpdate = Literal["sign", "centered", "proportional", "quantile"]


class RouterSpec(Strict):
    """How the router chooses experts for a token, and what keeps the experts evenly used."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into scores. `sigmoid` scores every expert by
    itself."""
    softmax: Literal["before_topk", "after_topk"] = "after_topk"
    """Where the softmax runs: over all experts before top-k, or over the chosen experts after
    it."""
    normalize: bool = False
    """Rescale the weights of a token's experts to a sum of 1. It needs `softmax: before_topk` or
    `score: sigmoid`."""
    scale: PositiveFloat = 1.0
    """Factor on the weights of the chosen experts."""
    groups: Experts = 1
    """Groups of neighbouring experts. A token chooses among the experts of `topk_groups` of them
    (DeepSeek-V3). With `score: sigmoid`, the two best experts of a group decide, otherwise the best
    one."""
    topk_groups: Experts = 1
    """Groups that a token chooses its experts from."""
    balance_loss: NonNegativeFloat = 0.01
    """Weight of the balance loss (Switch, GShard). A larger weight spreads tokens more evenly, which
    makes the busiest worker faster. 0 turns it off."""
    balance_scope: BalanceScope = "sequence"
    """Tokens whose assignments the balance loss counts: those of each sequence, those of the
    micro-batches with the same number on all workers (`batch`), or those of the optimizer step
    before (`global_batch`, arXiv:2501.11873). A wider scope lets experts specialise in kinds of
    text."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the router's z-loss, which keeps its logits small. 0 turns it off."""
    logit_bias: bool = False
    """A learnt bias on the router's logits, as in GPT-OSS."""
    selection_bias: bool = False
    """A bias on the scores takes part in the choice of experts, but not in their weights. With
    `score: sigmoid` it always does; with a softmax it needs `softmax: before_topk`."""
    bias_rate: NonNegativeFloat = 0.0
    """Change per optimizer step of the bias that balances experts without a loss. It needs `score:
    sigmoid` or `selection_bias`. 0 turns it off."""
    bias_update: BiasUpdate = "sign"
    """How the bias of an expert moves: by the rate, whatever the expert lacks (`sign`, DeepSeek-V3);
    likewise, but so that the mean of all biases stays (`centered`); by the rate times what it lacks,
    over the even share (`proportional`, arXiv:2408.15664); or by the rate, at most 1, towards the
    bias that would have made the step even (`quantile`, Kimi K3)."""
    capacity_factor: Annotated[float, Field(gt=0, le=MOST_EXPERTS)] | None = None
    """Tokens that an expert takes of a sequence, over its even share; it drops further tokens. A
    lower factor bounds the time and memory of the busiest expert. Null drops no token."""
    drop: Literal["probability", "position"] = "probability"
    """Which tokens an expert drops beyond its capacity: the least probable, or the latest. With
    `probability`, every piece of a sequence has a capacity of its own."""
    drop_scope: Literal["sub_sequence", "sequence"] = "sub_sequence"
    """Which tokens compete for capacity: those of one worker, or those of the whole sequence.
    `sequence` drops the same tokens under every fold, and communicates more."""
    pad: bool = False
    """Fill every expert up to its capacity with rows of zeros. Shapes are then static and no row
    counts travel, but the zeros cost time and traffic."""
    skew: Annotated[float, Field(ge=0, le=16)] | None = None
    """Choose the experts of each token by a pattern instead of by their scores, to measure an
    uneven routing. The share of expert e (from 0) is proportional to (e + 1)^−skew (Zipf's law),
    but no more than all tokens. 0 is even. `foldray train` needs null."""
    shares: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(max_length=MOST_EXPERTS)] | None = None
    """The same with any shares: the share of all tokens for each expert, which sum to `topk`, such as
    recorded ones (`--routes`). It cannot be combined with `skew`."""


def check_router(router: RouterSpec, experts: int, topk: int) -> None:
    """Raise a UserError for a router that cannot be, or cannot choose among so many experts."""
    if experts % router.groups:
        raise UserError("model.router.groups", router.groups, f"must divide experts={experts}", divisors(experts))
    if router.topk_groups > router.groups or topk > router.topk_groups * (experts // router.groups):
        rule = f"must be at most groups={router.groups}, and have at least topk={topk} experts together"
        raise UserError("model.router.topk_groups", router.topk_groups, rule)
    if router.groups > 1 and router.score == "softmax" and router.softmax == "after_topk":
        raise UserError("model.router.groups", router.groups, "needs score=sigmoid or softmax=before_topk", [1])
    if router.score == "sigmoid" and router.softmax != "after_topk":
        raise UserError("model.router.softmax", router.softmax, "has no meaning with score=sigmoid", ["after_topk"])
    if router.selection_bias and router.score == "softmax" and router.softmax == "after_topk":
        raise UserError("model.router.selection_bias", True, "needs score=sigmoid or softmax=before_topk", [False])
    if router.bias_rate and router.score != "sigmoid" and not router.selection_bias:
        raise UserError("model.router.bias_rate", router.bias_rate, "needs score=sigmoid or selection_bias=true", [0])
    if router.balance_scope != "sequence" and not router.balance_loss:
        raise UserError("model.router.balance_scope", router.balance_scope, "needs balance_loss above 0", ["sequence"])
    if router.bias_update != "sign" and not router.bias_rate:
        raise UserError("model.router.bias_update", router.bias_update, "needs bias_rate above 0", ["sign"])
    if router.bias_update == "quantile":
        others = [rule for rule in get_args(BiasUpdate) if rule != "quantile"]
        if router.bias_rate > 1:
            raise UserError("model.router.bias_rate", router.bias_rate, "must be at most 1 with bias_update=quantile", ["0…1"])
        if router.groups > 1:
            raise UserError("model.router.bias_update", "quantile", f"needs groups=1, not {router.groups}", others)
        if topk == experts:
            raise UserError("model.router.bias_update", "quantile", f"needs more than topk={topk} experts", others)
    if router.normalize and router.score == "softmax" and router.softmax == "after_topk":
        raise UserError("model.router.normalize", True, "a softmax after top-k sums to one already", [False])
    if router.drop_scope == "sequence" and router.capacity_factor is None:
        raise UserError("model.router.drop_scope", router.drop_scope, "needs a capacity_factor", ["sub_sequence"])
    if router.pad and router.capacity_factor is None:
        raise UserError("model.router.pad", True, "needs a capacity_factor to pad to", [False])
    if router.shares is not None:
        if router.skew is not None:
            raise UserError("model.router.skew", router.skew, "cannot be combined with shares", ["null"])
        if len(router.shares) != experts or not math.isclose(sum(router.shares), topk, rel_tol=1e-6):
            rule = f"must have a share for each of {experts} experts, and sum to topk={topk}"
            what = f"{len(router.shares)} shares with the sum {sum(router.shares):g}"
            raise UserError("model.router.shares", what, rule)

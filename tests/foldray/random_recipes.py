"""Draws random legal recipes over model, fold, schedule and engine, and shrinks a recipe that fails."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from foldray.errors import UserError
from foldray.fold import divisors
from foldray.recipe import Recipe
from tests.foldray.folds import legal_folds
from tests.optional import has_tutel

TRIES = 400  # most draws break a rule


class Case(NamedTuple):
    """A recipe, and properties of the batches that a recipe does not have (`parity.batches`).

    Args:
        documents: whether attention stops at document boundaries.
        masked: whether some targets do not count.
        replayed: whether batches bring experts.
        weighted: whether the losses of tokens have factors.
    """

    recipe: Recipe
    documents: bool
    masked: bool
    replayed: bool = False
    weighted: bool = False

    @property
    def options(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in self._fields[1:]}


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    for _ in range(TRIES):
        given = _sections(chance)
        try:
            recipe, documents, masked = Recipe.parse(given), chance.random() < 0.3, chance.random() < 0.3
        except UserError:
            continue
        if not _ties(recipe):
            case = Case(recipe, documents and not _drops_the_improbable(recipe), masked)
            return _with_more(case, random.Random(seed))  # whose draws change no other
    raise AssertionError(f"no legal recipe in {TRIES} draws of seed {seed}")


def _with_more(case: Case, chance: random.Random) -> Case:
    """Return a case with some further keys and properties, each if the rules let it join the others."""
    for section, keys in _more(chance, case.recipe):
        given = case.recipe.model_dump(exclude_unset=True)
        try:
            recipe = Recipe.parse({**given, section: {**given.get(section, {}), **keys}})
        except UserError:
            continue
        if not _ties(recipe):
            case = case._replace(recipe=recipe)
    replays = chance.random() < 0.15 and case.recipe.moe.backend == "torch" and not _drops_the_improbable(case.recipe)
    return case._replace(replayed=replays, weighted=chance.random() < 0.15)


def _more(chance: random.Random, recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield sections with further keys."""
    heads = chance.choice([2, 4])
    linear = {  # a norm behind would divide by the small outputs of first tokens, and make rounding errors large
        "windows": chance.choice([["linear"], ["linear", "full"], ["linear", "linear", "sliding:5"]]), "linear_heads": heads,
        "linear_key_heads": chance.choice([heads, heads // 2]), "linear_key_dim": 4, "norms": "before",
        "linear_value_dim": chance.choice([4, 6]), "linear_taps": chance.choice([1, 2, 4]),
    }  # fmt: skip
    stages, layers = recipe.placed_fold.pp * recipe.schedule.virtual_stages, recipe.model.layers
    borders = [0, *sorted(chance.sample(range(1, layers), stages - 1)), layers] if stages <= layers else [0, layers]
    for likely, section, keys in (
        (0.25, "model", linear),
        (0.3, "model", {"linear_kind": "kimi_delta", "linear_key_heads": heads}),
        (0.15, "model", {"norm": "zero_rmsnorm"}),
        (0.3, "schedule", {"stage_layers": [stop - start for start, stop in itertools.pairwise(borders)]}),
        (0.3, "schedule", {"context": "all_gather"}),
        (0.3, "schedule", {"alive": chance.choice([1, 2, 3])}),
        (0.15, "engine", {"offload": "optimizer"}),
        (0.3, "moe", {"copies": chance.choice([1, 2])}),
    ):
        if chance.random() < likely:
            yield section, keys


def _ties(recipe: Recipe) -> bool:
    """Whether rounding alone may decide which tokens experts drop."""
    return _drops_the_improbable(recipe) and _repeats(recipe)


def _drops_the_improbable(recipe: Recipe) -> bool:
    """Whether scores decide about drops. Then equal tokens that start documents would tie, and rounding would decide."""
    return recipe.model.router.capacity_factor is not None and recipe.model.router.drop == "probability"


def _repeats(recipe: Recipe) -> bool:
    """Whether equal tokens at two positions may have the same hidden state, because they see the same tokens before them.

    Without positions, that is so where both see the same tokens equally often. With positions and all tokens in mask, only a
    sequence that begins with equal tokens has such positions; `parity.sample` makes none.
    """
    model = recipe.model
    return model.full_positions == "none" or (model.positions == "rope" and any(window != "full" for window in model.windows))


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 60) -> Case:
    """Leave out keys one by one that the failure does not need. `tries` limits how often the smaller case runs."""
    for smaller in _smaller(case):
        if tries == 0:
            break
        tries -= 1
        if fails(smaller):
            return shrink(smaller, fails, tries)
    return case


def _smaller(case: Case) -> Iterator[Case]:
    given = case.recipe.model_dump(exclude_unset=True)
    for section, keys in given.items():
        for key in keys if isinstance(keys, dict) else ():
            if key not in _NEEDED:
                left = {**given, section: {name: value for name, value in keys.items() if name != key}}
                try:
                    yield case._replace(recipe=Recipe.parse(left))
                except UserError:
                    continue
    for name, has in case.options.items():
        if has:
            yield case._replace(**{name: False})


_NEEDED = {
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "experts", "topk", "expert_hidden", "vocab", "init_std",
    "workers", "steps", "global_batch", "seq_len", "kind", "lr", "router", "attention",
}  # fmt: skip


def _sections(chance: random.Random) -> dict[str, Any]:
    workers = chance.choice([1, 2, 2, 4, 4, 4])
    fold = chance.choice(list(legal_folds(workers)))
    engine = {"kind": chance.choice(["torch", "torch", "deepspeed"]), "zero": chance.choice([0, 1, 2])}
    backend = chance.choice(["torch", "torch", "tutel", "deepspeed"])
    if backend == "tutel" and not has_tutel():
        backend = "torch"
    precision = "float64" if engine["kind"] == "torch" and backend != "tutel" else "float32"
    micro_batch = chance.choice([1, 2, 4])
    schedule, layers = _schedule(chance), chance.choice([1, 2, 3, 4])
    if fold.get("pp", 1) > 1:
        schedule["virtual_stages"] = chance.choice([1, 1, 2])
        layers = max(layers, fold["pp"] * schedule["virtual_stages"])
    model = _model(chance, layers)
    placement: dict[str, Any] = {}
    if workers > 1 and chance.random() < 0.25:
        placement, sizes = _placement(chance, workers)
        fold, backend = sizes, "torch" if backend == "tutel" else backend
        schedule = {key: value for key, value in schedule.items() if key not in ("lag", "backward_lag", "offload")}
        schedule |= {"kind": chance.choice(["af_pipe", "af_pipe", "list"]), "degree": chance.choice([1, 1, 2, 4]), "ahead": None}
        model["router"].pop("pad", None)
    if schedule.get("degree", 1) > 1 and model["router"].get("drop") == "probability":
        model["router"]["drop"] = "position"  # with probability, each piece would have its own capacity
    found: dict[str, Any] = {
        **({"placement": placement} if placement else {}),
        "model": model,
        "data": {"seq_len": chance.choice([8, 16, 24, 32])},
        "fold": fold | ({"order": "cp-tp-dp-pp"} if chance.random() < 0.2 else {}),
        "cluster": {"workers": workers},
        "training": {"steps": 2, "global_batch": chance.choice([4, 8, 12]), "micro_batch": micro_batch},
        "optimizer": _optimizer(chance, engine["kind"]),
        "engine": engine,
        "precision": precision,
        "moe": {"experts": chance.choice(["loop", "grouped"]), "backend": backend},
        "schedule": schedule,
    }
    once = backend != "tutel" and not model["router"].get("pad")
    found["moe"]["dispatch"] = chance.choice(["assignment", "rank"]) if once else "assignment"
    if found["moe"]["dispatch"] == "rank" or placement:
        found["fold"]["ep_inside"] = chance.choice(divisors(fold.get("ep", 1)))
    return found


def _placement(chance: random.Random, workers: int) -> tuple[dict[str, int], dict[str, int]]:
    """Draw workers of their own for the experts, and the sizes of both halves."""
    attention = chance.randint(1, workers - 1)
    halves = []
    for ranks in (attention, workers - attention):
        sizes = [divisors(ranks)] * 3
        halves.append(chance.choice([each for each in itertools.product(*sizes) if ranks % math.prod(each) == 0]))
    (tp, cp, pp), (ep, etp, expert_pp) = halves
    placement = {"attention": attention, "experts": workers - attention, "expert_pp": expert_pp}
    return placement, {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}


def _model(chance: random.Random, layers: int) -> dict[str, Any]:
    experts, heads = chance.choice([2, 4, 6, 8]), chance.choice([2, 4, 8])
    score, capacity = chance.choice(["softmax", "sigmoid"]), chance.choice([None, None, 0.75, 1.25])
    softmax = chance.choice(["before_topk", "after_topk"]) if score == "softmax" else "after_topk"
    router: dict[str, Any] = {
        "score": score, "softmax": softmax, "balance_loss": chance.choice([0.0, 0.1]), "z_loss": chance.choice([0.0, 0.01]),
        "normalize": softmax == "before_topk" and chance.random() < 0.5, "scale": chance.choice([1.0, 2.5]),
        "selection_bias": softmax == "before_topk" and chance.random() < 0.3, "logit_bias": chance.random() < 0.3,
        "capacity_factor": capacity,
    }  # fmt: skip
    router["bias_rate"] = chance.choice([0.0, 0.05]) if score == "sigmoid" or router["selection_bias"] else 0.0
    if capacity is not None:
        router |= {"drop": chance.choice(["probability", "position"]), "drop_scope": "sequence", "pad": chance.random() < 0.5}
    own = random.Random(repr(router))  # the keys that follow change no draw
    if router["balance_loss"]:
        router["balance_scope"] = own.choice(["sequence", "batch", "global_batch"])
    if router["bias_rate"]:
        router["bias_update"] = own.choice(["sign", "centered", "proportional"])
    shared, latent = chance.choice([0, 8]), chance.random() < 0.25
    if (experts > 2 and softmax == "before_topk") or score == "sigmoid":
        router["groups"] = chance.choice([1, 1, 2])
        router["topk_groups"] = chance.randint(1, router["groups"])
    if router["bias_rate"] and experts > 2 and router.get("groups", 1) == 1 and own.random() < 0.25:
        router["bias_update"] = "quantile"
    stretched = {"factor": 4.0, "original_positions": 8, "beta_fast": 2.0, "beta_slow": 0.5}
    scaled = stretched | {"mscale": 1.0, "mscale_all_dim": 1.0}
    more: dict[str, Any] = {"rope_scaling": chance.choice([None, None, stretched, scaled])}
    if latent:
        more |= {"latent_rank": 10, "latent_query_rank": chance.choice([0, 6]), "kv_heads": heads, "rope_dim": 2}
        more |= {"qk_norm": "none", "attention_bias": "none", "positions": "rope", "attention_gate": "none"}
        more["latent_norm_eps"] = chance.choice([None, 1e-2])
    return {
        "shared_gate": shared > 0 and chance.random() < 0.5,
        "attention_sinks": chance.random() < 0.3, "expert_bias": chance.random() < 0.3,
        "qk_norm": chance.choice(["none", "none", "head", "all"]),
        "attention_bias": chance.choice(["none", "none", "inputs", "all"]), "rope_dim": chance.choice([None, None, 2]),
        "rope_pairs": chance.choice(["halves", "interleaved"]), "layers": layers,
        "hidden": chance.choice([8, 12, 16]), "heads": heads,
        "kv_heads": chance.choice([heads, heads // 2, 1]), "head_dim": chance.choice([4, 6]),
        "value_dim": chance.choice([None, None, 2, 8]),
        "windows": chance.choice([["full"], ["full"], ["sliding:5", "full"], ["chunked:6"]]),
        "ffn_hidden": chance.choice([8, 24]), "experts": experts, "topk": chance.randint(1, min(3, experts)),
        "expert_hidden": chance.choice([4, 16]), "shared_hidden": shared, "vocab": chance.choice([16, 32]),
        "moe_every": chance.choice([1, 1, 2]), "dense_first": chance.choice([0, 0, 1]) if layers > 1 else 0,
        "norm": chance.choice(["rmsnorm", "layernorm"]),
        "positions": chance.choice(["rope", "rope", "learned"]), "max_positions": 32,
        "ffn": chance.choice(["gated_silu", "gelu", "gated_clamped"]), "tied_embeddings": chance.random() < 0.3,
        "mtp_depth": chance.choice([0, 0, 1, 2]), "mtp_weight": chance.choice([0.3, 1.0]),
        "init_std": 0.3, "router": router, **_newer(chance), **more,
    }  # fmt: skip


def _newer(chance: random.Random) -> dict[str, Any]:
    """Return gates, norms behind, factors, and positions by window."""
    return {
        "attention_gate": chance.choice(["none", "none", "head", "element"]), "norms": chance.choice(["before", "after", "both"]),
        "full_positions": chance.choice(["rope", "rope", "none"]), "window_rope_theta": chance.choice([None, None, 50.0]),
        "attention_scale": chance.choice([None, None, 0.3]), "embedding_scale": chance.choice([1.0, 3.0]),
        "residual_scale": chance.choice([1.0, 1.0, 0.4]), "logit_scale": chance.choice([1.0, 0.5]),
        "query_growth": chance.choice([0.0, 0.0, 0.3]), "query_growth_positions": chance.choice([3, 8]),
    }  # fmt: skip


def _schedule(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(["sequential", "moe_only", "aaam", "one_a_one_m", "stream", "flow", "weave", "list"])
    schedule: dict[str, Any] = {"kind": kind}
    if kind != "sequential":
        schedule["degree"] = chance.choice([1, 2, 4])
        schedule["slicing"] = chance.choice(["token_uniform", "time_uniform"])
        schedule["attention_degree"] = chance.choice([None, None, 1, 2])
        if kind == "stream":
            schedule |= {"lag": chance.choice([1, 2, "auto"]), "backward_lag": chance.choice([1, 3, "auto"])}
        if chance.random() < 0.2:
            schedule["batch_degree"] = 2
    if kind == "list":
        schedule["ahead"] = chance.choice([None, 0, 2])
    schedule["weight_gradients"] = chance.choice(["together", "apart", "whole"])
    schedule["reduction"] = chance.choice(["end", "buckets", "chunks"])
    if schedule["reduction"] != "end":
        schedule["sp_bytes"] = chance.choice([512, 3000, 100_000])
    if chance.random() < 0.2:
        schedule["recompute"] = chance.choice([["attention"], ["expert"], ["attention", "expert", "ffn", "shared"]])
    own = random.Random(repr(schedule))  # whose draws change no other
    if own.random() < 0.3:
        kinds = [kind for kind in ("attention", "expert", "ffn", "shared") if kind not in schedule.get("recompute", [])]
        schedule["offload"] = [kind for kind in kinds if own.random() < 0.6]
    return schedule


def _optimizer(chance: random.Random, engine: str) -> dict[str, Any]:
    both = {"weight_decay": chance.choice([0.0, 0.1]), "clip": chance.choice([None, 0.5]), "decay": "constant"}
    if engine == "deepspeed" or chance.random() < 0.5:
        return {"kind": "sgd", "lr": 1.0, "momentum": chance.choice([0.0, 0.9]), **both}
    if chance.random() < 0.5:
        return {"kind": "adamw", "lr": 0.01, "eps": 1e-3, **both}
    own = {"nesterov": chance.random() < 0.7, "ns_steps": chance.choice([1, 5]), "momentum": chance.choice([0.5, 0.95])}
    own |= {"adjust_lr": chance.choice(["original", "match_rms_adamw"]), "adamw_lr": chance.choice([None, 0.002])}
    return {"kind": "muon", "lr": 0.02, "eps": 1e-3, **own, **both}

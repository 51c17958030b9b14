"""The recipe: a description that keeps the rules between its keys.

A broken rule raises a UserError that names field, value, rule and legal values.
"""

from __future__ import annotations

from pydantic import model_validator

from foldray.blueprint import check_length, count_by_cut
from foldray.errors import UserError, multiples_near
from foldray.fold import divisors, nearest_folds
from foldray.graph import PipelineGraph, Slicing
from foldray.orders import AF_PIPE, AUTO, LIST, OVERLAPS, check_pipeline, overlap_kind
from foldray.recipe.bounds import MOST_SETTINGS
from foldray.recipe.data import check_data
from foldray.recipe.description import Description
from foldray.recipe.engine import check_engine
from foldray.recipe.sections import OptimizerSpec

_WRITTEN: dict[object, str] = {None: "null", True: "true"}
_MOST_PARAMETERS, _MOST_EXPERTS, _MOST_CHUNKS = 10**14, 2**18, 2**20


class Recipe(Description):
    """One training, fully described: the description that train, plan, tune, verify, bench and submit read.

    Raises:
        UserError: from `load` and `parse`, with the field, the value, the rule and the legal values.
    """

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        _check_size(self)
        _check_placement(self)
        _check_workers(self)
        _check_fold(self)
        _check_batch(self)
        _check_schedule(self)
        _check_data(self)
        _check_backend(self)
        _check_engine(self)
        check_engine(self)
        _check_space(self)
        _check_export(self)
        return self


def _check_size(recipe: Description) -> None:
    """Refuse very large models first, because the later checks count parameters, experts and chunks one by one."""
    model, fold, sp_bytes = recipe.model, recipe.fold, recipe.schedule.sp_bytes
    outside, inside = count_by_cut(model)
    if outside + inside > _MOST_PARAMETERS:
        raise UserError("model", f"{outside + inside:.2g} parameters", f"must have at most {_MOST_PARAMETERS:.0e}")
    if (experts := len(model.moe_layers) * model.experts) > _MOST_EXPERTS:
        rule = f"makes {experts} experts in all blocks; at most {_MOST_EXPERTS} are allowed"
        raise UserError("model.experts", model.experts, rule)
    expert_pp = (recipe.placement and recipe.placement.expert_pp) or fold.pp
    elements = outside // (fold.tp * fold.pp) + inside // (fold.ep * fold.etp * expert_pp)
    if isinstance(sp_bytes, int) and (chunks := 4 * elements // sp_bytes) > _MOST_CHUNKS:
        rule = f"cuts a worker's gradients into {chunks} chunks; at most {_MOST_CHUNKS} are allowed"
        raise UserError("schedule.sp_bytes", sp_bytes, rule, [f"{-(-4 * elements // _MOST_CHUNKS)}…"])


def _check_placement(recipe: Description) -> None:
    """Check what only holds for experts with workers of their own, and that their kind of schedule has such workers."""
    placement, kind = recipe.placement, recipe.schedule.kind
    if placement is None:
        if overlap_kind(kind).order is None:
            rule = "is for experts with workers of their own; it needs the section placement"
            raise UserError("schedule.kind", kind, rule, OVERLAPS)
        return
    workers, attention, experts = recipe.cluster.workers, placement.attention, placement.experts
    if attention + experts != workers:
        rule = f"attention + experts must be cluster.workers={workers}"
        raise UserError("placement", f"{attention} + {experts}", rule)
    for key, value in (("kind", kind), ("backward", recipe.schedule.backward)):
        if value is not None and not overlap_kind(value).for_placement:
            rule = "orders workers that have both attention and experts; with placement, the whole step has one order"
            raise UserError(f"schedule.{key}", value, rule, [AF_PIPE.name, LIST.name])
    for key in ("attention_adapters", "expert_adapters"):
        if (names := getattr(placement, key)) is not None and not recipe.cluster.gpu:
            rule = "are for NCCL; workers without GPUs communicate over gloo (cluster.gpu)"
            raise UserError(f"placement.{key}", list(names), rule, ["null"])
    if recipe.moe.backend == "tutel":
        rule = "Tutel's kernels copy the rows of workers that have both attention and experts; placement needs other kernels"
        raise UserError("moe.backend", recipe.moe.backend, rule, ["torch", "deepspeed"])
    if recipe.model.router.pad:
        raise UserError("model.router.pad", "true", "experts with workers of their own get no padding", ["false"])


def _check_workers(recipe: Description) -> None:
    least, workers = recipe.cluster.min_workers, recipe.cluster.workers
    if least is None:
        return
    if least > workers:
        raise UserError("cluster.min_workers", least, f"must be at most cluster.workers={workers}", [f"1 to {workers}"])
    if recipe.placement is not None:
        rule = "works for workers that have both attention and experts; with placement, training waits for all workers"
        raise UserError("cluster.min_workers", least, rule, ["null"])
    if (placement := recipe.cluster.placement).startswith("STRICT"):
        rule = "cannot hold for every number of workers down to cluster.min_workers, which go wherever there is room"
        raise UserError("cluster.placement", placement, rule, ["PACK", "SPREAD"])


def _check_fold(recipe: Description) -> None:
    workers, sizes, placement = recipe.cluster.workers, recipe.fold, recipe.placement
    try:
        fold = recipe.placed_fold
    except UserError as error:
        if error.field in ("order", "moe_order", "ep_inside"):
            raise UserError(f"fold.{error.field}", error.value, error.rule, error.legal) from None
        wanted = sizes.model_dump(include={"tp", "cp", "pp", "ep", "etp"})
        if placement is not None:
            wanted["expert_pp"] = placement.expert_pp or sizes.pp
        near = nearest_folds(workers, wanted, placement.experts if placement else 0)
        options = "; ".join(" ".join(f"{axis}={option[axis]}" for axis in option if axis != "expert_ranks") for option in near)
        rule = f"{error.rule} (cluster.workers); nearest legal folds: {options}"
        raise UserError("fold", error.value, rule, error.legal) from None
    if sizes.ep_inside > 1 and placement is None and recipe.moe.dispatch != "rank":
        raise UserError("fold.ep_inside", sizes.ep_inside, "sends a token once to each node; it needs moe.dispatch: rank", [1])
    _ = recipe.ownership  # making it checks the fold, also where Python runs no assertions
    check_length(recipe.data.seq_len, fold.cp, fold.tp)


def _check_schedule(recipe: Description) -> None:
    pipeline = PipelineGraph(recipe.fold.pp, recipe.accumulation, recipe.schedule.virtual_stages)
    if recipe.placement is None:
        check_pipeline(pipeline)
    schedule = recipe.schedule
    for key in ("degree", "batch_degree"):
        if not overlap_kind(schedule.kind).cuts and (value := getattr(schedule, key)) > 1:
            auto = schedule.kind == AUTO.name
            why = "lets training choose; name a kind to set it" if auto else "cuts nothing; choose a kind that overlaps"
            raise UserError(f"schedule.{key}", value, f"kind={schedule.kind} {why}", [1])
    if schedule.backward is not None and not overlap_kind(schedule.backward).cuts:
        raise UserError("schedule.backward", schedule.backward, "cuts nothing; choose a kind that overlaps", ["null"])
    forward, back = overlap_kind(schedule.kind), schedule.backward and overlap_kind(schedule.backward)
    if back and any(row.weaves or row.found for row in (forward, back)):
        rule = f"{schedule.kind if forward.weaves or forward.found else back.name} orders both directions"
        raise UserError("schedule.backward", schedule.backward, rule, ["null"])
    if schedule.ahead is not None and not forward.found:
        raise UserError("schedule.ahead", schedule.ahead, f"has no meaning with kind={schedule.kind}, only with list", ["null"])
    if schedule.alive is not None and schedule.kind != AF_PIPE.name:
        rule = f"has no meaning with kind={schedule.kind}, only with {AF_PIPE.name}"
        raise UserError("schedule.alive", schedule.alive, rule, ["null"])
    if recipe.training.micro_batch % schedule.batch_degree:
        rule = f"must divide training.micro_batch={recipe.training.micro_batch}, which it cuts"
        raise UserError("schedule.batch_degree", schedule.batch_degree, rule, divisors(recipe.training.micro_batch))
    if schedule.batch_degree > 1 and recipe.model.router.balance_scope == "batch":
        rule = "cuts micro-batches, and model.router.balance_scope=batch counts whole ones"
        raise UserError("schedule.batch_degree", schedule.batch_degree, rule, [1])
    if schedule.sp_bytes is not None and schedule.reduction == "end":
        rule = "has no meaning with reduction=end, which reduces whole buffers"
        raise UserError("schedule.sp_bytes", schedule.sp_bytes, rule, ["null"])
    if schedule.sp_bytes == "auto" and schedule.reduction != "chunks":
        raise UserError("schedule.sp_bytes", "auto", "needs reduction=chunks", ["null", "a number of bytes"])
    if schedule.degrees is not None:
        _check_degrees(recipe)
    _check_pieces(recipe)


def _check_pieces(recipe: Description) -> None:
    schedule, router, ranks = recipe.schedule, recipe.model.router, recipe.fold.cp * recipe.fold.tp
    slicing, fewer, uncut = recipe.slicing, schedule.attention_degree or 1, "has no meaning with degree=1, which cuts nothing"
    if fewer > 1 and (slicing is None or not overlap_kind(schedule.kind).cuts_attention):
        rule = f"kind={schedule.kind} does not cut attention" if slicing else uncut
        raise UserError("schedule.attention_degree", fewer, rule, ["null", 1])
    if slicing is None:
        if schedule.slices is not None:
            raise UserError("schedule.slices", list(schedule.slices), uncut, ["null"])
        if schedule.backward is not None and schedule.batch_degree == 1:
            rule = "has no meaning with degree=1 and batch_degree=1, which cut nothing"
            raise UserError("schedule.backward", schedule.backward, rule, ["null"])
        return
    if schedule.slices is not None:
        _check_slices(recipe, slicing)
    if router.capacity_factor is not None and router.drop_scope == "sequence":
        if router.drop == "probability":
            rule = "drop=probability with drop_scope=sequence needs an uncut sequence; model.router.drop=position does not"
            raise UserError("schedule.degree", schedule.degree, rule, [1])
        if ranks > 1 and slicing.attention != slicing.moe:
            rule = "dropping the latest tokens of whole sequences needs equal slices where ranks share a sequence (tp, cp)"
            if slices := recipe.ordering.fewer_slices:
                raise UserError("schedule.attention_degree", slices, f"{rule}, as many as pieces", ["null"])
            raise UserError("schedule.slicing", schedule.slicing, rule, ["token_uniform"])


def _check_degrees(recipe: Description) -> None:
    degrees = list(recipe.schedule.degrees or ())
    if recipe.schedule.slices is not None:
        raise UserError("schedule.degrees", degrees, "cannot be combined with slices, which have one degree", ["null"])
    for degree in degrees:
        try:
            recipe.at_degree(degree)
        except UserError as error:
            rule = f"has {degree}, which is illegal: {error.field}: {error.rule}"
            raise UserError("schedule.degrees", degrees, rule) from None


def _check_slices(recipe: Description, slicing: Slicing) -> None:
    slices, length = list(recipe.schedule.slices or ()), recipe.data.seq_len
    degree = recipe.schedule.attention_degree or recipe.schedule.degree
    unit, legal = recipe.slice_unit, ["null", list(recipe.cut("time_uniform", degree).attention)]
    if not overlap_kind(kind := recipe.schedule.kind).cuts_attention:
        raise UserError("schedule.slices", slices, f"kind={kind} does not cut attention", ["null"])
    if len(slices) != degree or sum(slices) != length or min(slices) < 1 or any(tokens % unit for tokens in slices):
        multiples = f"multiples of {unit}" if unit > 1 else "at least 1"
        rule = f"must be {degree} lengths, {multiples}, that sum to seq_len={length}"
        raise UserError("schedule.slices", slices, rule, legal)
    if not slicing.supplies():
        rule = f"the first j slices must hold the tokens of the first j MoE micro-batches {list(slicing.moe)}, for every j"
        raise UserError("schedule.slices", slices, rule, legal)


def _check_batch(recipe: Description) -> None:
    training, dp = recipe.training, recipe.placed_fold.dp
    unit, batch = dp * training.micro_batch, training.global_batch
    if batch % unit and (recipe.cluster.min_workers is None or recipe.model.router.pad):
        rule = f"must be a multiple of dp × micro_batch = {dp} × {training.micro_batch}"
        raise UserError("training.global_batch", batch, rule, multiples_near(batch, unit))
    if training.stop_after is not None and training.stop_after > training.steps:
        raise UserError("training.stop_after", training.stop_after, f"must be at most steps={training.steps}")
    if recipe.optimizer.warmup_steps > training.steps:
        raise UserError("optimizer.warmup_steps", recipe.optimizer.warmup_steps, f"must be at most steps={training.steps}")


def _check_data(recipe: Description) -> None:
    data, model = recipe.data, recipe.model
    check_data(data)
    if model.positions == "learned" and data.seq_len > model.max_positions:
        raise UserError("data.seq_len", data.seq_len, f"must be at most model.max_positions={model.max_positions}")
    if recipe.training.weights and "tokenizer" not in data.model_fields_set:
        # To weights that somebody trained, the tokens of another tokenizer mean nothing.
        rule = "must be named beside training.weights: the folder of the tokenizer of these weights, or byte"
        raise UserError("data.tokenizer", "null", rule)


def _check_engine(recipe: Description) -> None:
    engine, optimizer = recipe.engine, recipe.optimizer
    _check_adapter(recipe)
    if engine.kind == "torch" and engine.zero and recipe.model.shares_embedding and recipe.fold.pp > 1:
        rule = "the torch engine cannot shard an embedding that two pipeline stages share; kind=deepspeed can"
        raise UserError("engine.zero", engine.zero, rule, [0])
    if engine.wire is not None:
        _check_gradients(recipe)
    if engine.kind == "deepspeed" and recipe.precision == "bfloat16" and engine.zero == 0:
        raise UserError("engine.zero", 0, "DeepSpeed's stage 0 keeps no sharded float32 state for a bfloat16 model", [1, 2])
    if engine.kind == "deepspeed" and recipe.precision == "float64":
        rule = "DeepSpeed keeps float32 master weights; use engine.kind=torch"
        raise UserError("precision", "float64", rule, ["float32", "bfloat16"])
    if engine.kind == "deepspeed" and optimizer.kind == "muon":
        rule = "sees flat parts of matrices, and optimizer.kind=muon needs whole ones"
        raise UserError("engine.kind", "deepspeed", rule, ["torch"])
    if optimizer.kind == "adamw" and optimizer.momentum:
        raise UserError("optimizer.momentum", optimizer.momentum, "has no meaning with kind=adamw", [0])
    for key in ("adamw_lr", "nesterov", "ns_steps", "adjust_lr"):
        usual, value = OptimizerSpec.model_fields[key].default, getattr(optimizer, key)
        if optimizer.kind != "muon" and value != usual:
            rule = f"has no meaning with kind={optimizer.kind}, only with muon"
            raise UserError(f"optimizer.{key}", value, rule, [_WRITTEN.get(usual, usual)])


def _check_gradients(recipe: Description) -> None:
    """Check that gradients may be rounded on the wire."""
    engine = recipe.engine
    if engine.kind == "deepspeed":
        raise UserError("engine.wire", engine.wire, "is for engine.kind=torch; DeepSpeed sends gradients itself", ["null"])
    if engine.zero == 0:
        rule = "sends gradients to the one owner of their sum; with engine.zero=0 every worker has all sums"
        raise UserError("engine.wire", engine.wire, rule, ["null"])
    if recipe.precision == "float64":
        rule = "rounds gradients, and precision: float64 is for exact comparisons"
        raise UserError("engine.wire", engine.wire, rule, ["null"])


def _check_adapter(recipe: Description) -> None:
    if recipe.model.adapter is None:
        if recipe.training.adapter is not None:
            rule = "needs model.adapter, which says the rank, the weight and the targets of adapters"
            raise UserError("training.adapter", recipe.training.adapter, rule, ["null"])
        return
    if recipe.engine.kind == "deepspeed" and not recipe.model.adapter.attention and recipe.fold.pp > 1 and recipe.model.has_dense:
        rule = "needs something to train on each pipeline position, and a dense block has nothing (model.adapter.targets)"
        raise UserError("engine.kind", "deepspeed", rule, ["torch"])
    if recipe.optimizer.kind == "muon":
        rule = "is for whole matrices of hidden layers, not for the narrow ones of adapters (model.adapter)"
        raise UserError("optimizer.kind", "muon", rule, ["adamw", "sgd"])


_NARROWED = {"bfloat16": ("float32",), "float8": ("float32", "bfloat16")}
"""`moe.wire` → the precisions whose rows it makes narrower."""


def _check_backend(recipe: Description) -> None:
    backend, router = recipe.moe.backend, recipe.model.router
    if recipe.moe.dispatch == "rank" and backend == "tutel":
        rule = "is for foldray's own kernels; Tutel's copy a row for each assignment (moe.backend)"
        raise UserError("moe.dispatch", "rank", rule, ["assignment"])
    if recipe.moe.dispatch == "rank" and router.pad:
        rule = "sends rows for workers, and padding is for experts (model.router.pad)"
        raise UserError("moe.dispatch", "rank", rule, ["assignment"])
    if recipe.moe.place_every is not None:
        _check_places(recipe)
    if recipe.moe.copies:
        _check_copies(recipe)
    if recipe.moe.wire is not None and recipe.precision not in _NARROWED[recipe.moe.wire]:
        rule = f"rounds numbers, and precision: {recipe.precision} " + (
            "has no wider ones" if recipe.precision == "bfloat16" else "is for exact comparisons"
        )
        raise UserError("moe.wire", recipe.moe.wire, rule, ["null", *(["float8"] if recipe.precision == "bfloat16" else [])])
    if backend != "torch" and (router.skew is not None or router.shares is not None):
        rule = "has gates of its own, which know no pattern (model.router.skew, model.router.shares)"
        raise UserError("moe.backend", backend, rule, ["torch"])
    if backend == "tutel" and recipe.precision == "float64":
        raise UserError("moe.backend", backend, "Tutel's kernels compute in float32 and would round float64", ["torch"])
    if backend == "deepspeed":
        plain = router.score == "softmax" and not router.selection_bias and router.groups == 1
        same = plain and (router.normalize or router.softmax == "after_topk") == (recipe.model.topk > 1)
        if not same or router.scale != 1:
            rule = "DeepSpeed's gates are a softmax over all experts, rescaled to a sum of 1 for topk > 1, with scale 1"
            raise UserError("moe.backend", backend, rule, ["torch", "tutel"])


def _check_places(recipe: Description) -> None:
    """Check that experts may change places."""
    every, rule = recipe.moe.place_every, None
    if recipe.fold.ep == 1:
        rule = "moves experts between the workers of an expert-parallel group; it needs fold.ep of at least 2"
    elif recipe.model.router.groups > 1:
        rule = "would take experts out of their groups (model.router.groups)"
    elif recipe.model.adapter is not None:
        rule = "moves what training changes, and frozen experts stay (model.adapter)"
    elif recipe.routes.record_tokens is not None or recipe.routes.replay is not None:
        rule = "numbers experts anew, and recorded routes name them by number (routes.record_tokens, routes.replay)"
    if rule is not None:
        raise UserError("moe.place_every", every, rule, ["null"])


def _check_copies(recipe: Description) -> None:
    """Check that experts may have copies."""
    room, fold, rule, legal = recipe.moe.copies, recipe.fold, None, [0]
    if fold.ep == 1:
        rule = "is for copies on other workers of an expert-parallel group; it needs fold.ep of at least 2"
    elif recipe.placement is not None:
        rule = "is for workers that own both tokens and experts, and placement parts them"
    elif recipe.model.adapter is not None:
        rule = "is for experts that training changes, and frozen ones stay (model.adapter)"
    elif recipe.model.router.pad:
        rule = "evens loads out, and padding gives every expert equally many rows (model.router.pad)"
    elif recipe.moe.backend == "tutel":
        rule = "is for foldray's own kernels; Tutel's pad every expert's rows (moe.backend)"
    elif room > (others := recipe.model.experts // fold.ep * (fold.ep - 1)):
        rule, legal = f"must be at most {others}, the experts of other workers in a block", [*range(others + 1)]
    if rule is not None:
        raise UserError("moe.copies", room, rule, legal)


def _check_space(recipe: Description) -> None:
    attention = recipe.tune.space.attention
    if attention == "auto" and recipe.tune.hardware is None:
        raise UserError("tune.space.attention", "auto", "needs tune.hardware, whose roofline says where to begin", ["a list"])
    if attention is not None and any(recipe.adapters):
        # A tuner's workers stay, and NCCL reads the names of adapters once in a process.
        rule = "cannot be combined with adapters by half (placement.attention_adapters, placement.expert_adapters)"
        raise UserError("tune.space.attention", attention if attention == "auto" else list(attention), rule, ["null"])
    if (settings := recipe.tune.space.settings_of_a_fold) > MOST_SETTINGS:
        rule = f"must make at most {MOST_SETTINGS} settings of every fold; list fewer values"
        raise UserError("tune.space", f"{settings} settings of every fold", rule)


def _check_export(recipe: Description) -> None:
    export, vocab = recipe.export, recipe.model.vocab
    given = {"generation.eos_token_id": export.generation.get("eos_token_id")}
    if export.tokens is not None:
        given |= {f"tokens.{key}": value for key, value in export.tokens.model_dump(mode="json").items()}
    for key, value in given.items():
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocab for token in listed):
            raise UserError(f"export.{key}", value, "is an id, or a list of ids, of tokens of the vocabulary", [f"0…{vocab - 1}"])


def check_trains(recipe: Description) -> None:
    """Check that a recipe is for training, and not for measurements alone."""
    if recipe.model.adapter is not None and recipe.training.weights is None:
        rule = "must be given with adapters (model.adapter): the folder of the weights that stay as they are"
        raise UserError("training.weights", "null", rule)
    if (skew := recipe.model.router.skew) is not None:
        raise UserError("model.router.skew", skew, "is for measurements: a model cannot learn from a pattern", ["null"])
    if recipe.model.router.shares is not None:
        rule = "are for measurements: a model cannot learn from a pattern"
        raise UserError("model.router.shares", f"{recipe.model.experts} shares", rule, ["null"])
    recorded = next((key for key, value in recipe.routes if value is not None), None)
    if recorded is not None and not recipe.model.moe_layers:
        raise UserError(f"routes.{recorded}", getattr(recipe.routes, recorded), "needs a model with experts", ["null"])

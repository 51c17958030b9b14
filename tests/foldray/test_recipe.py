"""Recipes that load, and recipes that are refused, with the line of the error."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from foldray import MissingPackage, Recipe, UserError
from foldray.graph import Slicing
from foldray.recipe import describe
from foldray.recipe.page import key_help, page
from foldray.recipe.reading import sections

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "kubernetes")
GOOD = {
    "name": "good",
    "model": {"preset": "tiny"},
    "fold": {"ep": 2},
    "training": {"steps": 10, "global_batch": 8, "micro_batch": 2},
    "cluster": {"workers": 2},
}


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    return path


def test_there_are_shipped_recipes():
    assert ROOT / "recipes" / "quickstart.yaml" in SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_recipes_load(path):
    recipe = Recipe.load(path)
    assert recipe.accumulation >= 1
    assert Recipe.parse(recipe.model_dump()) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_load(good):
    recipe = Recipe.load(good)
    assert (recipe.name, recipe.model.preset, recipe.fold.ep, recipe.cluster.workers) == ("good", "tiny", 2, 2)
    assert (recipe.placed_fold.dp, recipe.placed_fold.ep, recipe.placed_fold.edp) == (2, 2, 1)
    assert recipe.accumulation == 2


def test_defaults():
    recipe = Recipe.parse({"model": {"preset": "tiny"}})
    assert (recipe.engine.kind, recipe.engine.zero, recipe.precision) == ("deepspeed", 1, "float32")
    assert (recipe.data.source, recipe.data.tokenizer, recipe.schedule.kind) == ("stdlib", "byte", "auto")
    assert (recipe.cluster.workers, recipe.cluster.address, recipe.placed_fold.world_size) == (1, None, 1)
    assert recipe.optimizer.betas == (0.9, 0.95)


def test_overrides_are_yaml_and_come_last(good):
    recipe = Recipe.load(
        good,
        [
            "training.steps=20",
            "training.steps=30",
            "model.preset=Tiny-Fine",
            "model.router.scale=2.5",
            "optimizer.lr=3e-3",
            "optimizer.betas=[0.8, 0.9]",
            "optimizer.clip=null",
            "data.mask_documents=true",
            "data.validation.fraction=0.25",
            "tracking.uri=http://host/?a=b",
        ],
    )
    assert recipe.training.steps == 30
    assert (recipe.model.preset, recipe.model.experts, recipe.model.router.scale) == ("tiny-fine", 32, 2.5)
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.clip) == (3e-3, (0.8, 0.9), None)
    assert recipe.data.mask_documents is True
    assert recipe.data.validation.fraction == 0.25
    assert recipe.tracking.uri == "http://host/?a=b"


def test_the_torch_engine_has_stage_0_by_default():
    assert Recipe.parse({"model": {"preset": "tiny"}, "engine": {"kind": "torch"}}).engine.zero == 0


def test_muon_has_momentum_by_default():
    given = {"model": {"preset": "tiny"}, "engine": {"kind": "torch"}, "optimizer": {"kind": "muon"}}
    assert Recipe.parse(given).optimizer.momentum == 0.95
    given["optimizer"] = {"kind": "muon", "momentum": 0.5}
    assert Recipe.parse(given).optimizer.momentum == 0.5
    assert Recipe.parse({"model": {"preset": "tiny"}}).optimizer.momentum == 0.0


def test_conversations_stand_alone_by_default():
    model, given = {"preset": "tiny"}, {"source": "conversations", "path": "a.jsonl", "tokenizer": "folder"}
    assert Recipe.parse({"model": model, "data": given}).data.mask_documents
    apart = Recipe.parse({"model": model, "data": {**given, "mask_documents": False}})
    for recipe in (apart, Recipe.parse(apart.model_dump())):
        assert (recipe.data.mask_documents, recipe.data.masked) == (False, True)
    text = Recipe.parse({"model": model}).data
    assert (text.mask_documents, text.masked) == (False, False)


def test_sources_of_a_mixture_inherit_what_they_leave_out(good):
    changes = ["data.source=jsonl", "data.sources.a={path: a, weight: 0.7}", "data.sources.b={source: stdlib, weight: 0.3}"]
    data = Recipe.load(good, [*changes, "data.sources.a.weight=0.9", "data.validation.fraction=0.2"]).data
    assert data.weights == (3, 1)
    assert [(name, part.source, part.path, part.sources) for name, part in data.parts.items()] == [
        ("a", "jsonl", "a", None), ("b", "stdlib", None, None),
    ]  # fmt: skip
    assert {part.validation.fraction for part in data.parts.values()} == {0.2}
    assert not data.mask_documents
    chats = {"tokenizer": "folder", "sources": {"a": {}, "b": {"source": "conversations", "path": "c"}}}
    assert Recipe.parse({"model": {"preset": "tiny"}, "data": chats}).data.mask_documents
    alone = Recipe.load(good).data
    assert (alone.parts, alone.weights) == ({"": alone}, (1,))


def test_a_model_without_preset():
    sizes = {
        "layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn_hidden": 16, "experts": 4, "topk": 2,
        "expert_hidden": 8, "vocab": 300,
    }  # fmt: skip
    assert Recipe.parse({"model": sizes}).model.moe_layers == (0, 1)
    with pytest.raises(UserError, match=r"^model\.vocab=nothing: is required"):
        Recipe.parse({"model": {key: size for key, size in sizes.items() if key != "vocab"}})


BAD = [  # overrides, the field of the mistake or also its value, a part of the line
    # keys and sections
    ("trainig.steps=3", "trainig", "is not a known key; did you mean 'training'?; legal: name, model"),
    ("training.step=3", "training.step=3", "did you mean 'steps'?; legal: steps, stop_after"),
    ("data.validation.share=0.1", "data.validation.share", "is not a known key; legal: fraction, path"),
    ("model.router.temperature=1", "model.router.temperature", "is not a known key"),
    ("fold.dp=2", "fold.dp", "is not a known key"),
    ("training=3", "training=3", "is a section and needs a valid dictionary of its keys; legal: steps, stop_after"),
    ("training.steps.first=3", "training.steps.first=3", "steps is not a section"),
    ("training.steps", "override=training.steps", "must read key.sub=value"),
    ("=3", "override==3", "must read key.sub=value"),
    ("training.steps=[1", "training.steps=[1", "is not a YAML value"),
    # types and ranges
    ("training.steps=many", "training.steps=many", "is not a valid integer"),
    ("training.steps=0", "training.steps=0", "greater than or equal to 1"),
    ("training.steps=1.5", "training.steps=1.5", "is not a valid integer"),
    ("training.steps=", "training.steps=null", "is not a valid integer"),
    ("training.seed=-1", "training.seed", "greater than or equal to 0"),
    ("optimizer.lr=0", "optimizer.lr", "greater than 0"),
    ("optimizer.lr=.inf", "optimizer.lr=inf", "must be a finite number"),
    ("optimizer.eps=.nan", "optimizer.eps", "finite"),
    ("optimizer.clip=0", "optimizer.clip", "greater than 0"),
    ("optimizer.min_lr=1.5", "optimizer.min_lr", "less than or equal to 1"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1=1.0", "less than 1"),
    ("optimizer.betas=[0.9]", "optimizer.betas.1", "is required"),
    ("data.validation.fraction=1", "data.validation.fraction", "less than 1"),
    ("data.seq_len=0", "data.seq_len", "greater than or equal to 1"),
    ("checkpoint.keep=0", "checkpoint.keep", "greater than or equal to 1"),
    ("cluster.workers=0", "cluster.workers", "greater than or equal to 1"),
    ("cluster.gpu=perhaps", "cluster.gpu=perhaps", "is not a valid boolean"),
    ("name=two words", "name", "letters, digits"),
    ("name=../up", "name=../up", "may hold letters, digits"),
    # choices
    ("optimizer.kind=adam", "optimizer.kind=adam", "legal: adamw, sgd, muon"),
    ("optimizer.decay=exponential", "optimizer.decay", "legal: cosine, linear, constant"),
    ("precision=float16", "precision=float16", "bfloat16 has those of float32; legal: float32, bfloat16, float64"),
    ("precision=half", "precision=half", "has too few exponents for gradients"),
    ("precision=float8", "precision=float8", "is not a legal value; legal: float32, bfloat16, float64"),
    ("engine.kind=megatron", "engine.kind", "legal: deepspeed, torch"),
    ("engine.zero=3", "engine.zero=3", "legal: 0, 1, 2"),
    ("schedule.kind=random", "schedule.kind", "is not a legal value; legal: auto, sequential"),
    ("moe.backend=cuda", "moe.backend=cuda", "legal: torch, tutel, deepspeed"),
    ("data.source=web", "data.source", "legal: stdlib, text, jsonl, parquet"),
    ("cluster.placement=pack", "cluster.placement", "legal: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
    ("model.norm=batchnorm", "model.norm", "legal: rmsnorm, zero_rmsnorm, layernorm"),
    # the model
    ("model.preset=tiney", "model.preset=tiney", "is not a known model; did you mean 'tiny'?; legal: tiny, tiny-gpt"),
    ("model.kv_heads=3", "model.kv_heads", "must divide heads=4; legal: 1, 2, 4"),
    ("model.head_dim=31", "model.head_dim", "must be even"),
    (
        "model={preset: tiny, rope_theta: 1.0, rope_scaling: {factor: 2, original_positions: 64}}",
        "model.rope_theta",
        "more than 1",
    ),
    ("model.topk=9", "model.topk", "must be at most experts=8"),
    ("model.latent_norm_eps=1e-6", "model.latent_norm_eps", "needs latent_rank; legal: null"),
    (
        "model={preset: tiny-gpt, full_positions: none}",
        "model.full_positions",
        "needs positions=rope; legal: rope",
    ),
    ("model={preset: tiny-gpt, window_rope_theta: 50}", "model.window_rope_theta", "needs positions=rope"),
    ("model={preset: deepseek-v2-lite, attention_gate: head}", "model.attention_gate", "does not go with latent_rank"),
    ("export.family=Dots 1", "export.family", "must be a family's name in config.json"),
    ("model.rope_scaling={factor: 2}", "model.rope_scaling.original_positions", "must be given with kind=yarn"),
    ("model.rope_scaling={kind: llama3, factor: 2, original_positions: 64}", "model.rope_scaling.beta_fast", "must be given"),
    (
        "model.rope_scaling={kind: llama3, factor: 2, original_positions: 64, beta_fast: 1}",
        "model.rope_scaling.beta_fast",
        "must be more than beta_slow=1",
    ),
    (
        "model.rope_scaling={factor: 2, original_positions: 64, beta_fast: 0.5}",
        "model.rope_scaling.beta_fast",
        "must be at least beta_slow=1",
    ),
    (
        "model.rope_scaling={kind: linear, factor: 2, attention_factor: 1.5}",
        "model.rope_scaling.attention_factor",
        "has no meaning with kind=linear; legal: None",
    ),
    ("model.dense_first=5", "model.dense_first", "must be at most layers=4"),
    ("model.router.bias_rate=0.001", "model.router.bias_rate", "needs score=sigmoid"),
    ("model.router={balance_loss: 0, balance_scope: batch}", "model.router.balance_scope=batch", "needs balance_loss above 0"),
    ("model.router.balance_scope=step", "model.router.balance_scope=step", "legal: sequence, batch, global_batch"),
    ("model.router.bias_update=proportional", "model.router.bias_update", "needs bias_rate above 0; legal: sign"),
    ("model.router={score: sigmoid, bias_update: quantile, bias_rate: 2}", "model.router.bias_rate=2.0", "must be at most 1"),
    (
        "model.router={score: sigmoid, bias_update: quantile, bias_rate: 1, groups: 2}",
        "model.router.bias_update=quantile",
        "needs groups=1, not 2; legal: sign, centered, proportional",
    ),
    ("model.router.normalize=true", "model.router.normalize", "sums to one already"),
    ("model.router.pad=true", "model.router.pad", "needs a capacity_factor"),
    ("model.router.capacity_factor=0", "model.router.capacity_factor", "greater than 0"),
    ("model.router={score: sigmoid, softmax: before_topk}", "model.router.softmax", "has no meaning with score=sigmoid"),
    # the fold and the batch
    ("fold.ep=3", "fold=1·3·1", "etp·ep·pp must divide the world size 2 (cluster.workers); nearest legal folds: tp=1"),
    ("fold.ep=0", "fold.ep", "greater than or equal to 1"),
    ("fold.etp=2", "fold", "etp·ep·pp must divide the world size 2 (cluster.workers); nearest legal folds: tp=1"),
    ("model.experts=7", "fold.ep=2", "must divide model.experts=7; legal: 1"),
    ("training.global_batch=6", "training.global_batch=6", "must be a multiple of dp × micro_batch = 2 × 2"),
    ("training.weights=hub", "data.tokenizer", "must be named beside training.weights"),
    ("training.stop_after=11", "training.stop_after=11", "must be at most steps=10"),
    ("optimizer.warmup_steps=11", "optimizer.warmup_steps", "must be at most steps=10"),
    # the data
    ("data.path=a.txt", "data.path", "has no meaning with source=stdlib"),
    ("export.generation=3", "export.generation", "is not a mapping from names"),
    ("export.generation.from=2026-11-28", "export.generation.from", "is no value of JSON"),
    ("export.generation.eos_token_id=[3, end]", "export.generation.eos_token_id", "of tokens of the vocabulary; legal: 0…"),
    ("export.tokens.eos=[70000]", "export.tokens.eos", "of tokens of the vocabulary; legal: 0…"),
    ("data.source=jsonl", "data.path=null", "source=jsonl needs a file or a glob"),
    ("data.source=conversations", "data.path", "source=conversations needs a file or a glob"),
    ("data={source: conversations, path: a.jsonl}", "data.tokenizer", "has no chat template; name a folder"),
    ("data.train_on=all", "data.train_on", "has no meaning with source=stdlib, only with conversations; legal: assistant"),
    ("data.messages_field=turns", "data.messages_field", "only with conversations; legal: messages"),
    ("data.train_on=user", "data.train_on", "legal: assistant, all"),
    ("data.sources={}", "data.sources", "at least 1 item"),
    ("data.sources=[{path: a}]", "data.sources", "is not a mapping from names"),
    ("data.sources.a=3", "data.sources.a", "valid dictionary of its keys; legal: weight, source"),
    ("data.sources={a b: {}}", "data.sources.a b", "letters, digits"),
    ("data.sources.a.weigth=3", "data.sources.a.weigth", "did you mean 'weight'?"),
    ("data.sources.a.weight=0", "data.sources.a.weight", "greater than 0"),
    ("data.sources.a.weight=true", "data.sources.a.weight", "is not a valid number"),
    ("data.sources.a.source=web", "data.sources.a.source", "legal: stdlib, text, jsonl, parquet, conversations, null"),
    ("data.sources.a.source=text", "data.sources.a.path", "source=text needs a file or a glob"),
    ("data.sources.a.path=b", "data.sources.a.path", "has no meaning with source=stdlib"),
    ("data.sources.a.train_on=all", "data.sources.a.train_on", "has no meaning with source=stdlib"),
    ("data={path: a, sources: {a: {}}}", "data.path", "has no meaning with data.sources"),
    ("data={validation: {path: a}, sources: {a: {}}}", "data.validation.path", "has no meaning with data.sources"),
    ("data={train_on: all, sources: {a: {}}}", "data.train_on", "only with conversations"),
    ("data.sources={a: {weight: 0.123456789}, b: {weight: 0.876543211}}", "data.sources.*.weight", "near them are 1235, 8765"),
    ("model={preset: tiny-gpt, max_positions: 128}", "data.seq_len", "must be at most model.max_positions=128"),
    # engines and backends
    ("schedule={reduction: chunks, sp_bytes: 0}", "schedule.sp_bytes", "at least 1, or auto"),
    ("schedule={reduction: chunks, sp_bytes: big}", "schedule.sp_bytes", "auto"),
    ("schedule={sp_bytes: 1000}", "schedule.sp_bytes", "has no meaning with reduction=end"),
    ("schedule={reduction: buckets, sp_bytes: auto}", "schedule.sp_bytes", "needs reduction=chunks"),
    ("schedule={degrees: [1, 2]}", "schedule.degrees", "has 2, which is illegal: schedule.degree: kind=auto lets"),
    ("schedule={kind: stream, degree: 2, slices: [64, 64], degrees: [2]}", "schedule.degrees", "be combined with slices"),
    ("schedule={kind: stream, degree: 2, attention_degree: 3}", "schedule.attention_degree", "at most degree=2"),
    ("schedule={kind: stream, attention_degree: 2}", "schedule.attention_degree", "has no meaning with degree=1"),
    ("schedule={attention_degree: 2}", "schedule.attention_degree", "has no meaning with degree=1"),
    (
        "schedule={kind: moe_only, degree: 2, attention_degree: 2}",
        "schedule.attention_degree",
        "does not cut attention; legal: null, 1",
    ),
    ("schedule={kind: stream, degree: 4, attention_degree: 0}", "schedule.attention_degree", "greater than or equal to 1"),
    ("schedule={kind: flow, batch_degree: 3}", "schedule.batch_degree", "must divide training.micro_batch=2"),
    ("schedule={kind: sequential, batch_degree: 2}", "schedule.batch_degree", "kind=sequential cuts nothing"),
    (
        "moe.backend=torch schedule.kind=flow model.router.balance_scope=batch",
        "schedule.batch_degree=2",
        "balance_scope=batch counts whole ones",
    ),
    ("schedule={batch_degree: 2}", "schedule.batch_degree", "kind=auto lets training choose; name a kind to set it"),
    ("schedule={kind: flow, batch_degree: 1, backward: stream}", "schedule.backward", "cut nothing"),
    ("engine.zero=0 precision=bfloat16", "engine.zero=0", "legal: 1, 2"),
    ("engine.wire=bfloat16", "engine.wire=bfloat16", "is for engine.kind=torch; DeepSpeed sends gradients itself"),
    ("engine.kind=torch engine.wire=bfloat16", "engine.wire=bfloat16", "with engine.zero=0 every worker has all sums"),
    ("engine.kind=torch engine.zero=1 engine.wire=bfloat16 precision=float64", "engine.wire=bfloat16", "exact comparisons"),
    ("engine.wire=float8", "engine.wire=float8", "bfloat16"),
    ("engine.offload=parameters", "engine.offload=parameters", "legal: optimizer, null"),
    ("engine.offload=optimizer engine.zero=0", "engine.offload=optimizer", "updates where the weights are (engine.zero: 1 or 2)"),
    (
        "engine.kind=torch engine.offload=optimizer optimizer.kind=muon",
        "engine.offload=optimizer",
        "is work for a GPU; legal: null",
    ),
    ("optimizer.moments=float16", "optimizer.moments=float16", "legal: bfloat16, null"),
    ("optimizer.moments=bfloat16", "optimizer.moments=bfloat16", "is for engine.kind=torch; DeepSpeed keeps moments"),
    ("engine.kind=torch optimizer.kind=sgd optimizer.moments=bfloat16", "optimizer.moments", "only with adamw; legal: null"),
    ("engine.kind=torch optimizer.moments=bfloat16 precision=float64", "optimizer.moments", "is for exact comparisons"),
    ("engine.kind=torch optimizer.moments=bfloat16 optimizer.betas=[0.9,0.997]", "optimizer.betas", "each at most 0.99609375"),
    ('engine.kind=torch engine.deepspeed={"dump_state":true}', "engine.deepspeed", "it needs engine.kind=deepspeed; legal: {}"),
    ("engine.deepspeed=1", "engine.deepspeed=1", "is not a mapping from names"),
    ('engine.deepspeed={"train_batch_size":8}', "engine.deepspeed.train_batch_size=8", "to set; use training.global_batch"),
    ('engine.deepspeed={"gradient_clipping":2.0}', "engine.deepspeed.gradient_clipping=2.0", "to set; use optimizer.clip"),
    ('engine.deepspeed={"optimizer":{"type":"Adam"}}', "engine.deepspeed.optimizer", "use optimizer.kind"),
    ('engine.deepspeed={"bf16":{"enabled":true}}', "engine.deepspeed.bf16", "use precision"),
    ('engine.deepspeed={"zero_optimization":{"stage":3}}', "engine.deepspeed.zero_optimization.stage=3", "use engine.zero"),
    (
        'engine.deepspeed={"zero_optimization":{"offload_optimizer":{"device":"cpu"}}}',
        "engine.deepspeed.zero_optimization.offload_optimizer",
        "use engine.offload",
    ),
    (
        'engine.deepspeed={"zero_optimization":{"reduce_bucket":8}}',
        "engine.deepspeed=zero_optimization.reduce_bucket",
        "did you mean 'zero_optimization.reduce_bucket_size'?; legal: comms_logger.enabled, ",
    ),
    (
        'engine.deepspeed={"zero_optimization":{"reduce_bucket_size":5e7}}',
        "engine.deepspeed.zero_optimization.reduce_bucket_size=5e7",
        "must be a whole number of at least 1",
    ),
    (
        'engine.deepspeed={"zero_optimization":{"allgather_bucket_size":7}}',
        "engine.deepspeed.zero_optimization.allgather_bucket_size=7",
        "must be an even number",
    ),
    ('engine.deepspeed={"wall_clock_breakdown":1}', "engine.deepspeed.wall_clock_breakdown=1", "must be true or false"),
    ("precision=float64", "precision=float64", "use engine.kind=torch; legal: float32, bfloat16"),
    ("optimizer.momentum=0.9", "optimizer.momentum", "has no meaning with kind=adamw"),
    ("optimizer.kind=muon", "engine.kind", "optimizer.kind=muon needs whole ones; legal: torch"),
    ("optimizer={nesterov: false}", "optimizer.nesterov", "has no meaning with kind=adamw, only with muon; legal: true"),
    ("optimizer={kind: sgd, ns_steps: 3}", "optimizer.ns_steps", "has no meaning with kind=sgd, only with muon; legal: 5"),
    ("optimizer={adjust_lr: original}", "optimizer.adjust_lr", "only with muon; legal: match_rms_adamw"),
    ("optimizer={adamw_lr: 0.1}", "optimizer.adamw_lr", "only with muon; legal: null"),
    ("optimizer.ns_steps=0", "optimizer.ns_steps", "greater than or equal to 1"),
    ("optimizer.adjust_lr=spectral", "optimizer.adjust_lr", "legal: match_rms_adamw, original"),
    ("moe.backend=deepspeed model.preset=tiny-fine", "moe.backend=deepspeed", "with scale 1; legal: torch, tutel"),
    ("moe.backend=deepspeed model.topk=1", "moe.backend", "softmax over all experts"),
    ("moe.backend=tutel precision=float64 engine.kind=torch", "moe.backend=tutel", "would round float64; legal: torch"),
    ("moe.dispatch=expert", "moe.dispatch", "legal: assignment, rank"),
    ("moe.dispatch=rank moe.backend=tutel", "moe.dispatch", "a row for each assignment (moe.backend); legal: assignment"),
    ("moe.wire=float16", "moe.wire", "legal: bfloat16, float8"),
    ("moe.wire=bfloat16 precision=bfloat16", "moe.wire", "precision: bfloat16 has no wider ones; legal: null, float8"),
    (
        "moe.wire=float8 precision=float64 engine.kind=torch",
        "moe.wire",
        "precision: float64 is for exact comparisons; legal: null",
    ),
    ("moe.dispatch=assignment fold.ep=4 cluster.workers=4 fold.ep_inside=2", "fold.ep_inside", "needs moe.dispatch: rank"),
    ("moe.dispatch=rank fold.ep=4 cluster.workers=4 fold.ep_inside=3", "fold.ep_inside", "must divide the expert-parallel"),
    (
        "moe.dispatch=rank model.router.capacity_factor=1.0 model.router.pad=true",
        "moe.dispatch",
        "(model.router.pad); legal: assignment",
    ),
]


@pytest.mark.parametrize(("overrides", "given", "fragment"), BAD, ids=[bad[0] for bad in BAD])
def test_bad_recipes_are_refused_in_one_line(good, overrides, given, fragment):
    several = overrides.split() if overrides.startswith(("moe.", "engine.")) else [overrides]
    with pytest.raises(UserError) as error:
        Recipe.load(good, several)
    line = str(error.value)
    assert line.startswith(f"{given}: " if "=" in given else f"{given}=")
    assert line.startswith(f"{error.value.field}=")
    assert fragment in line
    assert "\n" not in line
    assert error.value.__suppress_context__ or error.value.__context__ is None


# A recipe that any fold of 8 workers can train.
FOLDED = {
    "model": {
        "layers": 8, "hidden": 16, "heads": 8, "kv_heads": 8, "head_dim": 4, "ffn_hidden": 16, "experts": 8, "topk": 2,
        "expert_hidden": 16, "shared_hidden": 16, "vocab": 64, "dense_first": 1,
    },
    "data": {"seq_len": 64},
    "training": {"global_batch": 16},
    "cluster": {"workers": 8},
}  # fmt: skip


def folded(**sections):
    return {key: {**FOLDED.get(key, {}), **sections.get(key, {})} for key in {**FOLDED, **sections}}


@pytest.mark.parametrize(
    "fold",
    [
        {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2},
        {"tp": 8, "ep": 8},
        {"cp": 8, "etp": 8},
        {"pp": 8},
        {"tp": 2, "cp": 2, "ep": 4, "order": "cp-dp-tp-pp", "moe_order": "edp-ep-etp-pp"},
        {"tp": 2, "pp": 2, "ep": 4, "order": "pp-tp-cp-dp", "moe_order": "pp-etp-ep-edp"},
    ],
)
def test_a_legal_fold_is_taken_as_it_is(fold):
    recipe = Recipe.parse(folded(fold=fold))
    assert {axis: getattr(recipe.placed_fold, axis) for axis in fold} == fold
    assert recipe.ownership.fold == recipe.placed_fold
    assert recipe.accumulation == 16 // recipe.placed_fold.dp
    assert Recipe.parse(recipe.model_dump()) == recipe


def test_a_pipeline_of_given_and_of_virtual_stages_is_taken_as_it_is():
    given = folded(fold={"pp": 2}, schedule={"virtual_stages": 2, "stage_layers": [1, 3, 3, 1]})
    assert [len(stage.layers) for stage in Recipe.parse(given).ownership.stages] == [1, 3, 3, 1]
    assert [len(stage.layers) for stage in Recipe.parse(folded(fold={"pp": 4})).ownership.stages] == [2, 2, 2, 2]


# sections; field, value, part of the rule, legal values
BAD_FOLDS = [
    ({"fold": {"tp": 3}}, "fold", "3·1·1", "tp·cp·pp must divide the world size 8 (cluster.workers)", [1, 2, 4, 8]),
    ({"fold": {"tp": 4, "cp": 2, "pp": 2}}, "fold", "4·2·2", "tp·cp·pp must divide the world size 8", [1, 2, 4, 8]),
    ({"fold": {"ep": 3, "etp": 2}}, "fold", "2·3·1", "etp·ep·pp must divide the world size 8", [1, 2, 4, 8]),
    ({"fold": {"pp": 16}}, "fold", "1·1·16", "tp·cp·pp must divide the world size 8", [1, 2, 4, 8]),
    ({"fold": {"order": "pp-tp-cp-dp", "pp": 2}}, "fold.order", "pp-tp-cp-dp | etp-ep-edp-pp",
     "the pipeline groups must have the same members in both views, but attention has [0 1], the experts [0 4]",
     ["tp-cp-dp-pp | etp-ep-edp-pp"]),
    ({"fold": {"moe_order": "etp-pp-ep-edp", "pp": 2, "etp": 2}}, "fold.order", "tp-cp-dp-pp | etp-pp-ep-edp",
     "attention has [0 4], the experts [0 2]", ["tp-cp-dp-pp | etp-ep-edp-pp"]),
    ({"fold": {"order": "tp-cp-dp"}}, "fold.order", "tp-cp-dp", "must name each of tp-cp-dp-pp once", None),
    ({"fold": {"moe_order": "tp-ep-edp-pp"}}, "fold.moe_order", "tp-ep-edp-pp", "must name each of etp-ep-edp-pp once", None),
    ({"fold": {"tp": 8}, "model": {"heads": 4, "kv_heads": 4}}, "fold.tp", 8, "must divide model.heads=4", [1, 2, 4]),
    ({"fold": {"tp": 2}, "model": {"heads": 9, "kv_heads": 3, "head_dim": 4}}, "fold.tp", 2, "must divide model.heads=9", [1]),
    ({"fold": {"tp": 4}, "model": {"heads": 12, "kv_heads": 6}}, "fold.tp", 4, "kv_heads=6, or be a multiple of it", [1, 2]),
    ({"fold": {"tp": 4}, "model": {"kv_heads": 2, "qk_norm": "all"}}, "fold.tp", 4, "must divide model.kv_heads=2", [1, 2]),
    ({"fold": {"tp": 4}, "model": {"ffn_hidden": 18}}, "fold.tp", 4, "must divide model.ffn_hidden=18", [1, 2]),
    ({"fold": {"tp": 2}, "model": {"shared_hidden": 7}}, "fold.tp", 2, "must divide model.shared_hidden=7", [1]),
    ({"fold": {"tp": 4}, "model": {"vocab": 257}}, "model.vocab", 257, "must be a multiple of fold.tp=4", [260]),
    ({"fold": {"ep": 8}, "model": {"experts": 12}}, "fold.ep", 8, "must divide model.experts=12", [1, 2, 4]),
    ({"fold": {"etp": 8}, "model": {"expert_hidden": 20}}, "fold.etp", 8, "must divide model.expert_hidden=20", [1, 2, 4]),
    ({"fold": {"cp": 4}, "data": {"seq_len": 60}}, "data.seq_len", 60, "must be a multiple of 8", [56, 64]),
    ({"fold": {"tp": 8}, "data": {"seq_len": 63}}, "data.seq_len", 63, "must be a multiple of 8", [56, 64]),
    ({"fold": {"cp": 2, "tp": 4}, "data": {"seq_len": 4}}, "data.seq_len", 4, "for cp=2 (2·cp chunks) and tp=4", [8]),
    ({"fold": {"pp": 8}, "model": {"layers": 7}}, "fold.pp", 8, "makes 8 stages (pp=8 × 1) of 7 blocks", ["1…7"]),
    ({"fold": {"pp": 2}, "schedule": {"stage_layers": [3, 4]}}, "schedule.stage_layers", [3, 4],
     "must be 2 numbers of blocks (pp=2 × 1 virtual stages), each at least 1, 8 in sum", ["null", [4, 4]]),
    ({"fold": {"pp": 2}, "schedule": {"stage_layers": [3, 3, 2]}}, "schedule.stage_layers", [3, 3, 2], "must be 2 numbers",
     ["null", [4, 4]]),
    ({"schedule": {"stage_layers": [4, 4]}}, "schedule.stage_layers", [4, 4], "must be 1 numbers of blocks (pp=1",
     ["null", [8]]),
    ({"fold": {"pp": 4}, "schedule": {"virtual_stages": 3}}, "schedule.virtual_stages", 3,
     "makes 12 stages (pp=4 × 3) of 8 blocks", ["1…2"]),
    ({"schedule": {"virtual_stages": 2}}, "schedule.virtual_stages", 2, "needs a pipeline, fold.pp above 1", [1]),
    ({"fold": {"pp": 4}, "schedule": {"virtual_stages": 2}, "training": {"global_batch": 12}}, "schedule.virtual_stages", 2,
     "the micro-batches of a step (6) to be a multiple of pp=4", [1]),
    ({"fold": {"tp": 2}, "training": {"global_batch": 10}}, "training.global_batch", 10,
     "must be a multiple of dp × micro_batch = 4 × 1", [8, 12]),
    # schedules
    ({"schedule": {"kind": "sequential", "degree": 2}}, "schedule.degree", 2, "kind=sequential cuts nothing", [1]),
    ({"schedule": {"kind": "stream", "slices": [64]}}, "schedule.slices", [64], "has no meaning with degree=1", ["null"]),
    ({"schedule": {"kind": "stream", "backward": "aaam"}}, "schedule.backward", "aaam", "has no meaning with degree=1", ["null"]),
    ({"schedule": {"kind": "list", "backward": "aaam"}}, "schedule.backward", "aaam", "list orders both directions", ["null"]),
    ({"schedule": {"kind": "aaam", "backward": "weave", "degree": 2}}, "schedule.backward", "weave",
     "weave orders both directions", ["null"]),
    ({"schedule": {"kind": "weave", "ahead": 2}}, "schedule.ahead", 2, "has no meaning with kind=weave", ["null"]),
    ({"schedule": {"kind": "stream", "degree": 200}}, "schedule.degree", 200, "at most 64 slices", ["1…64"]),
    ({"schedule": {"kind": "stream", "degree": 2, "slices": [50, 12]}}, "schedule.slices", [50, 12],
     "must be 2 lengths, at least 1, that sum to seq_len=64", ["null", [32, 32]]),
    ({"fold": {"tp": 2, "cp": 2}, "schedule": {"kind": "aaam", "degree": 2, "slices": [34, 30]}}, "schedule.slices", [34, 30],
     "must be 2 lengths, multiples of 4, that sum", ["null", [32, 32]]),
    ({"schedule": {"kind": "stream", "degree": 2, "slices": [30, 34]}}, "schedule.slices", [30, 34],
     "the first j slices must hold the tokens of the first j MoE micro-batches [32, 32]", ["null", [32, 32]]),
    ({"schedule": {"kind": "stream", "degree": 4, "attention_degree": 2, "slices": [16] * 4}}, "schedule.slices", [16] * 4,
     "must be 2 lengths, at least 1, that sum to seq_len=64", ["null", [32, 32]]),
    ({"schedule": {"kind": "moe_only", "degree": 2, "slices": [32, 32]}}, "schedule.slices", [32, 32],
     "kind=moe_only does not cut attention", ["null"]),
    ({"schedule": {"kind": "stream", "degree": 2}, "model": {"router": {"capacity_factor": 1.0, "drop_scope": "sequence"}}},
     "schedule.degree", 2, "drop=probability with drop_scope=sequence needs an uncut sequence", [1]),
    ({"fold": {"tp": 2}, "schedule": {"kind": "stream", "degree": 4},
      "model": {"router": {"capacity_factor": 1.0, "drop_scope": "sequence", "drop": "position"}}},
     "schedule.slicing", "time_uniform", "needs equal slices where ranks share a sequence", ["token_uniform"]),
    ({"fold": {"tp": 2}, "schedule": {"kind": "stream", "degree": 4, "attention_degree": 2, "slicing": "token_uniform"},
      "model": {"router": {"capacity_factor": 1.0, "drop_scope": "sequence", "drop": "position"}}},
     "schedule.attention_degree", 2, "needs equal slices where ranks share a sequence (tp, cp), as many as pieces", ["null"]),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "field", "value", "rule", "legal"), BAD_FOLDS, ids=[str(bad[0]) for bad in BAD_FOLDS])
def test_folds_that_do_not_fit_are_refused_with_what_would(sections, field, value, rule, legal):
    with pytest.raises(UserError) as error:
        Recipe.parse(folded(**sections))
    found = error.value
    given = list(found.value) if isinstance(found.value, tuple) else found.value
    assert (found.field, given, found.legal) == (field, value, legal)
    assert rule in found.rule
    assert str(found).startswith(f"{field}=")
    assert "\n" not in str(found)


@pytest.mark.parametrize("kind", ["stream", "list", "moe_only"])
def test_attention_may_have_fewer_slices_than_pieces(kind):
    given = {"kind": kind, "degree": 4, "degrees": [1, 2, 4], "slicing": "token_uniform"}
    slices = {None: (16,) * 4, 2: (32, 32), 1: (64,)} if kind != "moe_only" else {1: (64,), None: (64,)}
    for fewer, lengths in slices.items():
        recipe = Recipe.parse(folded(schedule={**given, "attention_degree": fewer}))
        assert recipe.slicing == Slicing(lengths, (16,) * 4)
        # Degrees that training tries have no more slices than pieces.
        counts = {degree: ordering.slicing and len(ordering.slicing.attention) for degree, ordering in recipe.orderings.items()}
        assert counts == {1: None, 2: min(2, len(lengths)), 4: len(lengths)}
    given_lengths = folded(schedule={"kind": "aaam", "degree": 4, "attention_degree": 2, "slices": [40, 24]})
    assert Recipe.parse(given_lengths).slicing == Slicing((40, 24), (16,) * 4)


_WITHOUT_ASSERTIONS = """
from dataclasses import replace
from foldray import Recipe, UserError
from foldray.fold import Fold
from foldray.refold import as_candidate
from tests.foldray.test_recipe import BAD_FOLDS, folded
for sections, field, *_ in BAD_FOLDS:
    try:
        Recipe.parse(folded(**sections))
        print("taken:", sections)
    except UserError:
        pass
legal = as_candidate(Recipe.parse(folded(model={"experts": 12})))
try:
    print("taken:", replace(legal, fold=Fold(8, ep=8)))
except UserError:
    pass
"""


def test_python_without_assertions_refuses_the_same():
    command = [sys.executable, "-O", "-c", _WITHOUT_ASSERTIONS]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize("fold", [{"tp": 3}, {"tp": 4, "cp": 2, "pp": 2}, {"ep": 3, "etp": 2}, {"pp": 16}, {"tp": 5, "ep": 7}])
def test_the_nearest_legal_folds_that_a_refusal_names_are_legal(fold):
    with pytest.raises(UserError) as error:
        Recipe.parse(folded(fold=fold))
    options = error.value.rule.split("nearest legal folds: ")[1].split("; ")
    assert len(options) == 3
    for option in options:
        sizes = {axis: int(size) for axis, size in (part.split("=") for part in option.split())}
        recipe = Recipe.parse(folded(fold={axis: sizes[axis] for axis in ("tp", "cp", "pp", "ep", "etp")}))
        assert (recipe.placed_fold.dp, recipe.placed_fold.edp) == (sizes["dp"], sizes["edp"])


@pytest.mark.parametrize(
    "error",
    [UserError("a.b", 3, "is odd", [2, 4]), UserError("a", "", "is empty"), MissingPackage("a", "x", "p", "pip install p")],
)
def test_errors_travel_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.field) == (type(error), str(error), error.field)


def test_every_key_is_described_once_and_its_default_is_legal():
    rows = list(describe(Recipe))
    keys = [key for key, *_ in rows]
    assert len(set(keys)) == len(keys)
    assert {"name", "training.steps", "model.router.drop", "data.validation.fraction", "cluster.workers"} <= set(keys)
    for key, legal, default, _ in rows:
        if "|" in legal and default != "required":
            choices = legal.split("|")
            assert default in choices or "null" in choices, key


def test_off_is_a_word_though_yaml_takes_it_for_a_number():
    path = ROOT / "recipes" / "quickstart.yaml"
    assert [Recipe.load(path, [f"schedule.graphs={word}"]).schedule.graphs for word in ("off", "check")] == ["off", "check"]


def test_every_key_is_described_in_whole_sentences():
    for key, _, _, meaning in describe(Recipe):
        assert re.fullmatch(r"[A-Z`].{15,}\.", meaning), f"{key}: {meaning!r}"
    for name, about in sections(Recipe):
        assert about.endswith("."), name


def test_the_page_of_keys_is_what_the_code_says():
    path = ROOT / "docs" / "recipe.md"
    assert path.read_text() == page(), "run `make docs`"
    assert all(f"| `{key}` |" in page() for key, *_ in describe(Recipe))


@pytest.mark.parametrize("width", [20, 72, 100, 500])
def test_the_help_of_keys_fits_the_terminal(width):
    text = key_help(width=width) + "\n" + key_help(tuning=True, width=width)
    assert max(map(len, text.split("\n"))) <= max(50, min(width, 100))
    together = " ".join(text.split())
    for key, _, _, meaning in describe(Recipe):
        assert f" {key} (" in together
        assert " ".join(meaning.split()) in together

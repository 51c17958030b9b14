"""Model sizes against what was published; the parameter table and the FLOPs against counts by hand."""

import pytest
from pydantic import ValidationError

from foldray import UserError
from foldray.spec import PRESETS, ModelSpec, RouterSpec, count_parameters, forward_flops_per_token, parameter_table, step_flops


# Totals as their makers state them; DeepSeek's is that of deepseek-moe-16b-base.
@pytest.mark.parametrize(
    ("preset", "total"),
    [
        ("Mixtral-8x22B", 140.6e9),
        ("Qwen2-57B-A14B", 57.4e9),
        ("Qwen3-235B-A22B", 235.1e9),
        ("GPT-OSS-120B", 116.8e9),
        ("DeepSeek-MoE", 16.4e9),
    ],
)
def test_parameter_totals(preset, total):
    assert count_parameters(ModelSpec(preset=preset)) == pytest.approx(total, rel=2e-3)


# layers, MoE layers, hidden, heads, kv heads, head size, dense inner, expert inner, experts, top-k, shared inner, vocabulary,
# gated. From the papers' tables and the released configurations; None where a model has no dense block.
PUBLISHED = {
    "Mixtral-8x22B": (56, 56, 6144, 48, 8, 128, None, 16384, 8, 2, 0, 32000, True),
    "Mixtral-8x22B-G8T8": (56, 56, 6144, 48, 8, 128, None, 2048, 64, 8, 0, 32000, True),
    "Qwen2-57B-A14B": (28, 28, 3584, 28, 4, 128, 18944, 2560, 64, 8, 20480, 151936, True),
    "Llama3-8x70B": (80, 80, 8192, 64, 8, 128, None, 28672, 8, 2, 0, 128256, True),
    "GPT-MoE-S": (6, 3, 512, 8, 8, 64, 2048, 1024, 16, 1, 0, 50257, False),
    "GPT-MoE-M": (6, 3, 768, 8, 8, 96, 3072, 1536, 16, 1, 0, 50257, False),
    "GPT-MoE-L": (12, 6, 1024, 8, 8, 128, 4096, 2048, 16, 1, 0, 50257, False),
    "DeepSeek-MoE": (28, 27, 2048, 16, 16, 128, 10944, 1408, 64, 4, 2816, 102400, True),
    "GPT-OSS-120B": (36, 36, 2880, 64, 8, 64, 2880, 2880, 128, 4, 0, 201088, True),
    "Qwen3-235B-A22B": (94, 94, 4096, 64, 4, 128, 12288, 1536, 128, 8, 0, 151936, True),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_sizes(preset):
    model = ModelSpec(preset=preset)
    layers, moe_layers, hidden, heads, kv, head, dense, expert, experts, topk, shared, vocab, gated = PUBLISHED[preset]
    assert (model.layers, len(model.moe_layers), model.hidden) == (layers, moe_layers, hidden)
    assert (model.heads, model.kv_heads, model.head_dim) == (heads, kv, head)
    assert dense in (None, model.ffn_hidden)
    assert (model.expert_hidden, model.experts, model.topk, model.shared_hidden) == (expert, experts, topk, shared)
    assert (model.vocab, model.ffn == "gated_silu") == (vocab, gated)


def test_every_published_model_is_a_preset():
    assert {name.lower() for name in PUBLISHED} == {name for name in PRESETS if not name.startswith("tiny")}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_names_in_any_case(preset):
    assert ModelSpec(preset=preset.upper()) == ModelSpec(preset=preset.title()) == ModelSpec(preset=preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dumped_model_is_the_same_model(preset):
    model = ModelSpec(preset=preset)
    assert ModelSpec.model_validate(model.model_dump()) == model
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model


def test_every_other_key_changes_the_preset():
    model = ModelSpec(preset="tiny-fine", layers=6, router={"scale": 2.0})
    assert (model.layers, model.router.scale) == (6, 2.0)
    assert (model.hidden, model.router.score, model.router.bias_rate) == (128, "sigmoid", 1e-3)
    assert PRESETS["tiny-fine"]["layers"] == 4
    assert "scale" not in PRESETS["tiny-fine"]["router"]


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"did you mean 'mixtral-8x22b'\?.*legal: .*qwen3-235b-a22b"):
        ModelSpec(preset="mixtral-8x2b")


@pytest.mark.parametrize(
    ("layers", "dense_first", "moe_every", "moe"),
    [
        (4, 0, 1, (0, 1, 2, 3)),
        (6, 0, 2, (1, 3, 5)),
        (5, 0, 3, (2,)),
        (4, 1, 1, (1, 2, 3)),
        (7, 2, 2, (3, 5)),
        (3, 3, 1, ()),
    ],
)
def test_which_blocks_are_moe(layers, dense_first, moe_every, moe):
    model = ModelSpec(preset="tiny", layers=layers, dense_first=dense_first, moe_every=moe_every)
    assert model.moe_layers == moe
    assert tuple(layer for layer in range(layers) if model.is_moe(layer)) == moe


@pytest.mark.parametrize("preset", ["tiny", "tiny-gpt", "tiny-fine", "gpt-moe-s", "deepseek-moe"])
def test_parameter_table(preset):
    model = ModelSpec(preset=preset)
    table = parameter_table(model)
    names = [parameter.name for parameter in table]
    assert len(set(names)) == len(names)
    assert [parameter.layer for parameter in table] == sorted(parameter.layer for parameter in table)
    assert ("head.weight" in names) is not model.tied_embeddings
    experts = [parameter for parameter in table if parameter.gradient_class == "expert"]
    assert {parameter.name for parameter in experts} == {name for name in names if ".experts." in name}
    assert len(experts) == 2 * model.experts * len(model.moe_layers)
    assert {parameter.layer for parameter in experts} == set(model.moe_layers)
    ones = {parameter.name for parameter in table if parameter.init is None}
    assert ones == {name for name in names if name.endswith("norm.weight")}


def small(**changes) -> ModelSpec:
    sizes = {
        "layers": 2, "hidden": 4, "heads": 2, "kv_heads": 1, "head_dim": 2, "ffn_hidden": 6, "experts": 3, "topk": 2,
        "expert_hidden": 5, "shared_hidden": 7, "vocab": 11, "dense_first": 1,
    }  # fmt: skip
    return ModelSpec(**{**sizes, **changes})


def test_parameters_of_a_small_model_by_hand():
    attention = 4 * (4 + 2 + 2) + 4 * 4
    dense = 3 * 4 * 6
    moe = 4 * 3 + 3 * (3 * 4 * 5) + 3 * 4 * 7
    norms = 5 * 4
    assert count_parameters(small()) == 2 * attention + dense + moe + norms + 2 * (11 * 4)
    assert count_parameters(small(tied_embeddings=True)) == count_parameters(small()) - 11 * 4
    assert count_parameters(small(positions="learned", max_positions=9)) == count_parameters(small()) + 9 * 4
    assert count_parameters(small(norm="layernorm")) == count_parameters(small()) + norms
    assert count_parameters(small(ffn="gelu")) == count_parameters(small()) - 4 * 6 - 3 * (4 * 5) - 4 * 7


def test_flops_of_a_small_model_by_hand():
    # One token; two per multiply-add. Three tokens see 1, 2 and 3 keys: two on average.
    qkv, out = 2 * 4 * 8, 2 * 4 * 4
    scores_and_values = 2 * (2 * 2 * 2 * 2)  # two heads of two, two keys
    attention = qkv + out + scores_and_values
    dense = 3 * (2 * 4 * 6)
    moe = 2 * 4 * 3 + 2 * 3 * (2 * 4 * 5) + 3 * (2 * 4 * 7)
    head = 2 * 4 * 11
    assert forward_flops_per_token(small(), 3) == 2 * attention + dense + moe + head == 920
    assert forward_flops_per_token(small(), 3, causal=False) == 920 + 2 * scores_and_values / 2
    assert forward_flops_per_token(small(ffn="gelu"), 3) == 920 - 2 * 4 * 6 - 2 * (2 * 4 * 5) - 2 * 4 * 7
    assert step_flops(small(), 3, sequences=5) == 3 * 920 * 3 * 5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_heads": 3}, "model.kv_heads"),
        ({"head_dim": 31}, "model.head_dim"),
        ({"topk": 9}, "model.topk"),
        ({"dense_first": 5}, "model.dense_first"),
        ({"router": {"score": "sigmoid", "softmax": "before_topk"}}, "model.router.softmax"),
        ({"router": {"bias_rate": 0.1}}, "model.router.bias_rate"),
        ({"router": {"normalize": True}}, "model.router.normalize"),
        ({"router": {"pad": True}}, "model.router.pad"),
    ],
)
def test_models_that_make_no_sense_are_refused(changes, field):
    with pytest.raises(UserError) as error:
        ModelSpec(preset="tiny", **changes)
    assert error.value.field == field


def test_specs_are_frozen_and_strict():
    with pytest.raises(ValidationError, match="frozen"):
        ModelSpec(preset="tiny").layers = 3
    with pytest.raises(ValidationError, match="colour"):
        RouterSpec(colour="red")

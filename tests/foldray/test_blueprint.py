"""Model sizes against published ones; the parameter table and FLOPs against counts by hand; the boxes that ranks hold."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from foldray import Fold, UserError
from foldray.blueprint import (
    PRESETS,
    Layout,
    ModelSpec,
    Ownership,
    RouterSpec,
    Stage,
    check_length,
    count_parameters,
    forward_flops_per_token,
    half_flops,
    make_stages,
    parameter_table,
    step_flops,
)
from foldray.fold import divisors
from tests.gate import examples


# Totals as the models' makers state them (those of Moonlight and Qwen3-Next without embedding and head). DeepSeek's is that of
# deepseek-moe-16b-base, and Kimi Linear's that of the class in transformers (its makers say 48 B).
@pytest.mark.parametrize(
    ("preset", "total"),
    [
        ("Mixtral-8x22B", 140.6e9),
        ("Qwen2-57B-A14B", 57.4e9),
        ("Qwen3-235B-A22B", 235.1e9),
        ("GPT-OSS-120B", 116.8e9),
        ("DeepSeek-MoE", 16.4e9),
        ("Mixtral-8x7B", 46.7e9),
        ("Qwen3-30B-A3B", 30.5e9),
        ("OLMoE-1B-7B", 6.92e9),
        ("GLM-4.5-Air", 106.85e9),
        ("MiniMax-M2", 228.7e9),
        ("ERNIE-4.5-21B-A3B", 21.83e9),
        ("GPT-OSS-20B", 20.91e9),
        ("DeepSeek-V2-Lite", 15.7e9),
        ("DeepSeek-V3", 671e9),
        ("Kimi-K2", 1026e9),
        ("Moonlight-16B-A3B", 15.29e9 + 2 * 163840 * 2048),
        ("GLM-4.7-Flash", 29.9e9),
        ("dots.llm1", 142.8e9),
        ("Solar-Open-100B", 102.6e9),
        ("Hy3", 295e9),
        ("Trinity-Mini", 26.1e9),
        ("Granite-3.1-3B-A800M", 3.3e9),
        ("Qwen3-Next-80B-A3B", 79e9 + 2 * 151936 * 2048),
        ("Kimi-Linear-48B-A3B", 49.12e9),
    ],
)
def test_parameter_totals(preset, total):
    assert count_parameters(ModelSpec(preset=preset)) == pytest.approx(total, rel=2e-3)


# layers, MoE layers, hidden, heads, kv heads, head size, dense inner, expert inner, experts, top-k, shared inner, vocabulary,
# gated. The sizes are from the papers' tables and the released configurations. None: the model has no dense block.
PUBLISHED = {
    "Mixtral-8x22B": (56, 56, 6144, 48, 8, 128, None, 16384, 8, 2, 0, 32000, True),
    "Mixtral-8x22B-G8T8": (56, 56, 6144, 48, 8, 128, None, 2048, 64, 8, 0, 32000, True),
    "Qwen2-57B-A14B": (28, 28, 3584, 28, 4, 128, 18944, 2560, 64, 8, 20480, 151936, True),
    "Llama3-8x70B": (80, 80, 8192, 64, 8, 128, None, 28672, 8, 2, 0, 128256, True),
    "GPT-MoE-S": (6, 3, 512, 8, 8, 64, 2048, 1024, 16, 1, 0, 50257, False),
    "GPT-MoE-M": (6, 3, 768, 8, 8, 96, 3072, 1536, 16, 1, 0, 50257, False),
    "GPT-MoE-L": (12, 6, 1024, 8, 8, 128, 4096, 2048, 16, 1, 0, 50257, False),
    "DeepSeek-MoE": (28, 27, 2048, 16, 16, 128, 10944, 1408, 64, 4, 2816, 102400, True),
    "GPT-OSS-120B": (36, 36, 2880, 64, 8, 64, None, 2880, 128, 4, 0, 201088, False),
    "Qwen3-235B-A22B": (94, 94, 4096, 64, 4, 128, 12288, 1536, 128, 8, 0, 151936, True),
    "Mixtral-8x7B": (32, 32, 4096, 32, 8, 128, None, 14336, 8, 2, 0, 32000, True),
    "Qwen3-30B-A3B": (48, 48, 2048, 32, 4, 128, 6144, 768, 128, 8, 0, 151936, True),
    "OLMoE-1B-7B": (16, 16, 2048, 16, 16, 128, None, 1024, 64, 8, 0, 50304, True),
    "GLM-4.5-Air": (46, 45, 4096, 96, 8, 128, 10944, 1408, 128, 8, 1408, 151552, True),
    "MiniMax-M2": (62, 62, 3072, 48, 8, 128, None, 1536, 256, 8, 0, 200064, True),
    "ERNIE-4.5-21B-A3B": (28, 27, 2560, 20, 4, 128, 12288, 1536, 64, 6, 3072, 103424, True),
    "GPT-OSS-20B": (24, 24, 2880, 64, 8, 64, None, 2880, 32, 4, 0, 201088, False),
    "DeepSeek-V2-Lite": (27, 26, 2048, 16, 16, 192, 10944, 1408, 64, 6, 2816, 102400, True),
    "DeepSeek-V3": (61, 58, 7168, 128, 128, 192, 18432, 2048, 256, 8, 2048, 129280, True),
    "Moonlight-16B-A3B": (27, 26, 2048, 16, 16, 192, 11264, 1408, 64, 6, 2816, 163840, True),
    "Kimi-K2": (61, 60, 7168, 64, 64, 192, 18432, 2048, 384, 8, 2048, 163840, True),
    "GLM-4.7-Flash": (47, 46, 2048, 20, 20, 256, 10240, 1536, 64, 4, 1536, 154880, True),
    "dots.llm1": (62, 61, 4096, 32, 32, 128, 10944, 1408, 128, 6, 2816, 152064, True),
    "Solar-Open-100B": (48, 48, 4096, 64, 8, 128, None, 1280, 128, 8, 1280, 196608, True),
    "Trinity-Mini": (32, 30, 2048, 32, 4, 128, 6144, 1024, 128, 8, 1024, 200192, True),
    "Granite-3.1-3B-A800M": (32, 32, 1536, 24, 8, 64, None, 512, 40, 8, 0, 49155, True),
    "Qwen3-Next-80B-A3B": (48, 48, 2048, 16, 2, 256, None, 512, 512, 10, 512, 151936, True),
    "Kimi-Linear-48B-A3B": (27, 26, 2304, 32, 32, 192, 9216, 1024, 256, 8, 1024, 163840, True),
    "Hy3": (80, 79, 4096, 64, 8, 128, 13312, 1536, 192, 8, 1536, 120832, True),
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


def test_deepseeks_module_for_a_further_token_has_its_published_size() -> None:
    """11.5 B parameters, without the embedding and the head, which it shares (`README_WEIGHTS.md` of DeepSeek-V3)."""
    plain, further = (ModelSpec(preset="deepseek-v3", mtp_depth=depth) for depth in (0, 1))
    assert count_parameters(further) - count_parameters(plain) == pytest.approx(11.5e9, rel=0.01)
    assert further.moe_layers == (*plain.moe_layers, 61)
    per_token = [forward_flops_per_token(model, 1) for model in (plain, further)]
    block = sum(half_flops(plain, 1))
    assert per_token[1] - per_token[0] == block + 2 * 7168 * 129280 + 2 * 2 * 7168 * 7168


@pytest.mark.parametrize("change", [{}, {"norm": "layernorm"}, {"dense_first": 3, "shared_hidden": 8}, {"tied_embeddings": True}])
def test_the_table_has_all_parameters_of_further_tokens(change: dict) -> None:
    model = ModelSpec(preset="tiny", **{"layers": 3, "mtp_depth": 2, **change})
    table = parameter_table(model)
    assert sum(row.count for row in table) == count_parameters(model)
    assert len({row.name for row in table}) == len(table)
    assert sum(row.name.endswith("mtp.projection") for row in table) == 2


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
    assert len(experts) == (3 if model.ffn == "gated_silu" else 2) * model.experts * len(model.moe_layers)
    assert {parameter.layer for parameter in experts} == set(model.moe_layers)
    assert {parameter.expert for parameter in table} == {None, *range(model.experts)}
    replicated = {parameter.name for parameter in table if parameter.gradient_class == "replicated"}
    assert replicated == {name for name in names if "norm" in name or "router" in name or name.startswith("positions")}
    assert all((parameter.cut is None) == (parameter.name in replicated) for parameter in table)
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
    # FLOPs of one token, with two for each multiply-add. Three tokens see 1, 2 and 3 keys: two on average.
    qkv, out = 2 * 4 * 8, 2 * 4 * 4
    scores_and_values = 2 * (2 * 2 * 2 * 2)  # two heads of width two, two keys
    attention = qkv + out + scores_and_values
    dense = 3 * (2 * 4 * 6)
    moe = 2 * 4 * 3 + 2 * 3 * (2 * 4 * 5) + 3 * (2 * 4 * 7)
    head = 2 * 4 * 11
    assert forward_flops_per_token(small(), 3) == 2 * attention + dense + moe + head == 920
    assert forward_flops_per_token(small(), 3, causal=False) == 920 + 2 * scores_and_values / 2
    assert forward_flops_per_token(small(ffn="gelu"), 3) == 920 - 2 * 4 * 6 - 2 * (2 * 4 * 5) - 2 * 4 * 7
    assert step_flops(small(), 3, sequences=5) == 3 * 920 * 3 * 5


def test_specs_are_frozen_and_strict():
    with pytest.raises(ValidationError, match="frozen"):
        ModelSpec(preset="tiny").layers = 3
    with pytest.raises(ValidationError, match="colour"):
        RouterSpec(colour="red")


@pytest.mark.parametrize(
    ("layers", "pp", "virtual", "expected"),
    [
        (4, 1, 1, [4]),
        (4, 4, 1, [1, 1, 1, 1]),
        (7, 3, 1, [3, 2, 2]),
        (7, 2, 2, [2, 2, 2, 1]),
        (6, 2, 3, [1] * 6),
    ],
)
def test_stages_are_even_and_the_longer_ones_come_first(layers, pp, virtual, expected):
    stages = make_stages(layers, pp, virtual)
    assert [len(stage.layers) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.number for stage in stages] == list(range(pp * virtual))
    assert [(stage.first, stage.last) for stage in stages] == [(i == 0, i == pp * virtual - 1) for i in range(pp * virtual)]


def test_stages_of_given_sizes():
    first, second, third, fourth = make_stages(9, 2, 2, (1, 3, 4, 1))
    assert first == Stage(0, 0, range(0, 1), True, False)
    assert (second.layers, third.layers) == (range(1, 4), range(4, 8))
    assert fourth == Stage(3, 1, range(8, 9), False, True)


def test_a_stage_without_blocks_is_refused():
    with pytest.raises(UserError, match=r"^schedule\.stage_layers=\[0, 4\]: .*each at least 1, 4 in sum"):
        make_stages(4, 2, 1, [0, 4])


# All sizes that a fold cuts are multiples of eight, the largest size of an axis.
WIDE = {
    "layers": 6, "hidden": 4, "heads": 8, "kv_heads": 8, "head_dim": 2, "ffn_hidden": 16, "experts": 8, "topk": 2,
    "expert_hidden": 8, "shared_hidden": 8, "vocab": 16, "dense_first": 1, "moe_every": 2, "max_positions": 3,
}  # fmt: skip


@st.composite
def ownerships(draw) -> Ownership:
    """Draw a legal fold and stages for a small model."""
    stage, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 3]))
    tp, ep = draw(st.sampled_from(divisors(stage))), draw(st.sampled_from(divisors(stage)))
    cp, etp = draw(st.sampled_from(divisors(stage // tp))), draw(st.sampled_from(divisors(stage // ep)))
    order, moe_order = ("-".join([*draw(st.permutations(axes)), "pp"]) for axes in (["tp", "cp", "dp"], ["etp", "ep", "edp"]))
    fold = Fold(stage * pp, tp, cp, pp, ep, etp, order, moe_order, offset=draw(st.sampled_from([0, 5])))
    changes = {
        "tied_embeddings": draw(st.booleans()),
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "positions": draw(st.sampled_from(["rope", "learned"])),
        "ffn": draw(st.sampled_from(["gated_silu", "gelu"])),
        "kv_heads": draw(st.sampled_from([1, 2, 8])),
        "attention_bias": draw(st.sampled_from(["none", "all"])),
    }
    virtual = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    cuts = sorted(draw(st.permutations(range(1, 6)))[: pp * virtual - 1])
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 6], strict=True))
    return Ownership(ModelSpec(**WIDE | changes), fold, virtual, draw(st.sampled_from([None, sizes])))


def ranks_of(ownership: Ownership) -> range:
    fold = ownership.fold
    return range(fold.offset, fold.offset + fold.world_size)


@given(ownerships())
@examples(60)
def test_ranks_boxes_cover_the_model_and_each_element_is_counted_once(ownership):
    copies = ownership.model.copies_keys(ownership.fold.tp)
    table = {spec.name: spec for spec in parameter_table(ownership.model, copies)}
    held, counted = ({name: np.zeros(spec.shape, int) for name, spec in table.items()} for _ in range(2))
    for rank in ranks_of(ownership):
        pieces = ownership.pieces(rank)
        for name, piece in pieces.items():
            assert held[name][piece.box].shape == piece.shape
            held[name][piece.box] += 1
        for name in ownership.counted(rank):
            counted[name][pieces[name].box] += 1
    fold = ownership.fold
    times = {"dense": fold.dp * fold.cp, "replicated": fold.tp * fold.dp * fold.cp, "expert": fold.edp}
    for name, spec in table.items():
        twice = 2 if name == "embedding.weight" and ownership.model.tied_embeddings and fold.pp > 1 else 1
        assert (held[name] == twice * times[spec.gradient_class]).all(), name
        assert (counted[name] == 1).all(), name


@given(ownerships())
@examples(60)
def test_every_block_has_one_pipeline_position_and_every_expert_its_ranks(ownership):
    fold = ownership.fold
    blocks, experts = Counter(), Counter()
    for rank in ranks_of(ownership):
        position = fold.attention.coordinate(rank)["pp"]
        stages = ownership.held_stages(rank)
        assert [stage.number % fold.pp for stage in stages] == [position] * ownership.virtual_stages
        blocks.update(layer for stage in stages for layer in stage.layers)
        experts.update(ownership.experts(rank))
        layers = {spec.layer for spec in (piece.spec for piece in ownership.pieces(rank).values())}
        assert layers - {-1, 6} == {layer for stage in stages for layer in stage.layers}
    stage_ranks = fold.world_size // fold.pp
    assert blocks == dict.fromkeys(range(6), stage_ranks)
    assert experts == dict.fromkeys(range(8), fold.pp * fold.etp * fold.edp)


def test_a_tied_embedding_stands_at_both_ends_and_the_first_one_counts():
    ownership = Ownership(ModelSpec(**WIDE, tied_embeddings=True), Fold(3, pp=3))
    assert ["embedding.weight" in ownership.pieces(rank) for rank in range(3)] == [True, False, True]
    assert ["embedding.weight" in ownership.counted(rank) for rank in range(3)] == [True, False, False]
    assert "head.weight" not in ownership.pieces(2)


def test_the_pieces_of_a_rank_by_hand():
    ownership = Ownership(ModelSpec(**WIDE), Fold(8, tp=2, cp=2, ep=2, etp=4))
    # Rank 5: tp 1, cp 0, dp 1; etp 1, ep 1.
    pieces = ownership.pieces(5)
    assert (pieces["embedding.weight"].offset, pieces["embedding.weight"].shape) == ((8, 0), (8, 4))
    assert (pieces["blocks.1.attention.query"].offset, pieces["blocks.1.attention.query"].shape) == ((0, 8), (4, 8))
    assert (pieces["blocks.1.attention.out"].offset, pieces["blocks.1.attention.out"].shape) == ((8, 0), (8, 4))
    assert pieces["blocks.0.ffn.down"].box == (slice(8, 16), slice(0, 4))
    assert pieces["blocks.2.moe.experts.4.gate"].box == (slice(0, 4), slice(2, 4))
    assert pieces["blocks.2.moe.experts.7.down"].box == (slice(2, 4), slice(0, 4))
    assert "blocks.2.moe.experts.3.gate" not in pieces
    assert pieces["blocks.2.moe.router.weight"].box == (slice(0, 4), slice(0, 8))
    # At dp 1 the pieces of attention are copies. The experts have no copies, so every rank counts its own.
    assert set(ownership.counted(5)) == {name for name in pieces if ".experts." in name}


@st.composite
def layouts(draw) -> tuple[int, int, int]:
    """Draw (length, cp, tp) such that the length can be cut."""
    cp, tp = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    unit = tp if cp == 1 else np.lcm(2 * cp, tp * cp)
    return int(unit) * draw(st.integers(1, 4)), cp, tp


@given(layouts())
def test_shards_partition_the_sequence_and_pieces_the_shards(sizes):
    length, cp, tp = sizes
    shards = [Layout(cp, tp, i).shard(range(length)) for i in range(cp)]
    assert sorted(position for shard in shards for position in shard) == list(range(length))
    for i, shard in enumerate(shards):
        assert shard == sorted(shard), "in natural order"
        assert [position for chunk in Layout(cp, tp, i).chunks(range(length)) for position in chunk] == shard
        pieces = [Layout(cp, tp, i, j).piece(length) for j in range(tp)]
        assert [position for piece in pieces for position in piece] == shard
        assert {len(piece) for piece in pieces} == {length // (cp * tp)}


@given(layouts())
def test_context_parallel_ranks_have_the_same_causal_work(sizes):
    length, cp, tp = sizes
    seen = {sum(position + 1 for position in Layout(cp, tp, i).shard(range(length))) for i in range(cp)}
    assert seen == {length * (length + 1) // (2 * cp)}


def test_the_zigzag_by_hand():
    assert [Layout(2, 1, i).shard(range(8)) for i in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [Layout(2, 2, 1, j).piece(8) for j in range(2)] == [[2, 3], [4, 5]]
    assert Layout(1, 2, 0, 1).piece(8) == [4, 5, 6, 7]
    assert Layout(3, 1, 1).chunks(range(12)) == (range(2, 4), range(8, 10))


@pytest.mark.parametrize(
    ("length", "cp", "tp", "legal"),
    [(7, 1, 2, [6, 8]), (10, 2, 1, [8, 12]), (12, 2, 4, [8, 16]), (3, 4, 1, [8]), (3, 1, 4, [4]), (20, 2, 3, [12, 24])],
)
def test_lengths_that_cannot_be_cut_are_refused_with_the_nearest_that_can(length, cp, tp, legal):
    for refused in (lambda: check_length(length, cp, tp), lambda: Layout(cp, tp).piece(length)):
        with pytest.raises(UserError, match=f"cp={cp} .* tp={tp}") as error:
            refused()
        assert (error.value.field, error.value.value, error.value.legal) == ("data.seq_len", length, legal)
    for good in legal:
        check_length(good, cp, tp)


def test_a_slice_that_cannot_be_cut_names_the_slices() -> None:
    with pytest.raises(UserError) as error:
        Layout(2, 1, slices=(6, 10)).piece(16)
    assert (error.value.field, error.value.value) == ("schedule.slices", 6)


@pytest.mark.parametrize(
    ("fold", "model", "field", "rule", "legal"),
    [
        ({"tp": 8}, {"heads": 12, "kv_heads": 12}, "fold.tp", "must divide model.heads=12", [1, 2, 4]),
        ({"tp": 8}, {"kv_heads": 4, "qk_norm": "all"}, "fold.tp", "must divide model.kv_heads=4", [1, 2, 4]),
        ({"tp": 4}, {"ffn_hidden": 18}, "fold.tp", "must divide model.ffn_hidden=18", [1, 2]),
        ({"tp": 8}, {"shared_hidden": 12}, "fold.tp", "must divide model.shared_hidden=12", [1, 2, 4]),
        ({"ep": 8}, {"experts": 12}, "fold.ep", "must divide model.experts=12", [1, 2, 4]),
        ({"etp": 4}, {"expert_hidden": 6}, "fold.etp", "must divide model.expert_hidden=6", [1, 2]),
    ],
)
def test_folds_that_do_not_divide_the_model_are_refused(fold, model, field, rule, legal):
    with pytest.raises(UserError) as error:
        Ownership(ModelSpec(**{**WIDE, **model}), Fold(8, **fold))
    assert (error.value.field, error.value.value, error.value.rule, error.value.legal) == (
        field, *fold.values(), rule, legal
    )  # fmt: skip


def test_a_vocabulary_is_padded_to_a_multiple_of_tp():
    for vocab, legal in ((257, 264), (1, 8)):
        with pytest.raises(UserError) as error:
            Ownership(ModelSpec(**{**WIDE, "vocab": vocab}), Fold(8, tp=8))
        assert (error.value.field, error.value.value, error.value.legal) == ("model.vocab", vocab, [legal])
        assert "must be a multiple of fold.tp=8" in error.value.rule
        assert Ownership(ModelSpec(**{**WIDE, "vocab": legal}), Fold(8, tp=8))


def test_sizes_that_a_model_does_not_use_bind_nobody():
    assert Ownership(ModelSpec(**{**WIDE, "ffn_hidden": 3, "dense_first": 0, "moe_every": 1}), Fold(8, tp=8))
    assert Ownership(ModelSpec(**{**WIDE, "shared_hidden": 0}), Fold(8, tp=8))
    assert Ownership(ModelSpec(**{**WIDE, "experts": 3, "expert_hidden": 3, "dense_first": 6}), Fold(8, ep=4, etp=2))

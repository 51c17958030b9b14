"""The model against Hugging Face's Mixtral, its parameter table, and its own parts on other ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from foldray.blueprint import PRESETS, ModelSpec, Ownership, RopeSpec, parameter_table
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import IGNORED, Batch, Transformer
from foldray.model.attention import Place
from foldray.model.attention_mask import AttentionMask
from foldray.model.rotary import rotate, rotation
from tests.foldray.parity import MODEL, model_of

FOLDS = [
    Fold(8, ep=8),
    Fold(8, tp=2, cp=2, ep=2, etp=4),
    Fold(8, tp=4, pp=2, ep=4),
    Fold(8, tp=2, pp=4, etp=2),
    Fold(8, cp=2, pp=2, ep=2, order="cp-tp-dp-pp", moe_order="ep-etp-edp-pp"),
]


def alone(fold: Fold, rank: int) -> Groups:
    """Return the groups of a rank without the other ranks' processes, for code that does not communicate."""
    made = {"is_initialized": lambda: True, "get_world_size": lambda: 8, "get_backend": lambda: "gloo", "new_group": mock.Mock()}
    with mock.patch.multiple("torch.distributed", **made):
        return Groups.create(fold, rank)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, MODEL["vocab"], shape, generator=torch.Generator().manual_seed(seed))


def by_name(model: Transformer, of: Any = lambda parameter: parameter) -> dict[str, torch.Tensor]:
    """Return `of(parameter)` by global name: each local parameter's value, cut into the parameters of the whole model."""
    parameters = dict(model.named_parameters())
    return {name: of(parameters[local])[index] for local, parts in model.global_parts.items() for name, index in parts}


def test_logits_and_gradients_equal_hugging_faces_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    router = {"balance_loss": 0.0, "z_loss": 0.0}
    model = model_of(dtype=torch.float64, shared_hidden=0, head_dim=4, norm_eps=1e-6, router=router)
    spec = model.spec
    config = transformers.MixtralConfig(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.expert_hidden, num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim, num_local_experts=spec.experts,
        num_experts_per_tok=spec.topk, rms_norm_eps=spec.norm_eps, rope_theta=spec.rope_theta, sliding_window=None,
        attn_implementation="eager", experts_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.MixtralForCausalLM(config).double()
    weights = _mixtral(spec, dict(theirs.named_parameters()))
    with torch.no_grad():
        for name, weight in by_name(model).items():
            weights.pop(name).copy_(weight)
    assert not weights
    text = tokens(2, 9)
    logits = theirs(text[:, :-1]).logits
    torch.testing.assert_close(model.logits(text[:, :-1]), logits, atol=1e-6, rtol=1e-5)  # Mixtral's rotary table is float32
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
    model(Batch(text[:, :-1], text[:, 1:]))[0].backward()
    gradients = _mixtral(spec, {name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, gradient in by_name(model, lambda parameter: parameter.grad).items():
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(gradient, gradients[name], atol=1e-6, rtol=1e-4, msg=message)


def _mixtral(spec: ModelSpec, theirs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return Hugging Face's tensors with foldray's names and layout, as views."""
    found = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for i in range(spec.layers):
        b, h = f"blocks.{i}", f"model.layers.{i}"
        found[f"{b}.attention_norm.weight"] = theirs[f"{h}.input_layernorm.weight"]
        found[f"{b}.ffn_norm.weight"] = theirs[f"{h}.post_attention_layernorm.weight"]
        for ours, part in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
            found[f"{b}.attention.{ours}"] = theirs[f"{h}.self_attn.{part}_proj.weight"].mT
        found[f"{b}.moe.router.weight"] = theirs[f"{h}.mlp.gate.weight"].mT
        for expert in range(spec.experts):
            gate, up = theirs[f"{h}.mlp.experts.gate_up_proj"][expert].mT.split(spec.expert_hidden, 1)
            down = theirs[f"{h}.mlp.experts.down_proj"][expert].mT
            found |= {f"{b}.moe.experts.{expert}.{part}": tensor for part, tensor in (("gate", gate), ("up", up), ("down", down))}
    return found


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_builds_exactly_its_parameter_table(preset: str) -> None:
    spec = ModelSpec(preset=preset, layers=3)
    with torch.device("meta"), mock.patch.object(Transformer, "_initialise"):
        model = Transformer(Ownership(spec, Fold(1)), Groups.create(Fold(1)), device="meta")
    built = {name: tuple(tensor.shape) for name, tensor in by_name(model).items()}
    assert built == {parameter.name: parameter.shape for parameter in parameter_table(spec)}


@pytest.mark.parametrize("fold", FOLDS, ids=str)
@pytest.mark.parametrize(
    "model", [{"tied_embeddings": True, "positions": "learned", "norm": "layernorm"}, {"dense_first": 1, "ffn": "gelu"}]
)
def test_every_rank_holds_its_boxes_of_the_one_process_model(fold: Fold, model: dict) -> None:
    whole = by_name(model_of(**{"layers": 4, **model}))
    for rank in range(8):
        part = model_of(fold, alone(fold, rank), **{"layers": 4, **model})
        held = by_name(part)
        assert held.keys() == part.pieces.keys()
        for name, tensor in held.items():
            assert torch.equal(tensor, whole[name][part.pieces[name].box]), f"{name} on rank {rank}"


@pytest.mark.parametrize("tied", [False, True])
def test_the_ops_hold_every_parameter_and_their_losses_add_up(tied: bool) -> None:
    model = model_of(dtype=torch.float64, positions="learned", tied_embeddings=tied, dense_first=1, layers=3)
    kinds = {
        "embed": [0],
        "head": [2],
        "attention": [0, 1, 2],
        "ffn": [0],
        "route": [1, 2],
        "shared": [1, 2],
        "expert": [1, 2],
        "merge": [1, 2],
    }
    held = [p for kind, layers in kinds.items() for layer in layers for p in model.parameters_of(kind, layer)]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len(list(model.parameters())) + tied
    text = tokens(2, 9)
    batch = Batch(text[:, :-1], text[:, 1:])
    logits = model.logits(batch.token_BL)
    language = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.target_BL.flatten())
    torch.testing.assert_close(model(batch)[1].means()[0], language.detach())
    x_BsH = torch.randn(2, 8, model.spec.hidden, dtype=torch.float64)
    parts = [model.head_loss(x_BsH[:, part.start : part.stop], batch, part)[0] for part in (range(5), range(5, 8))]
    torch.testing.assert_close(sum(parts), model.head_loss(x_BsH, batch, range(8))[0])


def test_no_position_sees_a_later_one() -> None:
    model = model_of(router={"capacity_factor": None})
    text = tokens(1, 8)
    changed = text.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 29
    before, after = model.logits(text), model.logits(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


def test_masked_documents_do_not_see_each_other() -> None:
    model = model_of()
    text = tokens(1, 8)
    segments = torch.tensor([[4, 4, 4, 5, 5, 5, 5, 5]])
    changed = text.clone()
    changed[0, 1] = (changed[0, 1] + 1) % 29
    before, after = (model.logits(t, segments) for t in (text, changed))
    torch.testing.assert_close(after[:, 3:], before[:, 3:])
    assert not torch.allclose(after[:, 1:3], before[:, 1:3])
    mask = AttentionMask(range(8), 8, [[range(8)]], 0, segments).mask(range(8), [range(8)])
    assert mask[0, 0].sum().item() == 6 + 15


@pytest.mark.parametrize(
    ("length", "model"),
    [
        (16, {"positions": "learned", "max_positions": 16, "norm": "layernorm"}),
        (16, {"windows": ["chunked:3"]}),
        (16, {"windows": ["sliding:4", "full"], "full_positions": "none", "query_growth": 0.5, "query_growth_positions": 2}),
        (300, {"windows": ["sliding:2", "chunked:4"]}),
        (300, {"positions": "learned", "max_positions": 300, "windows": ["chunked:7"]}),
    ],
    ids=str,
)
def test_a_document_in_a_sequence_is_as_if_alone(length: int, model: dict[str, Any]) -> None:
    whole, text, first = model_of(dtype=torch.float64, router={"capacity_factor": None}, **model), tokens(2, length), (5, 9)
    segments = torch.stack([(torch.arange(length) >= start).long() for start in first])
    found = whole.logits(text, segments)
    for row, start in enumerate(first):
        for part in (slice(0, start), slice(start, length)):
            torch.testing.assert_close(found[row : row + 1, part], whole.logits(text[row : row + 1, part]))


def test_further_tokens_end_with_their_document() -> None:
    text, segments = tokens(1, 16), torch.tensor([[0] * 5 + [3] * 11])
    batch = Batch(text, text, segments)
    assert [int(batch.counted(depth)) for depth in range(4)] == [16, 4 + 10, 3 + 9, 2 + 8]
    assert batch.target(2)[0, :5].tolist() == [*text[0, 2:5].tolist(), IGNORED, IGNORED]
    assert batch.position_BL[0].tolist() == [*range(5), *range(11)]


def test_rotary_positions_are_relative() -> None:
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)

    def score(i: int, j: int) -> torch.Tensor:
        turns = [rotation(torch.tensor([p]), RopeSpec(6, 10000.0, False), torch.float64) for p in (i, j)]
        return (rotate(q, turns[0]) * rotate(k, turns[1])).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.allclose(score(9, 4), score(9, 5))


def test_layers_share_the_rotations_of_a_place() -> None:
    place = Place(torch.arange(5), {})
    turn = place.rotation(RopeSpec(8, 100.0, False), torch.bfloat16)
    assert place.rotation(RopeSpec(8, 100.0, False), torch.bfloat16) is turn
    assert turn.cos_SR.dtype == torch.float32
    assert place.rotation(RopeSpec(8, 100.0, False), torch.float64).cos_SR.dtype == torch.float64
    torch.testing.assert_close(place.rotation(RopeSpec(8, 16.0, False), torch.float32).sin_SR[:, 3], (torch.arange(5) / 8).sin())


def test_micro_batches_share_the_rotations_of_a_slice() -> None:
    """Only those of the last length are kept."""
    model = Transformer(Ownership(ModelSpec(**MODEL), Fold(1)), Groups.create(Fold(1)))
    model.slice((3, 5))
    first, again = (model.places(Batch(text, text)) for text in (tokens(2, 8), tokens(1, 8)))
    turns = [[place.rotation(RopeSpec(8, 100.0, False), torch.float32) for place in places] for places in (first, again)]
    assert all(turn is same for turn, same in zip(*turns, strict=True))
    assert [len(turn.cos_SR) for turn in turns[0]] == [3, 5]
    model.slice(None)
    (place,) = model.places(Batch(tokens(1, 6), tokens(1, 6)))
    assert len(place.rotation(RopeSpec(8, 100.0, False), torch.float32).cos_SR) == 6


def test_weights_depend_on_seed_and_name_alone() -> None:
    ownership = Ownership(ModelSpec(**MODEL), Fold(1))
    one, same, other = (by_name(Transformer(ownership, Groups.create(Fold(1)), seed=seed)) for seed in (3, 3, 4))
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        assert "norm" in name or not torch.equal(weight, other[name])
    first = [float(weight.detach().flatten()[0]) for name, weight in one.items() if "norm" not in name]
    assert len(set(first)) == len(first)


def test_a_dense_model_has_no_balance_terms() -> None:
    objective, losses = model_of(dense_first=2)(Batch(tokens(2, 5), tokens(2, 5, seed=1)))
    assert losses.count_ME.numel() == 0
    assert float(losses.balance) == float(losses.z) == 0
    assert float(objective.detach()) == pytest.approx(float(losses.means()[0]))

"""The model against other people's code and against itself."""

from __future__ import annotations

import pytest
import torch

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import Transformer
from foldray.model.attention import document_mask, rotary_angles, rotate
from foldray.spec import PRESETS, ModelSpec, parameter_table
from tests.foldray.parity import MODEL, fresh_model


def test_logits_and_gradients_equal_hugging_faces_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    model = fresh_model(shared_hidden=0, head_dim=4, norm_eps=1e-6, router={"balance_loss": 0.0, "z_loss": 0.0})
    spec = model.spec
    config = transformers.MixtralConfig(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.expert_hidden, num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim, num_local_experts=spec.experts,
        num_experts_per_tok=spec.topk, rms_norm_eps=spec.norm_eps, rope_theta=spec.rope_theta, sliding_window=None,
        attn_implementation="eager", experts_implementation="eager", tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.MixtralForCausalLM(config).double()
    pairs = _same_weights(model, theirs)
    tokens = torch.randint(0, spec.vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(model.logits(tokens[:, :-1])[0], logits, atol=1e-6, rtol=1e-5)  # their rotary table is float32
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    model(tokens[:, :-1], tokens[:, 1:]).total.backward()
    for name, ours, gradient in pairs():
        torch.testing.assert_close(ours, gradient, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def _same_weights(ours: Transformer, theirs: torch.nn.Module):
    """Copy our weights into theirs; a function that pairs gradients afterwards."""
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    for i in range(ours.spec.layers):
        b, h = f"blocks.{i}", f"model.layers.{i}"
        names |= {
            f"{b}.attention_norm.weight": f"{h}.input_layernorm.weight",
            f"{b}.ffn_norm.weight": f"{h}.post_attention_layernorm.weight",
            f"{b}.attention.out": f"{h}.self_attn.o_proj.weight", f"{b}.moe.router.weight": f"{h}.mlp.gate.weight",
            f"{b}.moe.experts.up": f"{h}.mlp.experts.gate_up_proj", f"{b}.moe.experts.down": f"{h}.mlp.experts.down_proj",
        }  # fmt: skip
    parameters, other = dict(ours.named_parameters()), dict(theirs.named_parameters())

    def turned(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor.mT if not name.endswith("weight") or "router" in name else tensor

    spec = ours.spec
    widths = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    with torch.no_grad():
        for mine, theirs_name in names.items():
            other[theirs_name].copy_(turned(parameters[mine], mine))
        for i in range(spec.layers):
            for part, weight in zip("qkv", parameters[f"blocks.{i}.attention.qkv"].split(widths, 1), strict=True):
                other[f"model.layers.{i}.self_attn.{part}_proj.weight"].copy_(weight.T)

    def pairs():
        for mine, theirs_name in names.items():
            yield mine, turned(parameters[mine].grad, mine), other[theirs_name].grad
        for i in range(spec.layers):
            for part, gradient in zip("qkv", parameters[f"blocks.{i}.attention.qkv"].grad.split(widths, 1), strict=True):
                yield f"{part} of block {i}", gradient.T, other[f"model.layers.{i}.self_attn.{part}_proj.weight"].grad

    return pairs


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_builds_exactly_its_parameter_table(preset: str) -> None:
    spec = ModelSpec(preset=preset, layers=3)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "_initialise", lambda self, seed: None)
        model = Transformer(spec, Groups.create(Fold(1)), device="meta")
    parameters, built = dict(model.named_parameters()), {}
    for local, parts in model.global_names().items():
        for name, index in parts:
            built[name] = tuple(parameters[local].shape if index is None else parameters[local][index].shape)
    assert built == {parameter.name: parameter.shape for parameter in parameter_table(spec)}


def test_no_position_sees_a_later_one() -> None:
    model = fresh_model(router={"capacity_factor": None})
    tokens = torch.randint(0, 29, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 29
    before, after = model.logits(tokens)[0], model.logits(changed)[0]
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


def test_masked_documents_do_not_see_each_other() -> None:
    model = fresh_model()
    tokens = torch.randint(0, 29, (1, 8))
    segments = torch.tensor([[4, 4, 4, 5, 5, 5, 5, 5]])
    changed = tokens.clone()
    changed[0, 1] = (changed[0, 1] + 1) % 29
    before, after = (model.logits(t, segments)[0] for t in (tokens, changed))
    torch.testing.assert_close(after[:, 3:], before[:, 3:])
    assert not torch.allclose(after[:, 1:3], before[:, 1:3])
    assert document_mask(segments)[0, 0].sum().item() == 6 + 15


def test_rotary_positions_are_relative() -> None:
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)

    def score(i: int, j: int) -> torch.Tensor:
        angles = [rotary_angles(torch.tensor([p]), 6, 10000.0) for p in (i, j)]
        return (rotate(q, angles[0]) * rotate(k, angles[1])).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.allclose(score(9, 4), score(9, 5))


def test_weights_depend_on_seed_and_name_alone() -> None:
    spec = ModelSpec(**MODEL)
    one, same = (Transformer(spec, Groups.create(Fold(1)), seed=3) for _ in range(2))
    other = Transformer(spec, Groups.create(Fold(1)), seed=4)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert "norm" in name or not torch.equal(a, c)
    experts = one.blocks[0].moe.experts.up
    assert not torch.equal(experts[0], experts[1])


def test_a_dense_model_has_no_balance_terms() -> None:
    model = fresh_model(dense_first=2)
    losses = model(torch.randint(0, 29, (2, 5)), torch.randint(0, 29, (2, 5)))
    assert losses.count_LE.shape == (0, 4)
    assert float(losses.balance) == 0

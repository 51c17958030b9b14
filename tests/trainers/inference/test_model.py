"""A trained model from Python: logits, generation, evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import Checkpoint

import trainers
from foldray import Recipe, UserError
from foldray.model import Transformer
from tests.trainers.hugging_face.test_export import GLM, make_run
from trainers.driver.resuming import Beginning
from trainers.inference import model as module
from trainers.inference.model import Model

SEPARATOR = 256
LEARNED: dict[str, Any] = {"positions": "learned", "max_positions": 40}
DROPPING: dict[str, Any] = {"router": {"capacity_factor": 0.5, "pad": True, "drop_scope": "sequence"}}
MODELS: dict[str, dict[str, Any]] = {
    "windows": {"windows": ["sliding:5", "chunked:8"]},
    "learned positions": {**LEARNED, "norm": "layernorm", "ffn": "gelu", "tied_embeddings": True},
    "sigmoid, shared, dense": GLM,
    "norms, biases": {"qk_norm": "all", "attention_bias": "inputs", "rope_dim": 4, "shared_hidden": 8, "shared_gate": True},
}


def made(tmp_path: Path, **model: Any) -> tuple[Model, Transformer]:
    """Return a model that was loaded from a run, and the model that wrote the checkpoint."""
    wrote = make_run(tmp_path / "run", **model)
    return Model.load(tmp_path / "run" / "step_00000003", device="cpu"), wrote


def greedy(wrote: Transformer, ids: list[int], tokens: int) -> list[int]:
    """Return the most probable ids of the tokenizer, one after another, up to a separator. The model has more ids: 320."""
    ids = list(ids)
    for _ in range(tokens):
        ids.append(int(wrote.logits(torch.tensor([ids]))[0, -1, :257].argmax()))
    return [*ids, SEPARATOR][: [*ids, SEPARATOR].index(SEPARATOR, 1)]


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("model", MODELS)
def test_a_greedy_continuation_is_that_of_the_logits(tmp_path: Path, model: str) -> None:
    found, wrote = made(tmp_path, **MODELS[model])
    pieces, stopped = list[str](), set[str]()
    for prompt in ("def f", "x", "größer", ""):
        ids = [SEPARATOR, *prompt.encode()]
        expected = greedy(wrote, ids, 20)[len(ids) :]
        pieces.clear()
        generated = found.generate(prompt, 20, temperature=0, told=pieces.append)
        assert generated.tokens == expected
        assert generated.stopped == ("length" if len(expected) == 20 else "separator")
        assert generated.text == "".join(pieces) == bytes(expected).decode(errors="replace")
        assert found.generate(torch.tensor(ids), 20, temperature=0).tokens == expected
        stopped.add(generated.stopped)
    assert "length" in stopped


def test_a_separator_ends_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = made(tmp_path)
    drawn = iter([104, 105, SEPARATOR, 104])
    monkeypatch.setattr("trainers.inference.sampling.Sampler.draw", lambda self, logit_V: next(drawn))
    assert found.generate("", 9, seed=5)[:4] == ("hi", [104, 105], "separator", 5)


def test_a_seed_gives_the_same_text(tmp_path: Path) -> None:
    found, _ = made(tmp_path)
    first = found.generate("a", 30, seed=7)
    assert found.generate("a", 30, seed=7) == first
    assert found.generate("a", 30, seed=8).tokens != first.tokens
    free = found.generate("a", 30)
    assert found.generate("a", 30, seed=free.seed) == free
    assert max(free.tokens) < SEPARATOR


@pytest.mark.parametrize("slices", [1, 3, 4096])
def test_long_prompts_are_taken_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: int) -> None:
    monkeypatch.setattr(module, "_TOGETHER", slices)
    found, wrote = made(tmp_path, windows=["sliding:3", "full"])
    ids = [SEPARATOR, *b"import os"]
    assert found.generate("import os", 5, temperature=0).tokens == greedy(wrote, ids, 5)[len(ids) :]


def test_logits(tmp_path: Path) -> None:
    found, wrote = made(tmp_path, **GLM)
    text = torch.randint(0, 320, (2, 13), generator=torch.Generator().manual_seed(1))
    expected = found.logits(text)
    # The last bits depend on where weights lie in memory, and on the number of sequences.
    torch.testing.assert_close(expected, wrote.logits(text).detach())
    torch.testing.assert_close(found.logits(text[0].int()), expected[0])
    assert torch.equal(found.logits(text.tolist()), expected)
    assert not found.logits(text).requires_grad
    ids = found.tokenizer.encode("def f")  # uint16
    assert torch.equal(found.logits(ids), found.logits(ids.tolist()))
    for bad in ([[1, 2], [3]], ["a", "b"]):
        with pytest.raises(UserError, match=r"^tokens=list: must be ids of one sequence, or"):
            found.logits(bad)  # type: ignore[arg-type]
    assert torch.equal(found.logits([SEPARATOR, *ids]), found.logits([SEPARATOR, *b"def f"]))


def test_a_model_is_found_by_rays_handle_or_by_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", steps=(1, 2))
    first, second = (tmp_path / "run" / f"step_0000000{step}" for step in (1, 2))
    assert trainers.Model.load(Checkpoint.from_directory(str(first)), device="cpu").step == 1
    assert trainers.Model.load(str(second), device="cpu").step == 2
    newest = Beginning.at(str(first))
    monkeypatch.setattr(Beginning, "newest", lambda folder: newest)  # Ray writes the list of a run's checkpoints
    assert Model.load(tmp_path / "run", device="cpu").step == 1


def test_a_recipe_that_lies_elsewhere(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    recipe = Recipe.load(tmp_path / "run" / "recipe.yaml")
    (tmp_path / "run" / "recipe.yaml").unlink()
    step = tmp_path / "run" / "step_00000003"
    assert Model.load(step, recipe, device="cpu").generate("", 1).seed >= 0
    with pytest.raises(UserError, match=r"its recipe\.yaml is missing"):
        Model.load(step, device="cpu")


def test_experts_drop_no_tokens(tmp_path: Path) -> None:
    found, wrote = made(tmp_path, **DROPPING)
    text = torch.randint(0, 257, (1, 16), generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(found.logits(text), wrote.logits(text))
    torch.testing.assert_close(found.logits(text[:, :5]), found.logits(text)[:, :5], atol=1e-10, rtol=1e-10)
    assert found.recipe.model.router.capacity_factor == 0.5


@pytest.mark.parametrize("seq_len", [1, 7, 32, 100, None])
def test_a_score_is_that_of_the_logits_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seq_len: int | None) -> None:
    monkeypatch.setattr(module, "_TOGETHER", 20)  # several passes, of several windows
    monkeypatch.setattr(module, "_LOGITS", 320 * 11)  # several runs of logits
    found, wrote = made(tmp_path)
    text = "def größer(x):\n    return x ✓\n" * 2
    ids, nats, told = [SEPARATOR, *text.encode()], 0.0, list[tuple[int, int]]()
    length = seq_len or 32  # data.seq_len
    for start in range(0, len(ids) - 1, length):
        seen = torch.tensor([ids[start : start + length + 1]])
        losses = torch.nn.functional.cross_entropy(wrote.logits(seen[:, :-1])[0], seen[0, 1:], reduction="sum")
        nats += float(losses.detach())
    score = found.evaluate(text, seq_len, lambda *counts: told.append(counts))
    assert (score.tokens, score.bytes) == (len(ids) - 1, len(text.encode()))
    assert score.nats == pytest.approx(nats, rel=1e-10)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-10)
    assert told == sorted(set(told))
    assert told[-1] == (score.tokens, score.tokens)


def test_mistakes(tmp_path: Path) -> None:
    found, _ = made(tmp_path, **LEARNED)
    for call, line in (
        (lambda: found.logits([]), "tokens=nothing: must have at least one token"),
        (lambda: found.logits([320]), "tokens=320: is not in the vocabulary; legal: 0…319"),
        (lambda: found.logits([-1]), "tokens=-1: is not in the vocabulary"),
        (lambda: found.logits(torch.zeros(2)), "tokens=torch.float32: must be whole numbers"),
        (lambda: found.logits(torch.zeros(1, 1, 1, dtype=torch.int64)), "tokens=[1, 1, 1]: must be one sequence"),
        (lambda: found.logits([1] * 41), "tokens=41: is more than the 40 positions"),
        (lambda: found.generate([]), "prompt=nothing: must have at least one token"),
        (lambda: found.generate([[1]]), "prompt=[1, 1]: must be a text, or the ids of one sequence"),  # type: ignore[list-item]
        (lambda: found.generate("\ud800"), r"prompt=\ud800: is not UTF-8 text (surrogates not allowed)"),
        (
            lambda: found.generate("abc", 38),
            "tokens=38: is too many behind a prompt of 4: the model has learned 40 positions; legal: 1…37",
        ),
        (lambda: found.generate("a" * 40, 1), "tokens=1: is too many behind a prompt of 41: the model has learned 40 positions"),
        (lambda: found.generate("", 0), "tokens=0: must be at least 1"),
        (lambda: found.generate("", top_p=0), "top_p=0: must be greater than 0"),
        (lambda: found.evaluate(""), "text='': has no tokens"),
        (lambda: found.evaluate("\ud800"), r"text=\ud800: is not UTF-8 text"),
        (lambda: found.evaluate("x", 41), "seq_len=41: is more than the 40 positions"),
        (lambda: found.evaluate("x", 0), "seq_len=0: must be at least 1"),
    ):
        with pytest.raises(UserError) as error:
            call()
        assert str(error.value).startswith(line)
    assert len(found.generate("abc", 37, temperature=0).tokens) in range(38)


def test_a_model_that_diverged(tmp_path: Path) -> None:
    found, _ = made(tmp_path)
    found.transformer.final_norm.weight.fill_(math.nan)
    with pytest.raises(UserError, match="after 3 steps, whose logits are not finite numbers"):
        found.generate("x")


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path: Path) -> None:
    found, _ = made(tmp_path, vocab=256)
    with pytest.raises(UserError, match=r"data\.tokenizer=byte: has 257 ids, and the model only 256"):
        found.generate("x")


@pytest.mark.parametrize("model", ["sigmoid, shared, dense", "learned positions"])
def test_a_text_is_scored_with_the_experts_that_wrote_it(tmp_path: Path, model: str) -> None:
    found, _ = made(tmp_path, **MODELS[model])
    prompt, same = [SEPARATOR, *b"def f"], {"atol": 1e-10, "rtol": 1e-10}
    generated = found.generate(prompt, 12, seed=3, routes=True)
    assert found.generate(prompt, 12, seed=3).experts is None
    tokens, written = [*prompt, *generated.tokens], torch.tensor(generated.log_probs, dtype=torch.float64)
    log_probs = found.log_probs(tokens)
    expected = found.logits(tokens)[:-1].log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, **same)
    torch.testing.assert_close(log_probs[-len(written) :], written, **same)
    assert generated.experts is not None
    assert torch.equal(generated.experts, found.routes(tokens[:-1]))
    for _, router in found.transformer.routers():  # as after a step of training
        router.weight.data += torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(generated.experts, found.routes(tokens[:-1]))
    replayed = found.log_probs(tokens, generated.experts)
    assert not torch.allclose(replayed, found.log_probs(tokens), **same)
    both = found.log_probs([tokens, tokens], torch.stack([generated.experts] * 2, dim=1))
    torch.testing.assert_close(both[1], replayed, **same)


ROUTES = torch.tensor([0, 1]).expand(2, 3, 2)
WRONG: list[tuple[torch.Tensor, str]] = [
    (ROUTES[:1], "experts=[1, 1, 3, 2]: must have the shape [2, 1, 3, 2]: MoE blocks, sequences, tokens, experts of a token"),
    (ROUTES / 2, "experts=torch.float32: must be whole numbers, the numbers of experts"),
    (ROUTES + 3, "experts=4: is no expert; −1 leaves the choice to the router; legal: −1…3"),
    (ROUTES - 2, "experts=-2: is no expert; −1 leaves the choice to the router; legal: −1…3"),
    (ROUTES * 0 + 2, "experts=[2, 2]: at [0, 0, 0] has an expert twice"),
    (ROUTES - 1, "experts=[-1, 0]: at [0, 0, 0] leaves only some of its experts to the router"),
]


def test_experts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    found, _ = made(tmp_path)
    assert (found.recipe.model.experts, found.recipe.model.topk, len(found.recipe.model.moe_layers)) == (4, 2, 2)
    for experts, line in WRONG:
        with pytest.raises(UserError) as refused:
            found.log_probs([1, 2, 3, 4], experts)
        assert str(refused.value) == line
    with pytest.raises(UserError, match="must have at least two tokens"):
        found.log_probs([1])

"""A model on ranks, from Python: it scores what a sampler wrote, trains on it, and hands its weights back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foldray.cli import main
from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.trainers.hugging_face.test_export import SIZES, make_run
from trainers import FoldedModel, Model

pytestmark = pytest.mark.usefixtures("ray_session")
_LENGTH = 24
_SETTINGS: list[dict[str, Any]] = [
    {"fold": {"tp": 2}},
    {"fold": {"cp": 2, "ep": 2}, "schedule": {"kind": "stream", "degree": 2}},
    {"fold": {"pp": 2}, "engine": {"kind": "torch", "zero": 1}},
    {"placement": {"attention": 1, "experts": 1}},
]


def recipe_of(**sections: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {**SIZES, "router": {"balance_loss": 0.0}}, "data": {"seq_len": _LENGTH}, "precision": "float64",
        "engine": {"kind": "torch"}, "cluster": {"workers": 2}, "training": {"global_batch": 4, "micro_batch": 1},
        "optimizer": {"kind": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": None},
    }  # fmt: skip
    return Recipe.parse(base | sections)


def text(sequences: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (sequences, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sampler") / "run"
    make_run(path, router={"balance_loss": 0.0})
    return path


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("sections", _SETTINGS, ids=str)
def test_from_a_sampler_and_back(run: Path, tmp_path: Path, sections: dict[str, Any]) -> None:
    sampler = Model.load(run, device="cpu")
    tokens, advantages = text(4, 20), torch.randn(4, 19, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with FoldedModel(recipe_of(**sections), run) as model:
        # Scores are the sampler's: with its own experts, with those that wrote a text, and with others.
        torch.testing.assert_close(model.log_probs(tokens), sampler.log_probs(tokens), atol=1e-10, rtol=0)
        written = sampler.generate("def f", 12, temperature=1.0, seed=3, routes=True)
        whole = [[sampler.tokenizer.separator, *sampler.tokenizer.encode("def f"), *written.tokens]]
        scored = model.log_probs(whole, written.experts.unsqueeze(1))[0, -len(written.tokens) :]
        assert scored.tolist() == pytest.approx(written.log_probs, abs=1e-10)
        others = sampler.routes(tokens[:, :-1]).flip(-1).roll(1, dims=1)
        torch.testing.assert_close(model.log_probs(tokens, others), sampler.log_probs(tokens, others), atol=1e-10, rtol=0)
        # One step along the gradient of the weighted log-probabilities, which autograd has in one process.
        expected = _after_a_step(run, tokens, advantages, others)
        stepped = model.train(tokens, advantages, others)
        found = dict(model.weights())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-10, rtol=0)
        assert (stepped.tokens, stepped.replaced > 0) == (4 * 19, True)
        assert stepped.loss == pytest.approx(-float((advantages * sampler.log_probs(tokens, others)).sum() / (4 * 19)), abs=1e-10)
        # The sampler takes the weights, and writes what the ranks would.
        sampler.load_weights(model.weights())
        torch.testing.assert_close(model.log_probs(tokens), sampler.log_probs(tokens), atol=1e-10, rtol=0)
        before = {name: tensor * 2 for name, tensor in found.items()}
        model.load_weights(before.items())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.weights())
        # By the names of transformers, they are what an export writes.
        model.load_weights(Model.load(run, device="cpu").weights())
        assert main(["export-hf", str(run), str(tmp_path / "hub")]) == 0
        exported = load_file(tmp_path / "hub" / "model.safetensors")
        theirs = dict(model.weights("transformers"))
        assert theirs.keys() == exported.keys()
        assert all(torch.equal(theirs[name], tensor) for name, tensor in exported.items())
    with pytest.raises(UserError, match="is closed"):
        model.log_probs(tokens)


def _after_a_step(run: Path, tokens: torch.Tensor, advantages: torch.Tensor, experts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights after a step of SGD with the rate 1 on −Σ advantage · log p / N, by autograd in one process."""
    from foldray.model import Batch

    model = Model.load(run, device="cpu")
    transformer = model.transformer.requires_grad_(True)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], None, experts)
    log_prob = transformer.head_logits(transformer.hidden(batch)).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    objective = -(advantages * log_prob).sum() / advantages.numel()
    gradients = torch.autograd.grad(objective, list(transformer.parameters()), allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(transformer.parameters(), gradients, strict=True):
            if gradient is not None:
                parameter -= gradient
    return dict(model.weights())


@pytest.mark.gate(2)
def test_wrong_texts_and_weights_are_one_line(run: Path) -> None:
    with FoldedModel(recipe_of()) as model:
        for arguments, line in (
            ((text(2, 26),), r"tokens=\[2, 26\]: must be sequences of 2 to data\.seq_len \+ 1 = 25 tokens"),
            ((text(2, 1),), "must be sequences of 2"),
            ((text(2, 8) + 300,), "is not in the vocabulary"),
            ((text(2, 8).float(),), "must be whole numbers, the ids of tokens"),
            ((text(2, 8), torch.zeros(1, 2, 7, 2)), r"experts=\[1, 2, 7, 2\]: must have the shape"),
        ):
            with pytest.raises(UserError, match=line):
                model.log_probs(*arguments)
        with pytest.raises(UserError, match=r"tokens=2: sequences are not the training\.global_batch=4 of a step"):
            model.train(text(2, 8))
        with pytest.raises(UserError, match=r"weights=\[4, 8\]: must have a value for every token but the first"):
            model.train(text(4, 8), torch.ones(4, 8))
        with pytest.raises(UserError, match="weights=head: is no weight"):
            model.load_weights([("head", torch.zeros(1))])
        with pytest.raises(UserError, match=r"final_norm\.weight: has the shape \[1\], not \[48\]"):
            model.load_weights([("final_norm.weight", torch.zeros(1))])
        sampler = Model.load(run, device="cpu")
        with pytest.raises(UserError, match="is missing"):
            sampler.load_weights([next(iter(model.weights()))])
        with pytest.raises(UserError, match=r"weights=head with|weights=head: with the shape \[1\] is no weight"):
            sampler.load_weights([("head", torch.zeros(1))])
    with pytest.raises(UserError, match=r"model\.adapter=rank 2: is for foldray train"):
        FoldedModel(recipe_of(model={**SIZES, "adapter": {"rank": 2}}))

"""Training on packed conversations: every fold and schedule equals one process, and that equals plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import IGNORED, Batch, all_losses
from foldray.recipe import DataSpec, Recipe
from foldray.runtime import Trace
from tests.foldray.parity import MODEL, check_equal, engine_on, make_recipe, model_of, weights
from tests.trainers.data.chats import CHATS, chat, make_tokenizer
from trainers.data.chat import Chat
from trainers.data.conversations import Reader, encode, end
from trainers.data.encode import Work, token_dtype
from trainers.data.packed import Batches, Split
from trainers.data.rows import cut
from trainers.data.shards import Index, write
from trainers.data.sources import split_files
from trainers.data.tokenizers import load_tokenizer
from trainers.data.unfit import Unfit
from trainers.measure.comparison import random_batch
from trainers.worker.loop import batch_of

SEQ_LEN, STEPS = 64, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a split of packed conversations, and its meta."""
    folder = tmp_path_factory.mktemp("packed")
    tokenizer = load_tokenizer(str(make_tokenizer(folder / "tokenizer")))
    turns = [chat(f"{a} plus {a}?", f"It is {2 * a}." * (1 + a % 3)) for a in range(40)]
    for name, chats in (("a", [*turns, *CHATS.values()]), ("held", turns)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    held = {"path": str(folder / "held.jsonl")}
    train, _ = split_files(DataSpec(source="conversations", path=str(folder / "a.jsonl"), tokenizer="x", validation=held))
    unfit, index = Unfit("refuse"), Index(SEQ_LEN)
    pieces = encode(Work(list(cut(train)), "train"), unfit, Reader(Chat(tokenizer), "messages"), SEQ_LEN)
    for number, each in enumerate((pieces, [end(tokenizer)])):
        index.add(write(folder, "train", number, each, unfit.found))
    dtype = token_dtype(tokenizer.vocab_size).name
    return folder, {"seq_len": SEQ_LEN, "dtype": dtype, "train": index.finish(folder, "train", masked=True)}


def recipe_of(workers: int, fold: dict[str, Any], **sections: Any) -> Recipe:
    data = {"source": "conversations", "path": "a.jsonl", "tokenizer": "x", "seq_len": SEQ_LEN}
    layers = sections.pop("layers", 2)
    model = {**MODEL, "vocab": 304, "layers": max(layers, fold.get("pp", 1))}
    return make_recipe(workers, fold, data=data, model=model, **sections)


def own_batches(recipe: Recipe, groups: Groups, split: Split, step: int) -> list[Batch]:
    if not groups.owns_tokens:
        return [Batch.empty(SEQ_LEN)] * recipe.accumulation
    training, dp, found = recipe.training, groups.fold.dp, Batches(split, recipe.training.seed)
    given = training.micro_batch, training.global_batch
    taken = [found.indices(step, m, groups.dp_rank, dp, *given) for m in range(recipe.accumulation)]
    return [batch_of(split, indices, recipe.data.mask_documents, CPU) for indices in taken]


def train(rank: int, recipe: Recipe, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    split, losses = Split(folder, "train", meta), []
    with engine_on(recipe, rank) as (engine, groups):
        engine.execution.trace = Trace()
        for step in range(STEPS):
            passes = engine.train(own_batches(recipe, groups, split, step))
            engine.update(recipe.optimizer.lr)
            losses.append(all_losses(passes, groups.control).means().tolist())
            if step == 0 and engine.execution.lacks_costs:
                engine.execution.learn_costs()
            engine.execution.trace = None
        evaluated = all_losses(engine.execution.evaluate(own_batches(recipe, groups, split, STEPS)), groups.control)
        shown = [float(evaluated.means()[0]), int(evaluated.tokens)]
        return {"weights": weights(engine), "losses": losses, "evaluated": shown}


FOLDS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"ep": 2}, {}),
    (2, {"tp": 2}, {"schedule": {"kind": "stream", "degree": 2}}),
    (2, {"cp": 2}, {}),
    (2, {"cp": 2, "ep": 2}, {"schedule": {"kind": "one_a_one_m", "degree": 2}}),
    (2, {"pp": 2}, {"schedule": {"kind": "weave"}}),
    (2, {"ep": 2}, {"schedule": {"kind": "list", "degree": 2}}),
    (4, {"tp": 2, "cp": 2, "ep": 4}, {"schedule": {"kind": "flow", "batch_degree": 1, "degree": 2}}),
    (4, {"pp": 2, "ep": 2}, {"schedule": {"kind": "one_a_one_m", "degree": 2}}),
    (4, {"ep": 2}, {"placement": {"attention": 2, "experts": 2}, "schedule": {"kind": "af_pipe"}}),
]


@pytest.mark.gate(1)
@pytest.mark.parametrize(("workers", "fold", "sections"), FOLDS, ids=str)
def test_every_fold_equals_one_process(ranks, packed, workers: int, fold: dict[str, Any], sections: dict[str, Any]) -> None:
    recipe = recipe_of(workers, fold, **sections)
    assert recipe.data.mask_documents
    found = ranks(workers).run(train, recipe, *packed, timeout=240)
    reference = train(0, recipe_of(1, {}, training={"micro_batch": 8}, layers=recipe.model.layers), *packed)
    check_equal(found, reference)


def test_what_counts_differs_from_rank_to_rank(packed) -> None:
    recipe, split = recipe_of(8, {}), Split(packed[0], "train", packed[1])
    indices = Batches(split, recipe.training.seed).indices(0, 0, 0, 1, 8, 8)
    counted = split.trained(indices).sum(1)
    assert len(set(counted.tolist())) > 4
    assert counted.min() > 0


def test_one_process_equals_plain_pytorch(packed) -> None:
    """The loss of a step is the mean over all of its tokens that count, with SGD by hand."""
    router = {"balance_loss": 0.0, "z_loss": 0.0}
    given = {**MODEL, "vocab": 304, "router": router}
    recipe = make_recipe(1, {}, data=recipe_of(1, {}).data.model_dump(), model=given, training={"micro_batch": 2})
    found = train(0, recipe, *packed)
    split, plain = Split(packed[0], "train", packed[1]), model_of(Fold(1), dtype=torch.float64, vocab=304, router=router)
    for step in range(STEPS):
        indices = Batches(split, recipe.training.seed).indices(step, 0, 0, 1, 8, 8)
        tokens, trained = split.tokens(indices), split.trained(indices)
        logits = plain.logits(tokens[:, :-1], split.segments(indices))
        loss = functional.cross_entropy(logits[trained], tokens[:, 1:][trained])
        assert loss.item() == pytest.approx(found["losses"][step][0], abs=1e-12)
        loss.backward()
        with torch.no_grad():
            for weight in plain.parameters():
                weight -= recipe.optimizer.lr * weight.grad
                weight.grad = None
    for name, parameter in plain.named_parameters():
        for part, index in plain.global_parts[name]:
            assert (parameter[index] - found["weights"][f"model/{part}"].tensor).abs().max() < 1e-12


def test_a_batch_ignores_what_does_not_count(packed) -> None:
    split = Split(packed[0], "train", packed[1])
    batch, tokens, trained = batch_of(split, [1, 0], True, CPU), split.tokens([1, 0]), split.trained([1, 0])
    assert torch.equal(batch.target_BL, torch.where(trained, tokens[:, 1:], IGNORED))
    assert torch.equal(batch.segment_BL, split.segments([1, 0]))
    none = batch_of(split, [], False, CPU)
    assert (none.segment_BL, none.token_BL.shape, none.target_BL.shape) == (None, (0, SEQ_LEN), (0, SEQ_LEN))


def test_what_verify_and_bench_draw_is_masked_too() -> None:
    of_conversations, of_text = recipe_of(1, {}), make_recipe(1)
    batch = random_batch(of_conversations, 0, 1, 0, CPU)
    counted = (batch.target_BL != IGNORED).sum(1)
    assert 0 < counted.min() < SEQ_LEN
    assert batch.segment_BL is not None
    assert (random_batch(of_text, 0, 1, 0, CPU).target_BL != IGNORED).all()

"""What a rank of a `FoldedModel` does: it holds an engine from call to call, scores, trains, and gives or takes weights.

Legend: B sequences, L tokens of a sequence, S = `data.seq_len`, M MoE blocks, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray
import torch
from ray.train import Checkpoint

from foldray.comm import Groups, nccl
from foldray.model import Batch, all_losses
from foldray.recipe import Recipe
from foldray.runtime import Engine, Shard
from trainers.data.packed import places_in_step
from trainers.worker.engines import make_engine, read_weights

_EVALUATED = 8  # micro-batches in one pass, for each pipeline position
PREFIX = "model/"  # of the keys of weights and router biases in a state


class Texts(NamedTuple):
    """Sequences of S + 1 tokens on the host, as arguments of `Batch`; None where a batch has None.

    Args:
        token_BL: int64 [B, S + 1].
        target_BL: int64 [B, S]; `IGNORED` where a target does not count.
        length: number of targets of a sequence before it was filled up.
    """

    token_BL: torch.Tensor
    target_BL: torch.Tensor
    expert_MBLK: torch.Tensor | None = None
    weight_BL: torch.Tensor | None = None
    length: int = 0

    def batch(self, rows: range, device: torch.device) -> Batch:
        """Return some sequences as a batch."""
        at = slice(rows.start, rows.stop)
        experts, weights = self.expert_MBLK, self.weight_BL
        return Batch(
            self.token_BL[at, :-1].to(device),
            self.target_BL[at].to(device),
            None,
            None if experts is None else experts[:, at].to(device),
            None if weights is None else weights[at].to(device),
        )


class _Held(NamedTuple):
    recipe: Recipe
    groups: Groups
    engine: Engine
    device: torch.device


def open_model(state: dict[str, Any], given: dict[str, Any], checkpoint: Checkpoint | None) -> None:
    """Make the engine of a recipe on this rank, with the weights of a checkpoint, of the recipe, or drawn ones."""
    recipe = Recipe.parse(given)
    nccl.take_adapters(recipe.adapters[state["rank"]])
    groups = Groups.create(recipe.placed_fold, state["rank"])
    engine = make_engine(recipe, groups, state["device"])
    if checkpoint is not None:
        from trainers.checkpoints import tensors  # takes most of a second

        with tensors.opened(checkpoint, None) as stored:
            tensors.load(stored, engine.shards(), None)
    elif recipe.training.weights is not None:
        read_weights(engine, recipe)
    engine.load_shards()
    state["folded"] = _Held(recipe, groups, engine, state["device"])


def score(state: dict[str, Any], texts: Texts) -> list[tuple[range, torch.Tensor]]:
    """Return the log-probabilities that this rank has: rows of the texts, and [rows, S] with zeros elsewhere."""
    held: _Held = state["folded"]
    size, fold, groups = held.recipe.training.micro_batch, held.groups.fold, held.groups
    count, found = len(texts.token_BL), list[tuple[range, torch.Tensor]]()
    passes, most = range(math.ceil(count / (fold.dp * size))), _EVALUATED * fold.positions
    seat = groups.coordinate.get("attention")
    speaks = seat is not None and seat["tp"] == 0 and seat["pp"] == fold.pp - 1
    for first in range(0, len(passes), most):
        rows = [_rows(held, m, size, count) for m in passes[first : first + most]]
        log_probs = held.engine.execution.log_probs([texts.batch(mine, held.device) for mine in rows])
        if speaks:
            found += [(mine, part.cpu()) for mine, part in zip(rows, log_probs, strict=True) if len(mine)]
    return found


def train(state: dict[str, Any], texts: Texts, rate: float) -> dict[str, float]:
    """Train one step on texts, of which there are `training.global_batch`. Return its means, the same on all ranks."""
    held: _Held = state["folded"]
    training = held.recipe.training
    rows = [_rows(held, m, training.micro_batch, training.global_batch) for m in range(held.recipe.accumulation)]
    losses = held.engine.train([texts.batch(mine, held.device) for mine in rows])
    norms = held.engine.update(rate)
    total = all_losses(losses, held.groups.control)
    held.engine.model.update_biases(total.count_ME)
    language, balance, z = total.means().tolist()
    return {
        "loss": language, "balance_loss": balance, "z_loss": z, "grad_norm": norms.total, "tokens": int(total.tokens),
        "replaced": int(total.replaced),
    }  # fmt: skip


def held(state: dict[str, Any]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return the key, the offset and the shape of each box of a weight that this rank owns, in the order of `give`."""
    return [(shard.key, shard.offset, tuple(shard.tensor.shape)) for shard in _weights(state["folded"].engine)]


def give(state: dict[str, Any], wanted: Mapping[int, Sequence[int]]) -> list[torch.Tensor]:
    """Return some boxes, by their numbers in `held`. `wanted` has them by rank."""
    boxes = list(_weights(state["folded"].engine))
    return [boxes[number].tensor.detach().cpu() for number in wanted.get(state["rank"], ())]


def take(state: dict[str, Any], reference: list[Any]) -> None:
    """Copy whole tensors, which Ray holds by key, into this rank's boxes. `finish` lets the engine train with them."""
    (given,) = ray.get(reference)
    for shard in _weights(state["folded"].engine):
        if shard.key in given:
            shard.tensor.copy_(given[shard.key][shard.box])


def finish(state: dict[str, Any]) -> None:
    state["folded"].engine.load_shards()


def _weights(engine: Engine) -> Iterator[Shard]:
    return (shard for shard in engine.shards() if shard.key.startswith(PREFIX))


def _rows(held: _Held, m: int, size: int, count: int) -> range:
    """Return the rows of a micro-batch of this rank. A rank that owns only experts has none."""
    if not held.groups.owns_tokens:
        return range(0)
    return places_in_step(m, held.groups.dp_rank, held.groups.fold.dp, size, count)

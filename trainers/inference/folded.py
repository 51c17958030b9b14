"""A model on the ranks of a recipe, from Python: log-probabilities, steps of training, and weights that never touch a disk.

It is what reinforcement learning needs of a trainer: a sampler writes texts and says with which experts, `log_probs` scores them
under any fold, `train` takes a step with a weight for each token, and `weights` hands the new weights to the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import ray
import torch
import torch.nn.functional as F
from ray.train import Checkpoint

from foldray.errors import UserError
from foldray.model import IGNORED
from foldray.model.routes import checked_experts
from foldray.recipe import Recipe
from foldray.runtime import learning_rate
from trainers.cluster import joining
from trainers.cluster.actors import RankFailure, Ranks
from trainers.driver.continuing import check_optimizer
from trainers.hugging_face.families import family_of, named_family, tensors_of
from trainers.hugging_face.names import Tensor
from trainers.inference.given import Tokens, checked_ids
from trainers.inference.trained import Trained
from trainers.worker import folded
from trainers.worker.folded import PREFIX, Texts

_GROUP = 256 << 20  # bytes of weights that are on their way at a time, if no tensor is larger


class Stepped(NamedTuple):
    """What a step of training did: means over its tokens and sequences, before the update.

    Args:
        loss: the weighted cross-entropy over the number of tokens that count.
        grad_norm: the norm of the whole gradient, before clipping.
        tokens: number of tokens that count.
        replaced: number of given assignments that routers would not have chosen.
    """

    loss: float
    balance_loss: float
    z_loss: float
    grad_norm: float
    tokens: int
    replaced: int


class FoldedModel:
    """A model on the ranks of a recipe. It joins or starts Ray, and its ranks stay until `close`.

        with FoldedModel(recipe, "runs/first") as model:
            log_probs = model.log_probs(tokens, experts)
            model.train(tokens, weights=advantages, experts=experts)
            sampler.load_weights(model.weights())

    Args:
        recipe: fold, schedule, engine and precision of the ranks. A step has `training.global_batch` sequences of at most
            `data.seq_len` + 1 tokens.
        run: a run or checkpoint whose weights and optimizer to start with, as for `Model.load`. None is `training.weights` of the
            recipe, or drawn weights.

    Raises:
        UserError: the recipe has adapters (`model.adapter`), the cluster has no room, or `Model.load` would refuse the run.
        RankFailure: from all methods, if a rank has failed. The model can then only be closed.
    """

    def __init__(self, recipe: Recipe, run: str | Path | Checkpoint | None = None):
        if recipe.model.adapter is not None:
            rule = "is for foldray train; ranks hold whole weights here"
            raise UserError("model.adapter", f"rank {recipe.model.adapter.rank}", rule, ["null"])
        self.recipe, self.step = recipe, 0
        trained = None if run is None else Trained.at(run, recipe)
        if trained is not None:
            with trained.opened() as stored:
                check_optimizer(trained.begin, stored, recipe)
        joining.connect(recipe)
        joining.check_room(recipe)
        self._ranks: Ranks | None = Ranks(recipe)
        try:
            start = None if trained is None else trained.begin.folder.checkpoint
            self._call(folded.open_model, recipe.model_dump(mode="json"), start)
            self._sources = _sources(self._call(folded.held))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FoldedModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def log_probs(self, tokens: Tokens, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return the log-probability of every token but the first, given those before it: [B, L] → [B, L − 1], on the host.

        Experts that drop tokens (`model.router.capacity_factor`) do so here as well, in sequences of `data.seq_len` tokens.

        Args:
            tokens: ids. Shorter sequences may end with any ids, whose log-probabilities mean nothing.
            experts: the experts of all tokens but the last one, [M, B, L − 1, K], as for `Model.log_probs`.

        Raises:
            UserError: sequences are too long or too short, an id is not in the vocabulary, or experts are not those of a model.
        """
        texts = self._texts(tokens, None, experts)
        result = torch.zeros(texts.target_BL.shape, dtype=torch.float64)
        for found in self._call(folded.score, texts):
            for rows, part in found:
                result[rows.start : rows.stop] += part
        return result[:, : texts.length]

    def train(
        self,
        tokens: Tokens,
        weights: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
        counted: torch.Tensor | None = None,
        lr: float | None = None,
    ) -> Stepped:
        """Train one step. The objective is Σ weight · (−log p) over the tokens that count, divided by their number.

        Objectives whose gradient is a factor on each token's own have their weights from `log_probs`: the policy gradient has the
        advantages, and PPO the advantages times the ratios, where these are not clipped.

        Args:
            tokens: ids, [training.global_batch, L].
            weights: factors on the losses of all tokens but the first, [B, L − 1]; None is 1.
            experts: the experts of all tokens but the last one, [M, B, L − 1, K]; None leaves them to the routers.
            counted: whether each token but the first counts, bool [B, L − 1]; None counts all.
            lr: the learning rate; None is that of the recipe at this step.

        Raises:
            UserError: as `log_probs`, or another number of sequences than a step has.
        """
        training, texts = self.recipe.training, self._texts(tokens, counted, experts, weights)
        if (sequences := len(texts.token_BL)) != training.global_batch:
            rule = f"sequences are not the training.global_batch={training.global_batch} of a step"
            raise UserError("tokens", sequences, rule)
        rate = learning_rate(self.recipe.optimizer, self.step, training.steps) if lr is None else lr
        first, *_ = self._call(folded.train, texts, rate)
        self.step += 1
        return Stepped(**first)

    def weights(self, names: Literal["foldray", "transformers"] = "foldray") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight once, whole and on the host, in the type of the optimizer's weights.

        They come in groups from the ranks that own their parts, so neither a disk nor one rank needs room for all of them.

        Args:
            names: `foldray` is what `load_weights` takes, here and in `Model`; `transformers` has the tensors that
                `foldray export-hf` would write.

        Raises:
            UserError: transformers has no such model.
        """
        if names == "foldray":
            for group in _grouped((name, source.bytes) for name, source in self._sources.items()):
                yield from self._fetched(group).items()
            return
        family, parts = family_of(self.recipe.model, named_family(self.recipe.export.family)), dict[str, list[Tensor]]()
        for part in (*tensors_of(family, self.recipe.model), *family.copies(self.recipe.model)):
            parts.setdefault(part.name, []).append(part)
        for name, made_of in parts.items():
            found = self._fetched([part.ours for part in made_of])
            first = found[made_of[0].ours]
            tensor = torch.empty(made_of[0].shape_for(first.shape), dtype=first.dtype)
            for part in made_of:
                part.put(tensor, found[part.ours])
            yield name, tensor

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take weights by foldray's names, such as those of another `FoldedModel`. The optimizer's moments stay.

        Raises:
            UserError: there is no such weight, or it has another shape.
        """
        group, size = dict[str, torch.Tensor](), 0
        for name, tensor in weights:
            if (source := self._sources.get(name)) is None:
                raise UserError("weights", name, "is no weight of this model")
            if tuple(tensor.shape) != source.shape:
                raise UserError("weights", name, f"has the shape {list(tensor.shape)}, not {list(source.shape)}")
            group[PREFIX + name] = tensor.detach().cpu()
            size += tensor.nbytes
            if size >= _GROUP:
                self._call(folded.take, [ray.put(group)])
                group, size = {}, 0
        self._call(folded.take, [ray.put(group)])
        self._call(folded.finish)

    def close(self) -> None:
        """Stop all ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _texts(
        self,
        tokens: Tokens,
        counted: torch.Tensor | None,
        experts: torch.Tensor | None,
        weights: torch.Tensor | None = None,
    ) -> Texts:
        """Check texts, and fill them up to `data.seq_len` + 1 tokens, of which the last ones do not count."""
        model, most = self.recipe.model, self.recipe.data.seq_len + 1
        ids_BL = checked_ids(tokens, model.vocab, "tokens").cpu()
        if ids_BL.dim() != 2 or not 2 <= ids_BL.shape[1] <= most:
            raise UserError("tokens", list(ids_BL.shape), f"must be sequences of 2 to data.seq_len + 1 = {most} tokens: [B, L]")
        sequences, length = len(ids_BL), ids_BL.shape[1] - 1
        for name, given in (("counted", counted), ("weights", weights)):
            if given is not None and tuple(given.shape) != (sequences, length):
                raise UserError(
                    name, list(given.shape), f"must have a value for every token but the first: {[sequences, length]}"
                )
        rest, target_BL = most - 1 - length, ids_BL[:, 1:]
        if counted is not None:
            target_BL = target_BL.masked_fill(~counted.bool().cpu(), IGNORED)
        if experts is not None:
            checked = checked_experts(experts, model, sequences, length).to(torch.int32).cpu()
            experts = F.pad(checked, (0, 0, 0, rest), value=-1)
        return Texts(
            F.pad(ids_BL, (0, rest)),
            F.pad(target_BL, (0, rest), value=IGNORED),
            experts,
            None if weights is None else F.pad(weights, (0, rest)).cpu(),
            length,
        )

    def _fetched(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return whole weights, from the ranks that own their boxes."""
        wanted: dict[int, list[int]] = {}
        boxes = [(name, box) for name in dict.fromkeys(names) for box in self._sources[name].boxes]
        for _, box in boxes:
            wanted.setdefault(box.rank, []).append(box.number)
        given = [iter(parts) for parts in self._call(folded.give, wanted)]
        found: dict[str, torch.Tensor] = {}
        for name, box in boxes:
            part = next(given[box.rank])
            whole = found.setdefault(name, part.new_empty(self._sources[name].shape))
            whole[tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))] = part
        return found

    def _call(self, function: Any, *arguments: Any) -> list[Any]:
        if self._ranks is None:
            raise UserError("FoldedModel", self.recipe.name, "is closed")
        try:
            return self._ranks.call(function, *arguments, timeout=None)
        except RankFailure as failure:
            cause = getattr(failure.__cause__, "cause", None)
            raise cause if isinstance(cause, UserError) else failure from failure.__cause__


class _Box(NamedTuple):
    """A box of a weight: its rank, its number among the boxes of this rank, and its place in the weight."""

    rank: int
    number: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class _Source(NamedTuple):
    """Where a weight is: boxes that make it up, each once."""

    boxes: list[_Box]

    @property
    def shape(self) -> tuple[int, ...]:
        ends = (tuple(map(sum, zip(box.offset, box.shape, strict=True))) for box in self.boxes)
        return tuple(map(max, zip(*ends, strict=True)))

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self.shape)


def _sources(held: list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]]) -> dict[str, _Source]:
    """Return where each weight is, from the boxes of all ranks. Of equal boxes, the first rank's counts."""
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], _Box]] = {}
    for rank, own in enumerate(held):
        for number, (key, offset, shape) in enumerate(own):
            name = key.removeprefix(PREFIX)
            boxes.setdefault(name, {}).setdefault((offset, shape), _Box(rank, number, offset, shape))
    return {name: _Source(list(found.values())) for name, found in boxes.items()}


def _grouped(sizes: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Yield names in groups of at most `_GROUP` bytes, or of one."""
    group, total = list[str](), 0
    for name, size in sizes:
        if group and total + size > _GROUP:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group

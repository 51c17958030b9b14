"""A trained model in one process: its logits, texts that it continues, and its losses on texts."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from ray.train import Checkpoint

from foldray.blueprint import ModelSpec, Ownership, parameter_table
from foldray.comm import Groups
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.model import Batch, Cache, Routes, Transformer
from foldray.model.routes import checked_experts
from foldray.moe import MoeBackend
from foldray.recipe import Recipe
from foldray.runtime import State, frozen_shards
from trainers.data.chat import Chat
from trainers.data.conversations import messages_of
from trainers.data.tokenizers import Tokenizer, load_tokenizer
from trainers.hugging_face.weights import Weights
from trainers.inference.given import Tokens, check_count, checked_ids, utf8
from trainers.inference.sampling import Generated, Sampler, Sampling
from trainers.inference.scoring import Score, windows
from trainers.inference.stream import TextStream
from trainers.inference.trained import Trained, fill
from trainers.worker.engines import DTYPES

_TOGETHER = 4096  # tokens of a pass, if a window is not longer
_LOGITS = 1 << 25  # elements of the logits that exist at a time


class Model:
    """A trained model, whole in this process.

        model = Model.load(result.checkpoint)
        print(model.generate("class Parser:").text)

    Experts drop no tokens here, even if they did while training, because the capacity of an expert would depend on the length of
    the text and on tokens that are not there yet. foldray's own gate and kernels compute, whatever `moe.backend` trained.

    Args:
        recipe: the recipe of the training.
        transformer: the weights. It holds all of `dropless(recipe.model)`.
        name: the run or checkpoint, for messages.
        step: number of finished steps of the training.
    """

    def __init__(self, recipe: Recipe, transformer: Transformer, name: str = "", step: int = 0):
        self.recipe, self.transformer, self.name, self.step = recipe, transformer.requires_grad_(False), name, step

    @classmethod
    def load(
        cls,
        run: str | Path | Checkpoint,
        recipe: Recipe | None = None,
        device: torch.device | str | None = None,
        trust: bool = False,
    ) -> Model:
        """Load a model in the precision of its training. Ray need not run.

        Args:
            run: path or URI of a run, for its newest checkpoint, or of a checkpoint; or Ray's handle of a checkpoint
                (`result.checkpoint`).
            recipe: the recipe of the training. None reads `recipe.yaml` in the folder of the run.
            device: where the model computes. None is the GPU, or the CPU without one.
            trust: whether to import the modules that `recipe.yaml` names (`module:NAME`), which runs their code.

        Raises:
            UserError: there is no undamaged checkpoint, or no recipe, or the checkpoint has another model.
        """
        return cls.of(Trained.at(run, recipe, trust), device)

    @classmethod
    def of(cls, trained: Trained, device: torch.device | str | None = None) -> Model:
        """Load a model that `Trained.at` has found."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        recipe, fold = trained.recipe, Fold(1)
        transformer = Transformer(
            Ownership(dropless(recipe.model), fold), Groups.create(fold), MoeBackend(experts=recipe.moe.experts), seed=None,
            device=device, dtype=DTYPES[recipe.precision],
        )  # fmt: skip
        if recipe.model.adapter is not None:  # the checkpoint has the adapters alone
            Weights.of(recipe).fill(recipe.model, frozen_shards(transformer), dict(transformer.named_parameters()))
        with trained.opened() as stored:
            fill(stored, _state(transformer))
        return cls(recipe, transformer, trained.name, trained.step)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight by foldray's name. It is the model's own tensor."""
        return ((key.removeprefix("model/"), tensor) for key, tensor in _state(self.transformer).items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all weights by foldray's names, such as those of a `FoldedModel`. They are rounded to the precision of this model.

        Raises:
            UserError: there is no such weight, it has another shape, or some are missing. Those before it are taken.
        """
        own, unused = dict(self.weights()), {row.name for row in parameter_table(self.recipe.model)}
        missing = {*own}
        unused -= missing  # blocks that predict further tokens in training
        for name, tensor in weights:
            if name in unused:
                continue
            if name not in own or tensor.shape != own[name].shape:
                raise UserError("weights", name, f"with the shape {list(tensor.shape)} is no weight of this model")
            own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise UserError("weights", min(missing), "is missing")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the recipe.

        Raises:
            UserError: it is not on this machine, or has more ids than the model.
            MissingPackage: it needs `transformers`, which is not installed.
        """
        name, vocab = self.recipe.data.tokenizer, self.recipe.model.vocab
        tokenizer = load_tokenizer(name)
        if tokenizer.vocab_size > vocab:
            raise UserError("data.tokenizer", name, f"has {tokenizer.vocab_size} ids, and the model only {vocab}")
        return tokenizer

    @torch.no_grad()
    def logits(self, tokens: Tokens) -> torch.Tensor:
        """Return the logits of the next token at every position: [B, L] → [B, L, V], or [L] → [L, V].

        Args:
            tokens: ids. Sequences begin with a separator, as in training (`Model.tokenizer.separator`).

        Raises:
            UserError: there is no token, an id is not in the vocabulary, or sequences are longer than the learned positions.
        """
        ids = self._sequences(tokens)
        logits = self.transformer.logits(ids.view(-1, ids.shape[-1]))
        return logits.view(*ids.shape, -1)

    @torch.no_grad()
    def log_probs(self, tokens: Tokens, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return the log-probability of every token but the first, given those before it: [B, L] → [B, L − 1], or [L] → [L − 1].

        Args:
            tokens: ids, as in `logits`.
            experts: the experts of all tokens but the last one, [M, B, L − 1, K] or [M, L − 1, K], such as those with which a
                text was written (`Generated.experts`); −1 leaves a token's to the router. None leaves all.

        Raises:
            UserError: as `logits`, or experts of another shape, that there are not, or that a token has twice.
        """
        ids = self._sequences(tokens)
        token_BL = ids.view(-1, ids.shape[-1])
        sequences, length = token_BL.shape[0], token_BL.shape[1] - 1
        if not length:
            raise UserError("tokens", list(ids.shape), "must have at least two tokens, of which the second has one before it")
        if experts is not None:
            given = experts.unsqueeze(1) if ids.dim() == 1 and experts.dim() == 3 else experts
            experts = checked_experts(given, self.recipe.model, sequences, length).to(self.device)
        batch = Batch(token_BL[:, :-1], token_BL[:, 1:], None, experts)
        x_BLH = self.transformer.hidden(batch)
        found = [
            self.transformer.head_logits(x_BLH[:, run.start : run.stop])
            .log_softmax(-1)
            .gather(-1, batch.target_BL[:, run.start : run.stop, None])
            for run in self._runs(sequences, length)
        ]
        return torch.cat(found, dim=1).view(*ids.shape[:-1], -1)

    @torch.no_grad()
    def routes(self, tokens: Tokens) -> torch.Tensor:
        """Return the experts that the routers choose: [B, L] → int16 [M, B, L, K], or [L] → [M, L, K].

        M are the blocks with experts, K the experts of a token, the best first.

        Raises:
            UserError: as `logits`.
        """
        ids = self._sequences(tokens)
        token_BL = ids.view(-1, ids.shape[-1])
        with Routes(self.transformer) as routes:
            self.transformer.hidden(Batch(token_BL, token_BL))
        return routes.experts(len(token_BL)).view(len(self.recipe.model.moe_layers), *ids.shape, -1)

    def _sequences(self, tokens: Tokens) -> torch.Tensor:
        ids = self._ids(tokens, "tokens")
        if ids.dim() not in (1, 2):
            raise UserError("tokens", list(ids.shape), "must be one sequence [L] or several of the same length [B, L]")
        self._check_positions("tokens", ids.shape[-1])
        return ids

    def generate(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        tokens: int = 128,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        told: Callable[[str], None] | None = None,
        routes: bool = False,
    ) -> Generated:
        """Continue a prompt, token by token, until the model ends the document with a separator or an end that it came with
        (`export` in the recipe), or to a number of tokens.

        A model that was trained on conversations answers better to `chat`.

        Args:
            prompt: a text; an empty one begins a new document. Or ids [L], which are taken as they are. A text has a separator
                in front, as in training.
            tokens: most tokens of the continuation.
            temperature, top_p, top_k, seed: the rule of drawing (`Sampling`). Temperature 0 is greedy.
            told: called with each piece of text as it comes. The pieces make up the text.
            routes: whether to keep the experts that the routers choose (`Generated.experts`).

        Raises:
            UserError: a value is out of its range, the prompt is no text or has an unknown id, prompt and continuation are longer
                than the learned positions, or the model's logits are not finite.
        """
        sampler = Sampling(temperature, top_p, top_k, seed).sampler()
        return self._generate(self._prompt(prompt), tokens, sampler, self._stops, told, routes)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokens: int = 128,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        told: Callable[[str], None] | None = None,
        routes: bool = False,
    ) -> Generated:
        """Answer a conversation, in the chat template of the tokenizer, until the model ends the answer, or to a number of
        tokens.

        An answer ends with what follows one in the template, with the tokenizer's eos token, or with what ends a text.

        Args:
            messages: the conversation so far, as `[{"role": "user", "content": "Hello"}]`.
            tokens, temperature, top_p, top_k, seed, told, routes: as in `generate`.

        Raises:
            UserError: as `generate`; or there are no messages, or the tokenizer has no chat template, or one that refuses them.
        """
        sampler = Sampling(temperature, top_p, top_k, seed).sampler()
        checked = messages_of(list(messages), "the conversation", "messages", len(messages))
        chat = Chat(self.tokenizer)
        prompt_L = self._ids(chat.prompt(checked), "messages")
        return self._generate(prompt_L, tokens, sampler, self._stops.union(chat.ends), told, routes)

    @property
    def _stops(self) -> frozenset[int]:
        """The tokens that end a text."""
        return frozenset([self.tokenizer.separator, *self.recipe.export.ends])

    def _generate(
        self,
        prompt_L: torch.Tensor,
        tokens: int,
        sampler: Sampler,
        stops: Container[int],
        told: Callable[[str], None] | None,
        keeps: bool,
    ) -> Generated:
        self._check_room(len(prompt_L), tokens)
        ids, log_probs, pieces = list[int](), list[float](), list[str]()

        def tell(piece: str) -> None:
            pieces.append(piece)
            if piece and told:
                told(piece)

        stream, routes = TextStream(self.tokenizer.decode, prompt_L.tolist()), Routes(self.transformer)
        with routes if keeps else nullcontext():
            for token, log_prob in self._continued(prompt_L, tokens, sampler, stops):
                ids.append(token)
                log_probs.append(log_prob)
                tell(stream.add(token))
        tell(stream.rest())
        stopped: Literal["length", "separator"] = "length" if len(ids) == tokens else "separator"
        experts = routes.experts()[:, 0, : len(prompt_L) + len(ids) - 1] if keeps else None
        return Generated("".join(pieces), ids, stopped, sampler.seed, log_probs, experts)

    @torch.no_grad()
    def evaluate(self, text: str, seq_len: int | None = None, told: Callable[[int, int], None] | None = None) -> Score:
        """Score a text in windows that do not overlap (`scoring.py` says which tokens have which context).

        Args:
            text: the text, one document.
            seq_len: tokens of a window; None is that of the training.
            told: called after every pass, with the number of tokens so far and the number of all tokens.

        Raises:
            UserError: the text has no tokens or is not UTF-8, or a window is longer than the learned positions.
        """
        length = self.recipe.data.seq_len if seq_len is None else seq_len
        check_count("seq_len", length)
        self._check_positions("seq_len", length)
        ids = self.tokenizer.encode(utf8("text", text))
        if not len(ids):
            raise UserError("text", text, "has no tokens, so there is nothing to predict")
        length, nats, done = min(length, len(ids)), 0.0, 0
        for batch in windows(ids, self.tokenizer.separator, length, max(1, _TOGETHER // length)):
            nats += self._nats(Batch(batch.token_BL.to(self.device), batch.target_BL.to(self.device)))
            done = min(done + batch.target_BL.numel(), len(ids))
            if told:
                told(done, len(ids))
        return Score(len(ids), len(text.encode()), nats)

    def _check_positions(self, field: str, positions: int) -> None:
        """Raise a UserError about a field if sequences are longer than the learned positions."""
        spec = self.recipe.model
        if spec.positions == "learned" and positions > spec.max_positions:
            rule = f"is more than the {spec.max_positions} positions that the model has learned (model.max_positions)"
            raise UserError(field, positions, rule)

    @property
    def device(self) -> torch.device:
        return next(self.transformer.parameters()).device

    def _continued(
        self, prompt_L: torch.Tensor, tokens: int, sampler: Sampler, stops: Container[int]
    ) -> Iterator[tuple[int, float]]:
        """Yield the tokens of a continuation with their log-probabilities, without the token of `stops` that ends it."""
        cache = Cache(self.transformer)
        for part_S in prompt_L.to(self.device).split(_TOGETHER):
            x_1SH = cache.extend(part_S.unsqueeze(0))
        for left in reversed(range(tokens)):
            logit_V = self._next_logits(x_1SH)
            token = sampler.draw(self._of_tokenizer(logit_V))
            if token in stops:
                return
            yield token, float(logit_V.log_softmax(-1)[token])
            if left:
                x_1SH = cache.extend(torch.tensor([[token]], device=self.device))

    @torch.no_grad()
    def _next_logits(self, x_1SH: torch.Tensor) -> torch.Tensor:
        """Return the logits after the last token, [V]."""
        logit_V = self.transformer.head_logits(x_1SH[:, -1:]).flatten()
        if not bool(logit_V[: self.tokenizer.vocab_size].isfinite().all()):
            raise UserError("RUN", self.name, f"has a model, after {self.step} steps, whose logits are not finite numbers")
        return logit_V

    def _of_tokenizer(self, logit_V: torch.Tensor) -> torch.Tensor:
        """Return logits that are −inf for ids that stand for no text: they only pad the vocabulary."""
        size = self.tokenizer.vocab_size
        return torch.nn.functional.pad(logit_V[:size], (0, len(logit_V) - size), value=-torch.inf)

    def _runs(self, sequences: int, length: int) -> Iterator[range]:
        """Yield runs of positions whose logits are not larger than everything else, as those of a large vocabulary would be."""
        size = max(1, _LOGITS // (sequences * self.recipe.model.vocab))
        return (range(start, min(start + size, length)) for start in range(0, length, size))

    def _nats(self, batch: Batch) -> float:
        """Return the cross-entropy of the targets that count, summed."""
        x_BLH = self.transformer.hidden(batch)
        sequences, length = batch.token_BL.shape
        runs = self._runs(sequences, length)
        return sum(float(self.transformer.head_loss(x_BLH[:, run.start : run.stop], batch, run)[1]) for run in runs)

    def _prompt(self, prompt: str | Sequence[int] | torch.Tensor) -> torch.Tensor:
        if isinstance(prompt, str):
            text = self.tokenizer.encode(utf8("prompt", prompt)).tolist()
            return self._ids([self.tokenizer.separator, *text], "tokens")
        ids = self._ids(prompt, "prompt")
        if ids.dim() != 1:
            raise UserError("prompt", list(ids.shape), "must be a text, or the ids of one sequence [L]")
        return ids

    def _ids(self, tokens: Tokens, field: str) -> torch.Tensor:
        return checked_ids(tokens, self.recipe.model.vocab, field).to(self.device)

    def _check_room(self, length: int, tokens: int) -> None:
        """Refuse a continuation that would be too long. No token attends to the last one, so it needs no position."""
        check_count("tokens", tokens)
        spec = self.recipe.model
        if spec.positions == "learned" and length + tokens - 1 > spec.max_positions:
            room = spec.max_positions - length + 1
            rule = f"is too many behind a prompt of {length}: the model has learned {spec.max_positions} positions"
            raise UserError("tokens", tokens, rule, [f"1…{room}"] if room > 0 else None)


def dropless(model: ModelSpec) -> ModelSpec:
    """Return the same model, whose experts take every token, without the blocks that predict further tokens in training."""
    router = model.router.model_copy(update={"capacity_factor": None, "drop_scope": "sub_sequence", "pad": False})
    return model.model_copy(update={"router": router, "mtp_depth": 0})


def _state(model: Transformer) -> State:
    """Return views of all weights that training changes, and of router biases, by their names in a checkpoint."""
    parts = ((name, parameter[index]) for local, parameter in model.trained() for name, index in model.global_parts[local])
    return {f"model/{name}": tensor.detach() for name, tensor in (*parts, *model.biases().items())}

"""The decoder-only Transformer with Mixture-of-Experts blocks, in segments that a schedule runs one by one.

B sequences, s positions of this rank's piece, S of its context-parallel shard (s · tp), L of the whole sequence; H hidden,
E experts, M MoE blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from foldray.comm import Groups
from foldray.model.attention import Attention, ContextMode, Place
from foldray.model.layers import FeedForward, Norm, Vocabulary
from foldray.model.parts import parts_below
from foldray.moe.layer import MoeBackend, MoELayer, MoeStats
from foldray.moe.router import Router
from foldray.spec import Layout, ModelSpec, Ownership, ParameterSpec, Stage
from foldray.spec.parameters import GradientClass


class Batch(NamedTuple):
    """Whole sequences of one micro-batch; all ranks of a data-parallel place get the same, and each takes its piece.

    Shapes: token_BL, target_BL int64; segment_BL document numbers that attention does not cross, or None.
    """

    token_BL: torch.Tensor
    target_BL: torch.Tensor
    segment_BL: torch.Tensor | None = None


class Losses(NamedTuple):
    """What a rank adds to the losses of a micro-batch, or of several: summed over all ranks, over DP·CP, they are means.

    Shapes: language, balance, z scalars, means over tokens; balance and z also over MoE blocks. count_ME int64, assignments per
    MoE block and expert; dropped int64 scalar: sums.
    """

    language: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor
    count_ME: torch.Tensor
    dropped: torch.Tensor


class Output(NamedTuple):
    """What a segment gives.

    Args:
        x_BsH: activations for the next segment; None behind the head.
        objective: this rank's share of the loss that is differentiated, with its weights; None if the segment adds nothing.
        losses: what it adds to the reported losses; None if nothing.
    """

    x_BsH: torch.Tensor | None
    objective: torch.Tensor | None = None
    losses: Losses | None = None


class Segment(NamedTuple):
    """A run of computation between two cuts of the autograd graph: embedding, one block, or head with loss."""

    run: Callable[[torch.Tensor | None, Batch], Output]
    parameters: list[nn.Parameter]


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm dense or MoE feed-forward."""

    def __init__(
        self,
        model: ModelSpec,
        layer: int,
        groups: Groups,
        backend: MoeBackend,
        context: ContextMode,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.attention_norm = Norm(model, device, dtype)
        self.attention = Attention(model, groups, context, device, dtype)
        self.ffn_norm = Norm(model, device, dtype)
        if model.is_moe(layer):
            shared = FeedForward(model, model.shared_hidden, groups.tensor, device, dtype) if model.shared_hidden else None
            self.moe = MoELayer(model, groups, backend, shared, device, dtype)
        else:
            self.ffn = FeedForward(model, model.ffn_hidden, groups.tensor, device, dtype)

    def forward(self, x_BsH: torch.Tensor, place: Place) -> tuple[torch.Tensor, MoeStats | None]:
        x_BsH = x_BsH + self.attention(self.attention_norm(x_BsH), place)
        h_BsH = self.ffn_norm(x_BsH)
        if hasattr(self, "moe"):
            y_BsH, stats = self.moe(h_BsH)
            return x_BsH + y_BsH, stats
        return x_BsH + self.ffn(h_BsH), None


class Transformer(nn.Module):
    """This rank's part of the model: its pipeline stages, and its share of everything in them.

    Args:
        ownership: the model, the fold, and who owns what.
        groups: the fold's communicators.
        backend: kernels of the MoE layers.
        context: how keys and values travel under context parallelism.
        seed: every parameter is drawn from its own stream (seed, global name): all folds start equal.
    """

    def __init__(
        self,
        ownership: Ownership,
        groups: Groups,
        backend: MoeBackend | None = None,
        context: ContextMode = "ring",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        model, device, backend = ownership.model, torch.device(device or "cpu"), backend or MoeBackend()
        self.spec, self.ownership, self.groups = model, ownership, groups
        self.stages = ownership.held_stages(groups.rank)
        self.pieces = ownership.pieces(groups.rank)
        place = groups.coordinate["attention"]
        self.layout = Layout(groups.fold.cp, groups.fold.tp, place["cp"], place["tp"])
        last = any(stage.last for stage in self.stages)
        if "embedding.weight" in self.pieces:
            self.embedding = Vocabulary(model, groups.tensor, device, dtype)
        if "positions.weight" in self.pieces:
            shape = (model.max_positions, model.hidden)
            self.positions = nn.Embedding(*shape, _weight=torch.empty(shape, device=device, dtype=dtype))
        layers = [layer for stage in self.stages for layer in stage.layers]
        self.blocks = nn.ModuleDict({str(i): Block(model, i, groups, backend, context, device, dtype) for i in layers})
        if last:
            self.final_norm = Norm(model, device, dtype)
        if "head.weight" in self.pieces:
            self.head = Vocabulary(model, groups.tensor, device, dtype)
        self.global_parts = parts_below(self.named_modules())
        self._initialise(seed)

    def segments(self, stage: Stage) -> list[Segment]:
        """The segments of one of this rank's stages, in order."""
        found = []
        if stage.first:
            modules = [self.embedding, *([self.positions] if self.spec.positions == "learned" else [])]
            found.append(Segment(lambda _, batch: Output(self._embed(batch)), _parameters(*modules)))
        for layer in stage.layers:
            found.append(Segment(self._block(layer), _parameters(self.blocks[str(layer)])))
        if stage.last:
            found.append(Segment(self._head_and_loss, _parameters(self.final_norm, self._head)))
        return found

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Losses]:
        """Objective and losses in one graph, for a rank that holds all stages: what every schedule must equal."""
        objective, losses, x_BsH = torch.zeros(()), self.no_losses(), None
        for stage in self.stages:
            for segment in self.segments(stage):
                output = segment.run(x_BsH, batch)
                x_BsH = output.x_BsH
                objective = objective if output.objective is None else objective + output.objective
                losses = add_losses(losses, output.losses)
        return objective, losses

    def logits(self, token_BL: torch.Tensor, segment_BL: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of this rank's shard and vocabulary [B, S, V], for a rank that holds all stages."""
        batch = Batch(token_BL, token_BL, segment_BL)
        x_BsH = self._embed(batch)
        for layer in self.blocks:
            x_BsH, _ = self.blocks[layer](x_BsH, self._place(batch))
        return self._head.logits(self.final_norm(x_BsH))

    def no_losses(self) -> Losses:
        """Losses of nothing yet."""
        device = next(self.parameters()).device
        zero, none = (torch.zeros((), dtype=dtype, device=device) for dtype in (torch.float64, torch.int64))
        blocks = len(self.spec.moe_layers)
        return Losses(zero, zero, zero, none.new_zeros(blocks, self.spec.experts if blocks else 0), none)

    def update_biases(self, count_ME: torch.Tensor) -> None:
        """Move the routers' selection biases, from the assignments of a whole optimizer step over all ranks."""
        for layer, router in self._routers():
            router.update_bias(count_ME[self.spec.moe_layers.index(layer)])

    def biases(self) -> dict[str, torch.Tensor]:
        """The routers' selection biases by global name."""
        return {f"blocks.{layer}.moe.router.bias": router.bias for layer, router in self._routers()}

    def by_class(self, kind: GradientClass) -> list[nn.Parameter]:
        """This rank's parameters of a gradient class."""
        return [parameter for name, parameter in self.named_parameters() if self._spec(name).gradient_class == kind]

    def counted(self) -> list[nn.Parameter]:
        """Parameters whose pieces this rank counts in a norm over the whole model."""
        names = set(self.ownership.counted(self.groups.rank))
        return [parameter for name, parameter in self.named_parameters() if self.global_parts[name][0][0] in names]

    def tied(self) -> list[nn.Parameter]:
        """Parameters that the first and the last stage share."""
        return [self.embedding.weight] if self.spec.tied_embeddings and self.groups.tied_gradients.size > 1 else []

    @property
    def _head(self) -> Vocabulary:
        return self.embedding if self.spec.tied_embeddings else self.head

    def _embed(self, batch: Batch) -> torch.Tensor:
        place = self._place(batch)
        x_BsH = self.embedding.embed(batch.token_BL[:, place.position_S])
        if self.spec.positions == "learned":
            s = x_BsH.shape[1]
            x_BsH = x_BsH + self.positions.weight[place.position_S[self.layout.tp_rank * s :][:s]]
        return x_BsH

    def _block(self, layer: int) -> Callable[[torch.Tensor | None, Batch], Output]:
        block, weights, blocks = self.blocks[str(layer)], self.spec.router, self.spec.moe_layers

        def run(x_BsH: torch.Tensor | None, batch: Batch) -> Output:
            y_BsH, stats = block(x_BsH, self._place(batch))
            if stats is None:
                return Output(y_BsH)
            objective = weights.balance_loss * stats.balance_loss + weights.z_loss * stats.z_loss
            nothing = self.no_losses()
            count_ME = nothing.count_ME.clone()
            count_ME[blocks.index(layer)] = stats.count_E
            balance, z = (value.detach().double() / len(blocks) for value in (stats.balance_loss, stats.z_loss))
            return Output(y_BsH, objective, Losses(nothing.language, balance, z, count_ME, stats.dropped))

        return run

    def _head_and_loss(self, x_BsH: torch.Tensor | None, batch: Batch) -> Output:
        target_BS = batch.target_BL[:, self._place(batch).position_S]
        language = self._head.loss(self.final_norm(x_BsH), target_BS)
        # All tensor-parallel ranks differentiate the same loss, each its own part of it; one of them reports it.
        reported = language.detach().double() * (self.layout.tp_rank == 0)
        return Output(None, language, self.no_losses()._replace(language=reported))

    def _place(self, batch: Batch) -> Place:
        device = batch.token_BL.device
        chunks = self.layout.chunks(batch.token_BL.shape[1])
        position_S = torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])
        return Place(position_S, batch.segment_BL)

    def _routers(self) -> Iterator[tuple[int, Router]]:
        for layer, block in self.blocks.items():
            if isinstance(moe := getattr(block, "moe", None), MoELayer):
                yield int(layer), moe.router

    def _spec(self, name: str) -> ParameterSpec:
        return self.pieces[self.global_parts[name][0][0]].spec

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        for local, parameter in self.named_parameters():
            for name, index in self.global_parts[local]:
                piece = self.pieces[name]
                parameter[index].copy_(_drawn(piece.spec.shape, piece.spec.init, seed, name)[piece.box])


def add_losses(total: Losses, more: Losses | None) -> Losses:
    return total if more is None else Losses(*(a + b for a, b in zip(total, more, strict=True)))


def _parameters(*modules: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def _drawn(shape: tuple[int, ...], std: float | None, seed: int, name: str) -> torch.Tensor:
    """The whole parameter as it is initialised."""
    if std is None or std == 0:
        return torch.full(shape, 1.0 if std is None else 0.0)
    # A stream per name: the weights do not depend on which rank draws them, nor on the order.
    # (Torch's generator heeds 32 bits of its seed.)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(shape).normal_(0.0, std, generator=generator)

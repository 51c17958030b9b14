"""The decoder-only Transformer with Mixture-of-Experts blocks. A schedule calls its methods op by op.

Legend: B sequences, s positions of this rank's piece, S positions of its context-parallel shard (s · tp), L positions of the
whole sequence, H hidden, V rows of the vocabulary that this rank holds, E experts, M MoE blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from foldray.blueprint import Layout, Maker, Ownership, ParameterSpec
from foldray.blueprint.parameters import GradientClass
from foldray.comm import Groups
from foldray.kernels.autograd import Later
from foldray.kernels.transfer import move, to_device
from foldray.kinds import EXPERT
from foldray.model.attention import ContextMode, Place
from foldray.model.attention_mask import AttentionMask
from foldray.model.batch import Batch, Losses
from foldray.model.block import Block
from foldray.model.initial import initial_values, parameters_as
from foldray.model.layers import Norm, Vocabulary, scaled
from foldray.model.parts import parts_below
from foldray.moe import Balance, MoeBackend, MoELayer, Router
from foldray.moe.apart import TokenExchange, TokenHalf


class Transformer(nn.Module):
    """This rank's stages of the model, and in them its share of the parameters.

    Args:
        context: how keys and values travel under context parallelism.
        seed: seed of the initial weights. Seed and global name of a parameter determine its weights, so all folds start
            equal. None leaves the weights undefined, for a caller that fills all of them.
    """

    def __init__(
        self,
        ownership: Ownership,
        groups: Groups,
        backend: MoeBackend | None = None,
        context: ContextMode = "ring",
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        model, backend = ownership.model, backend or MoeBackend()
        self.spec, self.ownership, self.groups = model, ownership, groups
        self.pieces, self.later = ownership.pieces(groups.rank), Later()
        if groups.owns_tokens:
            place, self.stages = groups.coordinate["attention"], ownership.held_stages(groups.rank)
            self.layout = Layout(groups.fold.cp, groups.fold.tp, place["cp"], place["tp"])
        else:
            self.layout, self.stages = Layout(1, 1, 0, 0), ownership.held_expert_stages(groups.rank)
        last = groups.owns_tokens and any(stage.last for stage in self.stages)
        layers = [layer for stage in self.stages for layer in stage.layers if groups.owns_tokens or model.is_moe(layer)]
        attentions = [model.block(layer).attention for layer in layers]
        self._windows = {attention.window: attention.sees for attention in attentions}
        with parameters_as(device, dtype):
            if "embedding.weight" in self.pieces:
                self.embedding = Vocabulary(ownership.vocabulary(groups.rank), model.hidden, groups.tensor, self.later)
            if "positions.weight" in self.pieces:
                shape = (model.max_positions, model.hidden)
                self.positions = nn.Embedding(*shape, _weight=torch.empty(shape))
            self.blocks = nn.ModuleDict({str(i): Block(ownership, i, groups, backend, context, self.later) for i in layers})
            if last:
                self.final_norm = Norm(model)
            if "head.weight" in self.pieces:
                self.head = Vocabulary(ownership.vocabulary(groups.rank), model.hidden, groups.tensor, self.later)
        self._positions: dict[int, torch.Tensor] = {}  # by length of a sequence
        self._places: dict[tuple[int, torch.device], list[Place]] = {}  # of the last length: those of many would fill the memory
        self._exchanges: dict[int, TokenExchange] = {}  # by position of experts
        self._wire = backend.formats
        self.global_parts = parts_below(self.named_modules())
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self._spec(name).trained)
        self._makers = {p: ownership.makers(self._spec(name), groups.rank) for name, p in self.trained()}
        self._made_by: dict[Maker, list[nn.Parameter]] = {}
        for parameter, makers in self._makers.items():
            for maker in makers:
                self._made_by.setdefault(maker, []).append(parameter)
        if seed is not None:
            self._initialise(seed)

    def slice(self, lengths: tuple[int, ...] | None) -> None:
        """Cut later batches into slices of these lengths, in tokens. None leaves sequences whole, of any length."""
        self.layout = replace(self.layout, slices=lengths)
        self._positions.clear()
        self._places.clear()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Losses]:
        """Return objective and losses, from one autograd graph. Every schedule must give the same result.

        The rank must hold all of the model, and sequences must be whole.
        """
        (place,) = self.places(batch)
        x_BsH, objective, losses = self.embed(batch, place), torch.zeros(()), self.start_losses(batch)
        for layer in self.spec.all_layers:
            x_BsH = self.enter(x_BsH, layer, place, batch.token_BL)
            x_BsH, balance = self._whole_block(x_BsH, layer, batch, place)
            if balance is not None:
                objective = objective + balance.objective(self.spec.router) / losses.sequences
                losses = losses.with_router(self.spec.moe_layers.index(layer), balance)
            if (depth := self.depth(layer)) is not None:
                loss, reported = self.head_loss(x_BsH, batch, range(x_BsH.shape[1]), depth)
                objective, losses = objective + loss * self._weight(losses, depth), losses.with_language(depth, reported)
        return objective, losses

    def _weight(self, losses: Losses, depth: int) -> torch.Tensor:
        """Return the weight of a token's loss in the objective, if these losses have the numbers of all tokens."""
        if depth == 0:
            return 1 / losses.tokens
        return self.spec.mtp_weight / self.spec.mtp_depth / losses.further_tokens_D[depth - 1]

    def logits(self, token_BL: torch.Tensor, segment_BL: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of this rank's shard and vocabulary: [B, S, V]. The rank must hold all stages."""
        return self.head_logits(self.hidden(Batch(token_BL, token_BL, segment_BL)))

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the output of the last block, without those of multi-token prediction: [B, s, H].

        The rank must hold all stages, and sequences must be whole.
        """
        (place,) = self.places(batch)
        x_BsH = self.embed(batch, place)
        for layer in range(self.spec.layers):
            x_BsH, _ = self._whole_block(x_BsH, layer, batch, place)
        return x_BsH

    def _whole_block(self, x_BsH: torch.Tensor, layer: int, batch: Batch, place: Place) -> tuple[torch.Tensor, Balance | None]:
        return self.block(layer)(x_BsH, place, None, *self.given_experts(batch, layer, range(x_BsH.shape[1])))

    def given_experts(self, batch: Batch, layer: int, tokens: range) -> list[torch.Tensor]:
        """Return the experts [T, K] that a batch gives for some tokens of this rank's piece in a MoE block, or nothing."""
        if batch.expert_MBLK is None or not self.spec.is_moe(layer):
            return []
        expert_BLK = batch.expert_MBLK[self.spec.moe_layers.index(layer)]
        return [expert_BLK[:, self.positions_of(batch, tokens)].flatten(0, 1)]

    def head_logits(self, x_BsH: torch.Tensor) -> torch.Tensor:
        """Return logits of this rank's vocabulary from outputs of the last block: [B, s, H] → [B, S, V]."""
        return self._head.logits(self._to_head(x_BsH))

    def start_losses(self, batch: Batch) -> Losses:
        """Return losses of zero with the numbers of counted tokens and sequences of a batch.

        Of the ranks that read the same sequences, only the first has these numbers, so that a sum over ranks counts them
        once.
        """
        losses = Losses.zero(self.spec, next(self.parameters()).device)
        place = self.groups.coordinate.get("attention")
        if place is None or place["tp"] or place["cp"] or place["pp"]:
            return losses
        further = [batch.counted(depth) for depth in range(1, self.spec.mtp_depth + 1)]
        losses = losses._replace(tokens=batch.counted(), sequences=losses.sequences + len(batch.target_BL))
        return losses._replace(further_tokens_D=torch.stack(further)) if further else losses

    def update_biases(self, count_ME: torch.Tensor) -> None:
        """Give the routers the assignments of an optimizer step on all ranks, which move their biases (`Router.update`).

        All ranks must call this.
        """
        device = next(self.parameters()).device
        count_ME = count_ME if count_ME.device == device else move(count_ME, device)  # the host need not wait
        routers = dict(self.routers())
        if routers and self.spec.router.bias_update == "quantile":
            own_MEQ = torch.stack([router.margin_EQ for router in routers.values()])
            sums = next(iter(routers.values())).sequences.sum_of_batch(own_MEQ)
            for router, margin_EQ in zip(routers.values(), sums, strict=True):
                router.margin_EQ.copy_(margin_EQ)
        for layer, router in routers.items():
            router.update(count_ME[self.spec.moe_layers.index(layer)])

    def forget_margins(self) -> None:
        """Leave out the tokens since the last update of biases, because no update follows."""
        for _, router in self.routers():
            router.margin_EQ.zero_()

    def biases(self) -> dict[str, torch.Tensor]:
        """Return the routers' selection biases [E] by global name."""
        return {f"blocks.{layer}.moe.router.bias": router.bias for layer, router in self.routers()}

    def frequencies(self) -> dict[str, torch.Tensor]:
        """Return the routers' frequencies of the last step [E] by global name, if the balance loss takes them."""
        if self.spec.router.balance_scope != "global_batch":
            return {}
        return {f"blocks.{layer}.moe.router.frequency": router.frequency for layer, router in self.routers()}

    def tables(self) -> Iterator[torch.Tensor]:
        """Yield what the ops of all blocks share beside weights: the cosines and sines of positions."""
        for place in (place for places in self._places.values() for place in places):
            for turn in place.rotations.values():
                yield from (turn.cos_SR, turn.sin_SR)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters that training changes, with their names. With adapters, these are theirs alone."""
        return ((name, parameter) for name, parameter in self.named_parameters() if self._spec(name).trained)

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.trained()]

    def by_class(self, kind: GradientClass, frozen: bool = False) -> list[nn.Parameter]:
        """Return this rank's parameters of a gradient class that training changes; with `frozen`, all others of it as well."""
        some = self.named_parameters() if frozen else self.trained()
        return [parameter for name, parameter in some if self._spec(name).gradient_class == kind]

    def in_slices(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients the slices of an expert have parts of (`ParameterSpec.in_slices`)."""
        return [parameter for name, parameter in self.trained() if self._spec(name).in_slices]

    def hidden_matrices(self) -> set[nn.Parameter]:
        """Return this rank's tensors of matrices of the hidden layers (`ParameterSpec.is_hidden_matrix`)."""
        return {parameter for name, parameter in self.named_parameters() if self._spec(name).is_hidden_matrix}

    def counted(self) -> list[nn.Parameter]:
        """Return the parameters that this rank counts in a norm over the whole model (`Ownership.counted`)."""
        names = set(self.ownership.counted(self.groups.rank))
        return [parameter for name, parameter in self.trained() if self.global_parts[name][0][0] in names]

    def tied(self) -> list[nn.Parameter]:
        """Return this rank's parameters that another rank's stage shares: an embedding that both need, or nothing."""
        shared = self.spec.shares_embedding and self.groups.tied_gradients.size > 1 and self.embedding.weight.requires_grad
        return [self.embedding.weight] if shared else []

    @property
    def _head(self) -> Vocabulary:
        return self.embedding if self.spec.tied_embeddings else self.head

    def block(self, layer: int) -> Block:
        return cast(Block, self.blocks[str(layer)])

    def token_exchange(self, layer: int) -> TokenExchange:
        """Return the exchange with a block's experts, if they have ranks of their own and this rank owns tokens."""
        position = self.ownership.expert_position(layer)
        if position not in self._exchanges:
            self._exchanges[position] = TokenExchange(self.groups, position, self._wire)
        return self._exchanges[position]

    def places(self, batch: Batch) -> list[Place]:
        """Return this rank's positions of the sequences, and the keys that they see, slice by slice.

        They are made once for all batches of a length, but for the keys that are seen within documents.
        """
        (_, length), device, slices = batch.token_BL.shape, batch.token_BL.device, self.layout.cut(batch.token_BL.shape[1])
        if (length, device) not in self._places:
            self._places = {(length, device): [self.place(length, part, device) for part in slices]}
        places = self._places[length, device]
        if batch.segment_BL is None:
            return places
        segment_BL = batch.segment_BL.cpu()  # the host waits for the device, once
        masks = (self._masks(length, part, device, segment_BL) for part in slices)
        position_BL = batch.position_BL
        return [
            replace(place, masks=of_documents, within_BS=position_BL[:, place.position_S])
            for place, of_documents in zip(places, masks, strict=True)
        ]

    def place(self, length: int, part: range, device: torch.device) -> Place:
        """Return this rank's positions of one slice of sequences of a length, and the keys that they see."""
        chunks = self.layout.chunks(part)
        position_S = torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])
        return Place(position_S, self._masks(length, part, device))

    def _masks(
        self, length: int, part: range, device: torch.device, segment_BL: torch.Tensor | None = None
    ) -> dict[str, AttentionMask]:
        layout = self.layout
        shards = [replace(layout, cp_rank=member).chunks(part) for member in range(layout.cp)]
        return {
            name: AttentionMask(part, length, shards, layout.cp_rank, segment_BL, window, device)
            for name, window in self._windows.items()
        }

    def embed(self, batch: Batch, place: Place) -> torch.Tensor:
        """Return embeddings of this rank's piece of a slice: [B, s, H]."""
        x_BsH = self._embedded(batch.token_BL[:, place.position_S])
        if self.spec.positions == "learned":
            s = x_BsH.shape[1]
            x_BsH = x_BsH + self.positions.weight[batch.position_BL[:, place.position_S[self.layout.tp_rank * s :][:s]]]
        return x_BsH

    def enter(self, x_BsH: torch.Tensor, layer: int, place: Place, token_BL: torch.Tensor | None = None) -> torch.Tensor:
        """Return the input of a block from the output of the block before: [B, s, H].

        Only multi-token prediction changes it, and reads the tokens.
        """
        block, depth = self.block(layer), layer - self.spec.layers + 1
        if not hasattr(block, "mtp"):
            return x_BsH
        assert token_BL is not None
        position_S = (place.position_S + depth).clamp_max(token_BL.shape[1] - 1)
        return block.mtp(self._norm(depth - 1)(x_BsH), self._embedded(token_BL[:, position_S]))

    def _embedded(self, token_BS: torch.Tensor) -> torch.Tensor:
        return scaled(self.embedding.embed(token_BS), self.spec.embedding_scale)

    def depth(self, layer: int) -> int | None:
        """Return how many tokens after the next one the head behind a block predicts; None if there is no head."""
        return layer - self.spec.layers + 1 if layer >= self.spec.layers - 1 else None

    def head_loss(self, x_BsH: torch.Tensor, batch: Batch, tokens: range, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the language loss of some tokens, summed: a scalar to differentiate, and one to report, in float64.

        `x_BsH` is the output of the last block for these tokens, or of a block of multi-token prediction. The tokens are
        indices in this rank's piece.
        """
        target_BS = batch.target(depth)[:, self.positions_of_head(batch, tokens)]
        normed_BsH, weight_BL = self._to_head(x_BsH, depth), batch.weight(depth)
        if weight_BL is None:
            language = self._head.loss(normed_BsH, target_BS)
        else:
            weight_BS = weight_BL[:, self.positions_of_head(batch, tokens)]
            language = (self._head.losses(normed_BsH, target_BS) * weight_BS).sum()
        # All tensor-parallel ranks have the same loss. Each differentiates it, and one reports it.
        return language, language.detach().double() * (self.layout.tp_rank == 0)

    def log_probs(self, x_BsH: torch.Tensor, batch: Batch, tokens: range) -> torch.Tensor:
        """Return the log-probabilities of the targets of `positions_of_head`, zero where they do not count: [B, S].

        The arguments are those of `head_loss`, and all tensor-parallel ranks have the same result.
        """
        target_BS = batch.target_BL[:, self.positions_of_head(batch, tokens)]
        return -self._head.losses(self._to_head(x_BsH), target_BS)

    def positions_of_head(self, batch: Batch, tokens: range) -> torch.Tensor:
        """Return the positions that the head computes for some tokens of this rank's piece: int64 [S].

        It gathers the tokens of the tensor-parallel ranks, rank by rank.
        """
        return self._pieces(batch.token_BL.shape[1])[:, tokens.start : tokens.stop].flatten()

    def _to_head(self, x_BsH: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """Return what the head multiplies. The factor on logits is there, because they are wider."""
        return scaled(self._norm(depth)(x_BsH), self.spec.logit_scale)

    def _norm(self, depth: int) -> Norm:
        return self.block(self.spec.layers - 1 + depth).mtp.final_norm if depth else self.final_norm

    def parameters_of(self, kind: str, layer: int) -> list[nn.Parameter]:
        """Return this rank's parameters that get a gradient from the backward of ops of this kind and block."""
        made = self._made_by.get((kind, layer), [])
        moe = getattr(self.blocks[str(layer)], "moe", None) if kind == EXPERT else None
        copies = moe.copies if isinstance(moe, MoELayer) else None
        return made if copies is None else [*made, *copies.parameters]

    def makers(self, parameter: nn.Parameter) -> tuple[Maker, ...]:
        """Return the ops whose backward has a gradient for a parameter (`Ownership.makers`)."""
        return self._makers[parameter]

    def positions_of(self, batch: Batch, tokens: range) -> torch.Tensor:
        """Return the positions of some tokens of this rank's piece in their sequences: int64 [s]."""
        return self._pieces(batch.token_BL.shape[1])[self.layout.tp_rank, tokens.start : tokens.stop]

    def _pieces(self, length: int) -> torch.Tensor:
        """Return the positions of every tensor-parallel rank's piece of this shard: int64 [tp, s]."""
        if length not in self._positions:
            layouts = (replace(self.layout, tp_rank=rank) for rank in range(self.layout.tp))
            device = next(self.parameters()).device
            self._positions[length] = to_device([layout.piece(length) for layout in layouts], device, torch.int64)
        return self._positions[length]

    def moe_layers(self) -> Iterator[tuple[int, MoELayer]]:
        """Yield the MoE layers of which this rank has both halves, with the numbers of their blocks."""
        for layer, block in self.blocks.items():
            if isinstance(moe := getattr(block, "moe", None), MoELayer):
                yield int(layer), moe

    def routers(self) -> Iterator[tuple[int, Router]]:
        """Yield the routers of this rank, with the numbers of their blocks."""
        for layer, block in self.blocks.items():
            if isinstance(moe := getattr(block, "moe", None), (MoELayer, TokenHalf)):
                yield int(layer), moe.router

    def _spec(self, name: str) -> ParameterSpec:
        return self.pieces[self.global_parts[name][0][0]].spec

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        for local, parameter in self.named_parameters():
            for name, index in self.global_parts[local]:
                piece = self.pieces[name]
                parameter[index].copy_(initial_values(piece.spec.shape, piece.spec.init, seed, name)[piece.box])

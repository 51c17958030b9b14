"""The owners of the model: the stages that each rank holds, and its box of each parameter. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from foldray.blueprint.block import BlockSpec
from foldray.blueprint.model import ModelSpec
from foldray.blueprint.parameters import GradientClass, ParameterSpec, parameter_table
from foldray.blueprint.stages import Stage, make_stages
from foldray.errors import UserError
from foldray.fold import Fold, divisors
from foldray.kinds import ATTENTION, EMBED, EXPERT, FFN, HEAD, MERGE, ROUTE, SHARED


@dataclass(frozen=True)
class Piece:
    """A rank's box of one parameter of the whole model."""

    spec: ParameterSpec
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


Maker = tuple[str, int]
"""Kind and block of ops whose backward adds to a gradient."""

_BACKWARD = (MERGE, EXPERT, SHARED, ROUTE, FFN, ATTENTION)  # the order of a block's ops in backward


class GradientPart(NamedTuple):
    """A run of a gradient buffer whose gradients come from the same ops, in the order of backward."""

    elements: int
    makers: tuple[Maker, ...]


def made_at(makers: tuple[Maker, ...]) -> tuple[int, int]:
    """Return a sort key: gradients are sorted by the moment at which backward completes them."""
    kind, block = makers[-1]
    if kind == HEAD:
        return (-block - 1, -1)
    return (1, 0) if kind == EMBED else (-block, _BACKWARD.index(kind))


@dataclass(frozen=True)
class Ownership:
    """The stages and the pieces of parameters that each rank holds. All other code takes them from here.

    The first and the last stage hold an embedding that both need (`ModelSpec.shares_embedding`); the first stage counts as its
    owner.

    Args:
        virtual_stages: stages per pipeline position.
        stage_layers: number of blocks of each stage of attention; None cuts evenly.
    """

    model: ModelSpec
    fold: Fold
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_divides(self.model, self.fold)
        _ = self.stages, self.expert_stages  # making them checks them, also where Python runs no assertions

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of attention. The experts have the same stages, unless they have ranks of their own."""
        return make_stages(self.model.layers, self.fold.pp, self.virtual_stages, self.stage_layers, self.model.mtp_depth)

    @cached_property
    def expert_stages(self) -> tuple[Stage, ...]:
        """Stages of the experts. If these have ranks of their own, the stages share the MoE blocks out evenly.

        A dense block before a MoE block counts as part of its stage, where it has no parameters.
        """
        if not self.fold.disjoint:
            return self.stages
        positions, moe = self.fold.moe_pp, self.model.moe_layers
        count = positions * (self.virtual_stages if positions > 1 else 1)
        if count > len(moe):
            per = f" × {self.virtual_stages} virtual stages" if count > positions else ""
            rule = f"makes {count} stages of experts ({positions} positions{per}), but the model has {len(moe)} MoE blocks"
            raise UserError("placement.expert_pp", positions, rule, [f"1…{len(moe) * positions // count}"] if moe else None)
        even = make_stages(len(moe), positions, count // positions)
        layers = len(self.model.all_layers)
        ends = [moe[stage.layers[-1]] + 1 for stage in even[:-1]] + [layers]
        sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        return make_stages(layers, positions, count // positions, sizes)

    def held_stages(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages whose attention a rank holds."""
        return _standing(self.stages, self.fold.coordinate(rank).get("attention"))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The pipeline positions of every block's attention and of its experts, if these have positions of their own.

        Those of the experts come after those of attention. Otherwise it is empty.
        """
        if not self.fold.disjoint:
            return ()
        attention = [stage.position for stage in self.stages for _ in stage.layers]
        experts = [self.fold.pp + stage.position for stage in self.expert_stages for _ in stage.layers]
        return tuple(zip(attention, experts, strict=True))

    def expert_position(self, layer: int) -> int:
        """Return the position of a block's experts among those of the experts, from 0, if they have ranks of their own."""
        return self.places[layer][1] - self.fold.pp

    def attention_around(self, layer: int) -> tuple[int, int]:
        """Return the positions of a block's attention, and of the attention that goes on with its tokens.

        The last block's tokens stay where they are, at the head. The experts must have ranks of their own.
        """
        return self.places[layer][0], self.places[min(layer + 1, self.model.layers - 1)][0]

    def held_expert_stages(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages whose experts a rank holds."""
        return _standing(self.expert_stages, self.fold.coordinate(rank).get("moe"))

    def share(self, layer: int) -> BlockSpec:
        """Return the sizes of a rank's share of a block, in attention's half and in the experts' half."""
        return self.model.block(layer).cut(self.fold.tp, self.fold.ep, self.fold.etp)

    def vocabulary(self, rank: int) -> range:
        """Return the rows of the embedding and of the head that a rank of attention's half holds if its stage has them."""
        rows = self.model.vocab // self.fold.tp
        first = self.fold.attention.coordinate(rank)["tp"] * rows
        return range(first, first + rows)

    def experts(self, rank: int) -> range:
        """Return the global ids of the experts that a rank of the experts' half holds in every MoE block of its stages."""
        local = self.model.experts // self.fold.ep
        first = self.fold.moe.coordinate(rank)["ep"] * local
        return range(first, first + local)

    def pieces(self, rank: int) -> dict[str, Piece]:
        """Return a rank's pieces of parameters in both halves, by global name."""
        seat, pieces = self.fold.coordinate(rank), {}
        attention, moe = seat.get("attention"), seat.get("moe")
        held, held_experts = _standing(self.stages, attention), _standing(self.expert_stages, moe)
        experts = self.experts(rank) if moe else range(0)
        for spec in parameter_table(self.model, self.model.copies_keys(self.fold.tp)):
            if spec.expert is None:
                if attention and self._is_held(spec, held):
                    pieces[spec.name] = _cut(spec, attention["tp"], self.fold.tp)
            elif moe and spec.expert in experts and any(spec.layer in stage.layers for stage in held_experts):
                pieces[spec.name] = _cut(spec, moe["etp"], self.fold.etp)
        return pieces

    def counted(self, rank: int) -> Iterator[str]:
        """Yield names of the pieces that a rank counts in a norm, so that one rank counts each element of the model."""
        seat = self.fold.coordinate(rank)
        first_copy = {
            name: not any(place[axis] for axis in axes)
            for name, view, axes in (
                ("dense", "attention", ("dp", "cp")),
                ("replicated", "attention", ("dp", "cp", "tp")),
                ("expert", "moe", ("edp",)),
            )
            if (place := seat.get(view))
        }
        for name, piece in self.pieces(rank).items():
            second = name == "embedding.weight" and seat["attention"]["pp"] > 0
            second |= piece.spec.in_slices and seat["moe"]["etp"] > 0
            if first_copy[piece.spec.gradient_class] and not second:
                yield name

    def makers(self, spec: ParameterSpec, rank: int) -> tuple[Maker, ...]:
        """Return the ops of a rank whose backward adds to a parameter's gradient, in the order of backward."""
        held, model = self.held_stages(rank), self.model
        heads = [(HEAD, layer) for layer in model.all_layers[model.layers - 1 :]]
        if spec.layer < 0:
            at_end = []
            if spec.name == "embedding.weight" and any(stage.last for stage in held):
                further = reversed(model.all_layers[model.layers :])
                at_end = [*(heads if model.tied_embeddings else ()), *((ATTENTION, layer) for layer in further)]
            return (*at_end, *([(EMBED, 0)] if any(stage.first for stage in held) else []))
        if spec.op == HEAD and spec.name != "head.weight":  # a norm, which the next further token takes, too
            return tuple(maker for maker in ((HEAD, spec.layer), (ATTENTION, spec.layer + 1)) if maker[1] in model.all_layers)
        return tuple(heads) if spec.op == HEAD else ((spec.op, spec.layer),)

    def gradient_parts(self, rank: int) -> dict[GradientClass, tuple[GradientPart, ...]]:
        """Return the runs of a rank's gradient buffers, from the start of each buffer, by gradient class.

        They are in the order in which backward completes them. Every schedule goes backward from the last block to the
        first.
        """
        sizes: dict[GradientClass, dict[tuple[Maker, ...], int]] = {"dense": {}, "replicated": {}, "expert": {}}
        for piece in filter(lambda piece: piece.spec.trained, self.pieces(rank).values()):
            of_class, makers = sizes[piece.spec.gradient_class], self.makers(piece.spec, rank)
            of_class[makers] = of_class.get(makers, 0) + math.prod(piece.shape)
        return {
            name: tuple(GradientPart(parts[makers], makers) for makers in sorted(parts, key=made_at))
            for name, parts in sizes.items()
        }

    def _is_held(self, spec: ParameterSpec, held: tuple[Stage, ...]) -> bool:
        shared = self.model.shares_embedding and spec.name == "embedding.weight"
        if spec.layer < 0:
            return any(stage.first or (shared and stage.last) for stage in held)
        return any(spec.layer in stage.layers for stage in held)


def _standing(stages: tuple[Stage, ...], place: dict[str, int] | None) -> tuple[Stage, ...]:
    """Return the stages at a place's pipeline position; none for a rank without a place in this half."""
    return tuple(stage for stage in stages if place and stage.position == place["pp"])


def _cut(spec: ParameterSpec, index: int, parts: int) -> Piece:
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    if spec.cut is not None:
        shape[spec.cut] //= parts
        offset[spec.cut] = index * shape[spec.cut]
    return Piece(spec, tuple(offset), tuple(shape))


def check_apart(model: ModelSpec) -> None:
    """Check that the experts may have ranks of their own."""
    if model.norms != "before":
        rule = "must be before if the experts have workers of their own (placement)"
        raise UserError("model.norms", model.norms, rule, ["before"])
    if model.adapter is not None:
        rule = "cannot be if the experts have workers of their own (placement)"
        raise UserError("model.adapter", "given", rule, ["null"])


def _check_divides(model: ModelSpec, fold: Fold) -> None:
    if fold.disjoint:
        check_apart(model)
    linear = model.linear
    rules = [
        ("tp", "heads", True),
        ("tp", "kv_heads", fold.tp % model.kv_heads > 0 or model.qk_norm == "all"),  # a multiple of ranks copies heads
        ("tp", "linear_heads", linear is not None),
        ("tp", "linear_key_heads", linear is not None),
        ("tp", "ffn_hidden", model.has_dense),
        ("tp", "shared_hidden", model.shared_hidden > 0),
        ("ep", "experts", model.has_moe),
        ("etp", "expert_hidden", model.has_moe),
    ]
    for axis, field, applies in rules:
        size, whole = getattr(fold, axis), getattr(model, field)
        if linear and field.startswith("linear"):
            whole = linear.heads if field == "linear_heads" else linear.kv_heads
        if applies and whole % size:
            copies = field == "kv_heads" and model.qk_norm != "all"
            legal = [d for d in divisors(fold.world_size) if whole % d == 0 or (copies and d % whole == model.heads % d == 0)]
            rule = f"must divide model.{field}={whole}" + ", or be a multiple of it" * copies
            raise UserError(f"fold.{axis}", size, rule, legal)
    if model.adapter is not None and model.adapter.attention and model.copies_keys(fold.tp):
        rule = (
            f"gives workers copies of kv_heads={model.kv_heads}, and attention's adapters (model.adapter.targets) have no copies"
        )
        raise UserError("fold.tp", fold.tp, rule, divisors(model.kv_heads))
    if model.expert_bias and fold.etp > 1:
        raise UserError("fold.etp", fold.etp, "cannot cut experts that have biases (model.expert_bias)", [1])
    if model.vocab % fold.tp:
        rule = f"must be a multiple of fold.tp={fold.tp}; rows beyond the tokenizer's are padding"
        raise UserError("model.vocab", model.vocab, rule, [model.vocab + -model.vocab % fold.tp])

"""The copies of experts on this rank: which experts have some, by the loads of the last steps, and their way in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from foldray.blueprint.copying import Copies, copy_experts, rows_worth_a_copy
from foldray.blueprint.placing import overload_of
from foldray.comm import Groups, Pending
from foldray.graph import Op
from foldray.model import Losses, Transformer
from foldray.moe.copies import CopiedExperts
from foldray.runtime.gradients import Gradients

Tables = Mapping[int, Copies | None]
"""Block → its copies; None for a block without copies."""


GAIN = 1.05
"""Overload without copies over that with them; less would not be worth their way."""


class CopyTraffic:
    """Runs the `copy` ops of a rank (`moe/copies.py`).

    Attributes:
        blocks: blocks with `copy` ops. Once any expert has copies, these are all MoE blocks, for good. So a list that was found
            stays right while copies come and go.
    """

    def __init__(self, model: Transformer, gradients: Gradients):
        self.blocks: tuple[int, ...] = ()
        self._model, self._gradients = model, gradients
        self._of_block: dict[int, CopiedExperts] = {}
        self._of_parameter: dict[nn.Parameter, CopiedExperts] = {}
        self._homewards: dict[int, Pending] = {}

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """The weights of the copies here."""
        return self._of_parameter.keys()

    def make_room(self, room: int, groups: Groups) -> None:
        """Have room for copies in every MoE block. Every rank of the fold must call this."""
        over = groups.communicator("copies", "ep")
        for layer, moe in self._model.moe_layers():
            self._of_block[layer] = copies = moe.make_room(room, over)
            self._of_parameter.update(dict.fromkeys(copies.parameters, copies))

    def put(self, tables: Tables) -> None:
        """Have these copies from the next step on. All ranks need the same tables, those of all blocks."""
        if self.blocks or any(tables.values()):
            self.blocks = tuple(sorted(tables))
        for layer, copies in self._of_block.items():
            copies.put(tables[layer])

    def sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this rank's sum of a parameter's gradients, to which ops add."""
        copies = self._of_parameter.get(parameter)
        return self._gradients.sum_of(parameter) if copies is None else copies.sum_of(parameter)

    def start(self, op: Op) -> Pending:
        """Start a `copy` op. Forward, `CopiedExperts.wait` waits for it."""
        copies = self._of_block[op.layer]
        if op.direction == "F":
            return copies.start_out()
        self._homewards[op.layer] = pending = copies.start_home(self._gradients.sum_of)
        return pending

    def wait_home(self, layers: Iterable[int]) -> None:
        """Wait until the gradients of some blocks' copies are home."""
        for layer in layers:
            if (pending := self._homewards.pop(layer, None)) is not None:
                pending.wait()

    def finish(self) -> None:
        self.wait_home(list(self._homewards))


class Decision(NamedTuple):
    """What copies are to bring.

    Args:
        copies: number of copies in an expert-parallel group, of all blocks.
        overload, expected: rows of the fullest rank over the mean, without copies and with them, as means over blocks.
    """

    copies: int
    overload: float
    expected: float


class CopyChoice:
    """Decides which experts have copies: after two steps, and then after every so many steps, by their loads.

    Loads vary from step to step, and they change while routers learn. So a block has copies only if those that the first half of
    the steps asks for would have made the second half more even (`GAIN`).

    Args:
        put: takes the copies that steps are to have.

    Attributes:
        tables: the copies of every block by the last decision.
        last: that decision; None before the first one.
    """

    def __init__(self, model: Transformer, groups: Groups, room: int, every: int, put: Callable[[Tables], None]):
        self.tables: Tables = {}
        self.last: Decision | None = None
        self._model, self._groups, self._room, self._every, self._put = model, groups, room, every, put
        self._count_HME, self._steps_H = torch.zeros(0), [0, 0]  # of both halves of the steps since the last decision

    def count(self, losses: Sequence[Losses]) -> None:
        """Take the assignments of this rank's tokens in a step."""
        count_ME = torch.stack([each.count_ME for each in losses]).sum(0)
        if not any(self._steps_H):
            self._count_HME = count_ME.new_zeros(2, *count_ME.shape)
        half = int(sum(self._steps_H) >= (1 if self.last is None else self._every // 2))
        self._count_HME[half] += count_ME
        self._steps_H[half] += 1

    def renumber(self, orders: Mapping[int, Sequence[int]]) -> None:
        """Let experts that have changed places keep their loads, and decide anew before the next step."""
        for layer, order in orders.items():
            row = self._model.spec.moe_layers.index(layer)
            self._count_HME[:, row] = self._count_HME[:, row, list(order)]
        self.last = None

    def decide(self) -> None:
        """Decide, if it is time to. All ranks must call this before a step."""
        early, late = self._steps_H
        if not late or (self.last is not None and early + late < self._every):
            return
        count_HME = self._groups.control.all_reduce(self._count_HME).double() / self._groups.fold.edp  # of one group
        means = [count_HME[0] / early, count_HME[1] / late, count_HME.sum(0) / (early + late)]
        *halves, load_ME = torch.stack(means).tolist()  # one wait for the device
        self.choose(load_ME, halves)

    def choose(
        self,
        load_ME: Sequence[Sequence[float]],
        halves: Sequence[Sequence[Sequence[float]]] | None = None,
        worth: float | None = None,
    ) -> None:
        """Decide by these loads.

        Args:
            load_ME: rows of each expert of every MoE block in a step, of one expert-parallel group.
            halves: the same of earlier and of later steps, which say whether copies help; with None, they always do.
            worth: the least rows that a copy must take; None is `rows_worth_a_copy`.
        """
        ep, model = self._groups.fold.ep, self._model
        itemsize = next(model.parameters()).element_size()
        tables, before, after = dict[int, Copies | None](), list[float](), list[float]()
        for row, (layer, load_E) in enumerate(zip(model.spec.moe_layers, load_ME, strict=True)):
            moe = model.ownership.share(layer).moe
            assert moe, f"block {layer} is dense"
            least = rows_worth_a_copy(moe.expert, itemsize) if worth is None else worth
            helps = halves is None or self._helps(halves[0][row], halves[1][row], least)
            tables[layer] = table = copy_experts(load_E, ep, self._room, least) if helps else None
            before.append(overload_of(load_E, ep))
            after.append(before[-1] if table is None else max(table.rank_shares(load_E)))
        self.tables = tables
        self._put(tables)
        copies = sum(table.total for table in tables.values() if table)
        self.last, self._steps_H = Decision(copies, sum(before) / len(before), sum(after) / len(after)), [0, 0]

    def _helps(self, early_E: Sequence[float], late_E: Sequence[float], worth: float) -> bool:
        """Return whether copies by earlier loads would have made later ones more even."""
        table = copy_experts(early_E, self._groups.fold.ep, self._room, worth)
        return table is not None and overload_of(late_E, self._groups.fold.ep) > GAIN * max(table.rank_shares(late_E))

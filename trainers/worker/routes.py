"""What a worker does with routes: it records those of its tokens, and replays those of another run."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from foldray.comm import Groups
from foldray.kernels.transfer import move
from foldray.model import Batch, Losses
from foldray.recipe import Recipe
from foldray.runtime import Execution
from trainers.data.packed import places_in_step
from trainers.folders import Folder
from trainers.routes.files import ABOUT, FOLDER, About
from trainers.routes.recorded import replayed_by
from trainers.routes.writing import RouteWriter


class StepRoutes:
    """Records and replays routes, as a recipe says (`routes`). Steps count from 1. All ranks must make one.

    Args:
        run: the folder of this run.
        about: what this training's routes are of.
    """

    def __init__(self, recipe: Recipe, groups: Groups, execution: Execution, run: Folder, about: About):
        self._recipe, self._groups, self._execution = recipe, groups, execution
        self._layers = [layer for layer, _ in execution.model.routers()]
        self._writer: RouteWriter | None = None
        self._replayed = replayed_by(recipe)
        if recipe.routes.record is None and recipe.routes.record_tokens is None:
            return
        now = torch.tensor([time.time_ns() // 1_000_000], device=next(execution.model.parameters()).device)
        attempt = int(groups.control.all_gather(now)[0])
        if groups.control.index == 0:
            (run / FOLDER).write(ABOUT, about.model_dump_json().encode())
        if self._layers:
            self._writer = RouteWriter(run / FOLDER, groups.rank, attempt, about)

    def begin(self, step: int) -> None:
        """Prepare for a step."""
        self._execution.keeps_experts = self._writer is not None and _is_due(step, self._recipe.routes.record_tokens)

    def replayed(self, step: int, m: int, batch: Batch) -> Batch:
        """Return micro-batch m of a step with the experts that another run has recorded, if it has."""
        if self._replayed is None or not self._groups.owns_tokens:
            return batch
        experts = self._replayed.experts(step, self._places(m))
        return batch if experts is None else batch._replace(expert_MBLK=move(torch.from_numpy(experts), batch.token_BL.device))

    def record(self, step: int, losses: Sequence[Losses]) -> None:
        """Keep the routes of a finished step. The device has no work left that the host could wait for."""
        routes = self._recipe.routes
        if self._writer is None or not (_is_due(step, routes.record) or self._execution.keeps_experts):
            return
        count_ME = torch.stack([loss.count_ME for loss in losses]).sum(0)
        self._writer.add(step, self._layers, count_ME, self._execution.experts, self._sequences())

    def flush(self) -> None:
        """Start to write what is kept."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is kept, and wait until it is written."""
        if self._writer is not None:
            self._writer.close()

    def _places(self, m: int) -> range:
        training, groups = self._recipe.training, self._groups
        return places_in_step(m, groups.dp_rank, groups.fold.dp, training.micro_batch, training.global_batch)

    def _sequences(self) -> list[int]:
        return [place for m in range(self._recipe.accumulation) for place in self._places(m)]


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

"""What is told and checked before a training starts Ray or prepares data: all that its recipe names outside of itself."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.choosing import told_of_orders
from foldray.recipe import Recipe, told_of_capture
from trainers.data.mixture import Mixture
from trainers.data.packed import PackedData
from trainers.hugging_face.adapters import Adapter
from trainers.hugging_face.weights import Weights
from trainers.routes.files import About, told_of_routes
from trainers.routes.recorded import replayed_by
from trainers.sinks.mlflow_server import check_reachable


def told(recipe: Recipe) -> Iterator[str]:
    """Yield lines about what the recipe asks for."""
    for tells in (told_of_capture, told_of_orders, told_of_routes):
        if (line := tells(recipe)) is not None:
            yield line


def check_sources(recipe: Recipe, begins: bool) -> None:
    """Raise a UserError if something that the recipe names cannot be read or reached.

    `begins` says whether the training starts without a checkpoint.
    """
    if recipe.training.weights is not None and (begins or recipe.model.adapter is not None):
        Weights.of(recipe).check(recipe.model)
    if begins and recipe.training.adapter is not None:
        Adapter.of(recipe).check(recipe)
    replayed_by(recipe)
    check_reachable(recipe)


def check_replay(recipe: Recipe, data: PackedData | Mixture, order: int) -> None:
    """Raise a UserError if the routes that a training replays are not of its tokens, which come in the order of this version."""
    if (replayed := replayed_by(recipe)) is not None:
        replayed.check(About.of(recipe, order, data.content))

"""`foldray health`: how evenly a run used its experts in its newest steps, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.driver.stored_recipe import recipe_of
from trainers.folders import Folder
from trainers.sinks.run_folder import read_history
from trainers.telemetry.expert_health import STARVED, Health
from trainers.telemetry.history import History

_FIELD = "RUN"
_LEGEND = f"""\
fullest expert, rank: load over the mean load; 1 is even, and a step waits for the fullest (mean of the steps)
entropy: of the load, over ln(experts); 1 is even, 0 is one expert for all (mean of the steps)
dead: experts without a token in these steps; starved: those with less than {STARVED:.0%} of the even share, dead ones included"""


@dataclass(frozen=True)
class RunHealth:
    """The balance of a run's experts in its newest steps, at most `history.LOAD_WINDOW`.

    Args:
        name: the run's id.
        history: the records of the run.
        recipe: the recipe of the run.
        health: the balance.
        steps: the steps that it covers.
    """

    name: str
    history: History
    recipe: Recipe
    health: Health
    steps: range

    @classmethod
    def at(cls, run: str, trust: bool = False) -> RunHealth:
        """Read the folder of a run, which may still train. Loads of experts are in the records of all versions of foldray.

        Args:
            trust: whether to import the modules that its recipe names (`Recipe.stored`).
        """
        path = Path(run).expanduser().absolute()
        if not (path / "metrics.jsonl").exists():
            raise UserError(_FIELD, run, "has no metrics.jsonl, so it is not the folder of a run on this machine")
        recipe, history = recipe_of(Folder(str(path)), _FIELD, run, trust), read_history(path, _FIELD)
        load, steps = history.load, history.newest
        if load is None or steps is None:
            raise UserError(_FIELD, run, "has no loads of experts: it has finished no step, or its model has no MoE layer")
        shape = (len(recipe.model.moe_layers), recipe.model.experts)
        if load.shape != shape:
            sizes = " and ".join(f"{layers} MoE layers of {experts} experts" for layers, experts in (load.shape, shape))
            raise UserError(_FIELD, run, f"has a metrics.jsonl and a recipe.yaml of different models: {sizes}")
        health = history.health(recipe.placed_fold.ep)
        assert health is not None, "the history has loads"
        return cls(path.name, history, recipe, health, steps)

    def draw(self, path: Path) -> None:
        """Draw the page of pictures into a PNG."""
        from trainers.pictures.health import draw_health

        draw_health(self.history, path, self.name, self.recipe.model.moe_layers)

    def document(self) -> dict[str, Any]:
        """Return the table as a JSON document: measures as in the records of steps, by layer and in the worst layer."""
        measures, health = self.health.by_layer(), self.health
        return {
            "run": self.name,
            "steps": [self.steps[0], self.steps[-1]],
            "experts": self.recipe.model.experts,
            "ep": self.recipe.placed_fold.ep,
            "layers": [
                {"layer": layer, **{name: values[at] for name, values in measures.items()}}  # type: ignore[index]
                for at, layer in enumerate(self.recipe.model.moe_layers)
            ],
            "worst": {
                "max_over_mean": float(health.max_over_mean.max()),
                "rank_max_over_mean": float(health.rank_max_over_mean.max()),
                "entropy": float(health.entropy.min()),
                "dead": int(health.dead.max()),
                "starved": int(health.starved.max()),
            },
        }

    def text(self) -> str:
        """Return the table, with a row for each layer and one for the worst value of each column, and what they mean."""
        found, out = self.document(), Console()
        first, last = found["steps"]
        ep, experts = found["ep"], found["experts"]
        head = f"{self.name}, steps {first}–{last}: {experts} experts in each MoE layer, {experts // ep} on each of {ep} ranks"
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("layer", "fullest expert", "fullest rank", "entropy", "dead", "starved"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in [*found["layers"], {"layer": "worst", **found["worst"]}]:
            ratios = f"{row['max_over_mean']:.2f}", f"{row['rank_max_over_mean']:.2f}", f"{row['entropy']:.4f}"
            table.add_row(str(row["layer"]), *ratios, str(row["dead"]), str(row["starved"]))
        with out.capture() as captured:
            out.print(table)
        return "\n".join([head, "", *(line.rstrip() for line in captured.get().splitlines()), "", _LEGEND])

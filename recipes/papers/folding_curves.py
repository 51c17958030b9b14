"""MoE Parallel Folding's accuracy check (section 6.1) in miniature: training under a fold against training in one process.

    python recipes/papers/folding_curves.py [--steps 300] [--json FILE] [--picture FILE]

The same recipe, on the text of the quickstart, once on eight workers as TP2 CP2 PP2 | EP4 and once on one worker without a fold,
both with the torch engine in float32. Losses of every step and validations must stay together; how far they part is printed.
Ray is started here with as many slots as workers, whatever the number of cores: on a laptop this is slow, and as right.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray

from foldray import Recipe
from trainers import FoldTrainer
from trainers.telemetry import History, number

FOLDED: dict[str, Any] = {"workers": 8, "fold": {"tp": 2, "cp": 2, "pp": 2, "ep": 4}}
ALONE: dict[str, Any] = {"workers": 1, "fold": {}}


def recipe(steps: int, workers: int, fold: dict[str, int], storage: Path) -> Recipe:
    return Recipe.parse(
        {
            "name": f"curves-{workers}",
            "model": {"preset": "tiny", "layers": 2},
            "data": {"source": "stdlib", "seq_len": 256},
            "fold": fold,
            "engine": {"kind": "torch"},
            "optimizer": {"lr": 1e-3, "warmup_steps": 30},
            "training": {"steps": steps, "global_batch": 8, "micro_batch": 4, "eval_every": 25, "eval_sequences": 32},
            "cluster": {"workers": workers, "max_failures": 0, "storage": str(storage)},
        }
    )


def train(steps: int, storage: Path, workers: int, fold: dict[str, int]) -> History:
    """The history of one training."""
    trainer = FoldTrainer(recipe(steps, workers, fold, storage))
    result = trainer.fit()
    return History.read(Path(result.path) / "metrics.jsonl")


def curves(history: History) -> dict[str, dict[int, float]]:
    """Training and validation loss by step, in nats per token."""
    return {
        "training": {at: number(record["loss"]) for at, record in history.steps.items()},
        "validation": {at: number(record["loss"]) for at, record in history.validations.items()},
    }


def apart(ours: dict[int, float], theirs: dict[int, float]) -> dict[int, float]:
    if ours.keys() != theirs.keys():
        raise RuntimeError("the two trainings do not have the same steps")
    return {at: abs(value - theirs[at]) for at, value in ours.items()}


def draw(folded: dict[str, dict[int, float]], alone: dict[str, dict[int, float]], path: Path) -> None:
    """Both pairs of curves above, their distance below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=144, layout="constrained")
    figure.suptitle("TP2 CP2 PP2 | EP4 on eight workers, and one process", x=0.01, ha="left", fontweight="bold")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    colours = {"training": "#2364aa", "validation": "#d9630b"}
    for name, colour in colours.items():
        above.plot(*zip(*alone[name].items(), strict=True), color=colour, linewidth=3.5, alpha=0.3, label=f"{name}, one process")
        above.plot(*zip(*folded[name].items(), strict=True), color=colour, linewidth=1.1, label=f"{name}, folded")
        distance = {at: max(value, 1e-9) for at, value in apart(folded[name], alone[name]).items()}
        below.plot(*zip(*distance.items(), strict=True), color=colour, linewidth=1.1)
    below.axhline(1e-4, color="#6b7280", linestyle=(0, (5, 3)), linewidth=1)
    below.annotate(
        "0.0001", (1.0, 1e-4), xycoords=("axes fraction", "data"), xytext=(4, -3), textcoords="offset points", fontsize=8
    )
    below.set_yscale("log")
    below.set_ylabel("distance")
    below.set_xlabel("training step")
    above.set_ylabel("loss (nats per token)")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description="Training under TP2 CP2 PP2 | EP4 against one process.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="file for the curves")
    parser.add_argument("--picture", type=Path, help="file for the PNG")
    given = parser.parse_args()
    ray.init(num_cpus=FOLDED["workers"], include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        folded, alone = (curves(train(given.steps, Path(folder), **setting)) for setting in (FOLDED, ALONE))
    for name in folded:
        distance = apart(folded[name], alone[name])
        at, last = max(distance, key=distance.__getitem__), folded[name][max(distance)]
        print(f"{name}: {len(distance)} points, at most {distance[at]:.1e} apart (step {at}); the last is {last:.6f}")
    if given.json:
        given.json.write_text(json.dumps({"folded": folded, "one process": alone}))
    if given.picture:
        draw(folded, alone, given.picture)


if __name__ == "__main__":
    main()

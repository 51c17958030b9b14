"""Draws a fold: both grids side by side, and the nodes of the ranks.

A rank has the same colour in both grids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from foldray.fold import Fold
from foldray.nodes import Placement
from foldray.nodes.drawing import Table
from trainers.pictures.canvas import GREY, INK

Color = tuple[float, float, float]

_PALE = "#e8eaee"
_HUES = ("#2364aa", "#d9630b", "#2f855a", "#6b4fbb", "#b91c1c", "#0e7490", "#be185d", "#8a6d00")
_DPI = 144
_RANKS, _STAGES, _ROWS = 1024, 16, 32  # a fold of more ranks is drawn as its first stage; a stage has at most _ROWS rows
_TOP = 1.72  # inches above the first row, for the title and the names of the grids and columns


@dataclass(frozen=True)
class _Panel:
    """One grid of a fold: its tables, stage by stage, and their sizes in inches."""

    name: str
    tables: Sequence[Table]
    across: int
    nodes: Placement | None

    @property
    def cell(self) -> float:
        return 0.5 if self.across == 8 else 0.34 if self.across == 16 else 0.18

    @property
    def gap(self) -> float:
        """Gap between rows, and between the boxes of a row."""
        return 0.3 * self.cell

    @property
    def margin(self) -> float:
        """Width of the rows' labels, and of the stages' names before them."""
        return 0.15 + 0.085 * max(len(label) for table in self.tables for label, _ in table.rows) + 0.4 * (len(self.tables) > 1)

    @property
    def columns(self) -> list[float]:
        """Left edges of the cells of a full row."""
        sizes = [len(box) for box in self.tables[0].rows[0][1]]
        return [i * self.cell + box * self.gap for box, size in enumerate(sizes) for i in range(box * size, box * size + size)]

    @property
    def width(self) -> float:
        lengths = [len(text) for table in self.tables for text in self.beside(table)]
        return self.margin + self.columns[-1] + self.cell + 0.25 + 0.085 * max(lengths, default=0)

    def beside(self, table: Table) -> list[str]:
        """Return the nodes of each row, as text."""
        return [self.nodes.named(chain(*boxes)) for _, boxes in table.rows] if self.nodes else []

    def height(self, stage: int) -> float:
        return len(self.tables[stage].rows) * (self.cell + self.gap) + 0.25


def draw_fold(fold: Fold, path: Path, nodes: Placement | int | None = None) -> None:
    """Draw attention's grid and the experts' grid of a fold into a PNG.

    Args:
        fold: the fold. Of a large fold, only the first rows of the first pipeline stages are drawn, and the picture says so.
        nodes: the ranks on nodes, or the number of ranks on each node. A border surrounds the ranks of each node. None draws no
            nodes.
    """
    nodes = Placement(fold, nodes) if isinstance(nodes, int) else nodes
    panels = _panels(fold, nodes)
    stages = range(max(len(panel.tables) for panel in panels))
    heights = [max(panel.height(stage) for panel in panels if stage < len(panel.tables)) for stage in stages]
    width, height = max(sum(panel.width for panel in panels) + 0.6, 7.0), _TOP + sum(heights) + 0.1
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))  # inches from the upper left corner
    axes.set_axis_off()
    axes.text(0.3, 0.22, str(fold), fontsize=15, weight="bold", color=INK, va="top")
    axes.text(0.3, 0.56, _subtitle(fold, panels), fontsize=10.5, color=GREY, va="top")
    colors = _colors(fold)
    for panel, left in zip(panels, (0.3, 0.5 + panels[0].width), strict=True):
        _draw_names(axes, panel, left + panel.margin)
        top = _TOP
        for stage, (table, stage_height) in enumerate(zip(panel.tables, heights, strict=False)):
            _draw_stage(axes, panel, table, left + panel.margin, top, colors)
            if len(panel.tables) > 1:
                axes.text(left, top + panel.cell / 2, f"pp{stage}", fontsize=10, weight="bold", color=INK, va="center")
            top += stage_height
    figure.savefig(path, format="png")


def _panels(fold: Fold, nodes: Placement | None) -> list[_Panel]:
    across = 8 if fold.world_size <= 128 else 16 if fold.world_size <= 256 else 32
    panels = []
    for name, grid, pp in (("Attention", fold.attention, fold.pp), ("Experts", fold.moe, fold.moe_pp)):
        stages = range(min(pp, _STAGES) if fold.world_size <= _RANKS else 1)
        tables = [Table.of(grid, stage, across) for stage in stages]
        panels.append(_Panel(name, [replace(table, rows=table.rows[:_ROWS]) for table in tables], across, nodes))
    return panels


def _subtitle(fold: Fold, panels: Sequence[_Panel]) -> str:
    nodes = panels[0].nodes
    parts = [f"{fold.world_size} rank{'s' * (fold.world_size > 1)}" + (f", {nodes.in_words}" if nodes else "")]
    if fold.disjoint:
        parts.append(f"experts on ranks {fold.moe.ranks[0]}–{fold.moe.ranks[-1]}")
    elif fold.tp * fold.cp > 1:
        parts.append("same hue: same sequences" + ("; same shade: same part of them" if fold.cp > 1 else ""))
    elif fold.ep > 1:
        parts.append("same hue: same EP group")
    drawn = [sum(len(box) for table in panel.tables for _, row in table.rows for box in row) for panel in panels]
    incomplete = drawn[0] < fold.attention_ranks or drawn[1] < fold.moe_ranks
    return " · ".join([*parts, *(["the other ranks follow the same pattern"] if incomplete else [])])


def _colors(fold: Fold) -> dict[int, Color]:
    """Choose a colour for every rank.

    The hue stands for the sequences, and the shade for a part of a sequence. Both are the same in every stage. Without TP
    and CP, the hue stands for the EP group.
    """
    colors = {}
    for rank in fold.groups("world")[0]:
        seat = fold.coordinate(rank)
        attention, moe = seat.get("attention"), seat.get("moe")
        index, white = 0, 0.45 + 0.4 * (attention["cp"] / fold.cp if attention else 0)
        if attention and (fold.tp * fold.cp > 1 or fold.disjoint):
            index = attention["dp"]
        elif moe and fold.ep > 1:
            index = moe["edp"] * fold.etp + moe["etp"] + (fold.dp if fold.disjoint else 0)
        red, green, blue = to_rgb(_HUES[index % len(_HUES)])
        colors[rank] = (white + (1 - white) * red, white + (1 - white) * green, white + (1 - white) * blue)
    return colors


def _draw_names(axes: Axes, panel: _Panel, left: float) -> None:
    axes.text(left, 1.08, panel.name, fontsize=12.5, weight="bold", color=INK, va="center")
    table, boxes = panel.tables[0], len(panel.tables[0].rows[0][1])
    starts = [left + start for start in panel.columns]
    wide = len(starts) // boxes
    for box, name in enumerate(table.box_names):
        middle = (starts[box * wide] + starts[box * wide + wide - 1] + panel.cell) / 2
        axes.text(middle, 1.36, name, fontsize=9.5, color=GREY, ha="center", va="center")
    for start, name in zip(starts, table.cell_names * boxes if panel.across == 8 else (), strict=False):
        axes.text(start + panel.cell / 2, _TOP - 0.15, name, fontsize=9, color=GREY, ha="center", va="center")


def _draw_stage(axes: Axes, panel: _Panel, table: Table, left: float, top: float, colors: Mapping[int, Color]) -> None:
    starts, cell, pad = [left + start for start in panel.columns], panel.cell, panel.gap / 4
    for number, (label, boxes) in enumerate(table.rows):
        y, column = top + number * (cell + panel.gap), 0
        axes.text(left - 0.16, y + cell / 2, label, fontsize=9, color=GREY, ha="right", va="center")
        for box in boxes:
            width = len(box) * cell
            axes.add_patch(_rounded(starts[column] - pad / 2, y - pad / 2, width + pad, cell + pad, pad, _PALE))
            for rank in box:
                x = starts[column]
                axes.add_patch(_rounded(x + 0.75 * pad, y + 0.75 * pad, cell - 1.5 * pad, cell - 1.5 * pad, pad, colors[rank]))
                if panel.across < 32:
                    size = 11 if panel.across == 8 else 7.5
                    axes.text(x + cell / 2, y + cell / 2, str(rank), fontsize=size, color=INK, ha="center", va="center")
                column += 1
    if panel.nodes:
        _draw_nodes(axes, panel, table, left, top, panel.nodes)


def _draw_nodes(axes: Axes, panel: _Panel, table: Table, left: float, top: float, nodes: Placement) -> None:
    """Draw borders around the cells of each node, and write the nodes' numbers on the right."""
    half = panel.gap / 2
    ends = [left + start + panel.cell for start in panel.columns]
    middles = [(end + left + start) / 2 for end, start in zip(ends, panel.columns[1:], strict=False)]
    across = [left - half, *middles, ends[-1] + half]
    down = [top - half + number * (panel.cell + panel.gap) for number in range(len(table.rows) + 1)]
    nodes_of_rows = [[nodes.node(rank) for box in boxes for rank in box] for _, boxes in table.rows]
    place = {(row, column): node for row, line in enumerate(nodes_of_rows) for column, node in enumerate(line)}
    lines = []
    for (row, column), node in place.items():
        (x, right), (y, bottom) = across[column : column + 2], down[row : row + 2]
        sides = {(-1, 0): ((x, y), (right, y)), (0, -1): ((x, y), (x, bottom))}
        sides |= {(1, 0): ((x, bottom), (right, bottom)), (0, 1): ((right, y), (right, bottom))}
        lines += [line for (up, over), line in sides.items() if place.get((row + up, column + over)) != node]
    axes.add_collection(LineCollection(lines, colors=INK, linewidths=1.6, capstyle="round"))
    for text, rows in groupby(enumerate(panel.beside(table)), key=lambda row: row[1]):
        number = [row for row, _ in rows]
        axes.text(across[-1] + 0.1, (down[number[0]] + down[number[-1] + 1]) / 2, text, fontsize=9, color=INK, va="center")


def _rounded(x: float, y: float, width: float, height: float, radius: float, color: Color | str) -> FancyBboxPatch:
    return FancyBboxPatch((x, y), width, height, f"round,pad=0,rounding_size={radius}", facecolor=color, edgecolor="none")

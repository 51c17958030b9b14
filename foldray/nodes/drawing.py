"""Draws a fold as text: both grids side by side, and all groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile, zip_longest

from foldray.fold.fold import Fold
from foldray.fold.grid import Grid, listed
from foldray.nodes.placement import Placement
from foldray.nodes.routes import Routes

_ALL_RANKS, _ROWS = 64, 8  # a fold of more than 64 ranks is drawn as the first 8 rows of its first stage
_ROUTES = 16  # lines about routes


@dataclass(frozen=True)
class Table:
    """The layout of one pipeline stage of one grid: labelled rows of boxes, with names over the boxes and over their cells.

    A cell is a rank. A box is a group of the fastest axis that has more than one rank. Boxes in one row differ in the next
    axis, and rows differ in the other axes. Groups that are too long for a row continue in the next row. Columns have names
    if they mean the same in every row.

    Args:
        box_names: names over the boxes; empty if the boxes have no names.
        cell_names: names over the cells of each box; empty if the cells have no names.
        rows: the label of each row and its boxes, each a tuple of ranks.
    """

    box_names: tuple[str, ...]
    cell_names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]

    @classmethod
    def of(cls, grid: Grid, stage: int, across: int = 8) -> Table:
        """Lay out a stage with at most `across` ranks in a row."""
        axes = [(axis, size) for axis, size in zip(grid.axes, grid.sizes, strict=True) if axis != "pp" and size > 1]
        (inner, cells), (outer, boxes), *_ = [*axes, ("", 1), ("", 1)]
        wide = min(cells, across)
        abreast = min(boxes, across // wide) if len(axes) > 2 or boxes > across else 1
        named = [axis for axis, shown, size in ((inner, wide, cells), (outer, abreast, boxes)) if shown == size > 1]
        lines = _chunks(
            grid.groups([axis for axis in grid.axes if axis != "pp"])[stage], cells * boxes if wide == cells else cells
        )
        rows = [tuple(_chunks(row, wide)) for line in lines for row in _chunks(line, wide * abreast)]
        unnamed = [axis for axis, _ in reversed(axes) if axis not in named]
        ends = [(grid.coordinate(row[0][0]), grid.coordinate(row[-1][-1])) for row in rows]
        labels = [" ".join(axis + "–".join(dict.fromkeys(str(end[axis]) for end in both)) for axis in unnamed) for both in ends]
        names = {axis: tuple(f"{axis}{i}" for i in range(size)) for axis, size in axes if axis in named}
        return cls(names.get(outer, ()), names.get(inner, ()), tuple(zip(labels, rows, strict=True)))


def draw(fold: Fold, nodes: Placement | int | None = None) -> str:
    """Draw attention's grid on the left and the experts' grid on the right, with one table per pipeline stage.

    A `┃` marks the place where a row enters another node. A fold of more than 64 ranks is drawn as the first rows of its
    first stage, followed by a line about the other stages.

    Args:
        nodes: the ranks on nodes, or the number of ranks on each node; None draws no nodes.
    """
    nodes = Placement(fold, nodes) if isinstance(nodes, int) else nodes
    complete = fold.world_size <= _ALL_RANKS
    sides = [[name] for name in ("attention", "experts")]
    for stage in range(max(fold.pp, fold.moe_pp) if complete else 1):
        blocks = []
        for grid, stages in ((fold.attention, fold.pp), (fold.moe, fold.moe_pp)):
            table = Table.of(grid, stage) if stage < stages else None
            rows = len(table.rows) if table and complete else _ROWS
            blocks.append(_block(table, f"pp{stage}" if stages > 1 else "", nodes, stage == 0, rows) if table else [])
        for side, block in zip(sides, blocks, strict=True):
            side += block + [""] * (max(map(len, blocks)) - len(block))
    width = max(map(len, sides[0])) + 3
    lines = [f"{left:{width}}{right}".rstrip() for left, right in zip_longest(*sides)]
    for name, grid, stages in (("", fold.attention, fold.pp), ("of the experts ", fold.moe, fold.moe_pp)):
        if not complete and stages > 1 and (fold.disjoint or not name):
            lines.append(f"… {stages - 1} more stages {name}like this one, each {grid.stride('pp')} ranks further")
    return "\n".join(filter(None, lines))


def _block(table: Table, name: str, nodes: Placement | None, headed: bool, most: int) -> list[str]:
    shown, rest = table.rows[:most], len(table.rows[most:])
    boxes, wide = len(shown[0][1]), len(shown[0][1][0])
    cell = max(map(len, [*table.cell_names, *(str(rank) for _, row in shown for box in row for rank in box)]))
    margin, width = max(map(len, [name, *(label for label, _ in shown)])) + 1, wide * (cell + 1) + 1
    over_boxes = "".join(f"{name:{width + 1}}" for name in table.box_names)
    over_cells = ("".join(f"{name:>{cell}} " for name in table.cell_names) + "  ") * boxes
    head = [f"{'':{margin + 2}}{text}".rstrip() for text in (over_boxes, over_cells) if headed]
    top, bottom = (left + joint.join(["─" * width] * boxes) + right for left, joint, right in ("┌┬┐", "└┴┘"))
    rows = [f"{label:{margin}}{_row(row, cell, boxes * (width + 1) - 3, nodes)}" for label, row in shown]
    tail = [f"{'':{margin}}… {rest} more rows; the last rank is {table.rows[-1][1][-1][-1]}"] if rest else []
    return [*head, f"{name:{margin}}{top}", *rows, f"{'':{margin}}{bottom}", *tail]


def _row(row: Sequence[Sequence[int]], cell: int, width: int, nodes: Placement | None) -> str:
    text, before = "", row[0][0]
    for box in row:
        for column, rank in enumerate(box):
            bar = "┃" if nodes and nodes.node(rank) != nodes.node(before) else " " if column else "│"
            text += (bar if column else f" {bar} ") * bool(text) + f"{rank:>{cell}}"
            before = rank
    return f"│ {text:{width}} │" + (f" {nodes.named(chain(*row))}" if nodes else "")


def _chunks(ranks: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def explanation(fold: Fold, nodes: Placement | None, best: Placement | None) -> str:
    """Return the text that `foldray explain` prints: the grids, every family of groups, and the score of their placement."""
    ranks = f"{fold.world_size} rank{'s' * (fold.world_size > 1)}" + (f", {nodes.in_words}" if nodes else "")
    lines = [f"{ranks}: {fold}", "", draw(fold, nodes)]
    for view, families in fold.families.items():
        ranks_of_view = fold.views[view].ranks
        on = f" on ranks {ranks_of_view[0]}–{ranks_of_view[-1]}" if fold.disjoint else ""
        lines += ["", f"{'experts' if view == 'moe' else view}{on}", *(_family(fold, view, family, nodes) for family in families)]
    if fold.disjoint:
        lines += ["", "rows to experts, and results back", *_routes(fold)]
    if nodes:
        lines += [
            "",
            f"score: {nodes.score():g} (traffic between nodes: lower is better, 0 when every group stays inside a node)",
        ]
    if best and best.fold == fold:
        lines += ["best order: this one"]
    elif best:
        lines += [f"best order: --order {best.fold.order} --moe-order {best.fold.moe_order}, score {best.score():g}"]
    return "\n".join(lines)


def _routes(fold: Fold) -> list[str]:
    """Describe the routes in a line for each group of attention's ranks that send their rows to the same ranks of experts."""
    routes, lines = Routes(fold), []
    for place in range(fold.pp):
        for position in range(fold.moe_pp):
            senders: dict[tuple[int, ...], list[int]] = {}
            for rank in fold.attention.ranks:
                if fold.attention.coordinate(rank)["pp"] == place:
                    senders.setdefault(routes.receivers(rank, position), []).append(rank)
            names = (f"pp{place} " * (fold.pp > 1), f" of pp{position}" * (fold.moe_pp > 1))
            lines += [f"  {names[0]}{listed(ranks)} ↔ {listed(to)}{names[1]}" for to, ranks in senders.items()]
    return lines[:_ROUTES] + [f"  … {len(lines) - _ROUTES} more"] * (len(lines) > _ROUTES)


def _family(fold: Fold, view: str, family: str, nodes: Placement | None) -> str:
    """Describe a family in one line: the number and size of its groups, whether they cross nodes, and its first groups."""
    groups = fold.groups(family, view)
    size = len(groups[0])
    line = f"  {family:10}{len(groups):>6} group{'s' if len(groups) > 1 else ' '} of {size:<6}"
    if size == 1:
        return line.rstrip()
    if nodes:
        inside, share = nodes.inside(family), nodes.crossing(family)
        line += f" {'inside a node' if inside else f'crosses {nodes.spans(family)} nodes ({share:.0%} of pairs)':36}"
    shown = list(takewhile(lambda end: end <= 40, accumulate(len(listed(group)) + 1 for group in groups)))
    return f"{line} {' '.join(map(listed, groups[: max(1, len(shown))]))}{' …' if len(shown) < len(groups) else ''}"

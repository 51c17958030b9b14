"""The stages of a pipeline: their different forms, and the stages of each position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from foldray.blueprint import BlockSpec, stage_positions


class StageForm(NamedTuple):
    """The form of a stage: its blocks, whether it is the first stage (embedding), and whether it is the last one (head)."""

    blocks: tuple[BlockSpec, ...]
    first: bool
    last: bool


class Content(NamedTuple):
    """The content of a stage, or of all stages of a position together.

    Args:
        blocks: (block, number of such blocks), for all different blocks.
        embedding: whether the content has the embedding.
        head: the block before the last head; None without a head.
    """

    blocks: tuple[tuple[BlockSpec, int], ...]
    embedding: bool
    head: BlockSpec | None

    @property
    def heads(self) -> int:
        """Number of heads. Multi-token prediction has one more for every further token."""
        return 0 if self.head is None else 1 + sum(count for block, count in self.blocks if block.mtp)

    @classmethod
    def of(cls, forms: Sequence[StageForm]) -> Content:
        counts = Counter(block for form in forms for block in form.blocks)
        head = next((form.blocks[-1] for form in forms if form.last), None)
        return cls(tuple(sorted(counts.items(), key=lambda item: item[0].order)), any(form.first for form in forms), head)


@dataclass(frozen=True)
class Positions:
    """The contents of all pipeline positions.

    Args:
        different: the different contents.
        number_at: for every position, the number of its content in `different`.
        last: for every different content, the last position that has it.
    """

    different: tuple[Content, ...]
    number_at: tuple[int, ...]
    last: tuple[int, ...]

    @classmethod
    def of(cls, contents: Sequence[Content]) -> Positions:
        numbers: dict[Content, int] = {}
        number_at = tuple(numbers.setdefault(content, len(numbers)) for content in contents)
        last = dict(zip(number_at, range(len(contents)), strict=True))
        return cls(tuple(numbers), number_at, tuple(last.values()))

    def content(self, place: int) -> Content:
        """Return the content of a position."""
        return self.different[self.number_at[place]]


@dataclass(frozen=True, eq=False)
class PipelineLayout:
    """The stages of a pipeline. `make_layout` returns the same object for equal stages.

    Args:
        forms, contents: the different forms of stages, and their contents.
        form_of: for every stage, the number of its form.
        forms_at: for every position, the numbers of its stages' forms.
        positions: for every position, the content of all its stages together.
    """

    forms: tuple[StageForm, ...]
    contents: tuple[Content, ...]
    form_of: tuple[int, ...]
    forms_at: tuple[tuple[int, ...], ...]
    positions: Positions

    @property
    def pp(self) -> int:
        """Number of pipeline positions."""
        return len(self.forms_at)


@lru_cache(maxsize=1024)
def make_layout(stages: tuple[tuple[BlockSpec, ...], ...], pp: int) -> PipelineLayout:
    """Return the layout of stages."""
    last = len(stages) - 1
    numbers: dict[StageForm, int] = {}
    form_of = tuple(
        numbers.setdefault(StageForm(blocks, number == 0, number == last), len(numbers)) for number, blocks in enumerate(stages)
    )
    forms, forms_at = tuple(numbers), [list[int]() for _ in range(pp)]
    for form, position in zip(form_of, stage_positions(len(stages), pp), strict=True):
        forms_at[position].append(form)
    return PipelineLayout(
        forms,
        tuple(Content.of([form]) for form in forms),
        form_of,
        tuple(map(tuple, forms_at)),
        Positions.of([Content.of([forms[number] for number in numbers_at]) for numbers_at in forms_at]),
    )

"""What a thread writes while training goes on."""

from __future__ import annotations

import threading

import torch

from foldray.runtime import Shard
from trainers.checkpoints.tensors import Staged


def staged(count: int = 4) -> tuple[Staged, list[torch.Tensor]]:
    tensors = [torch.full((3, 2), float(number)) for number in range(count)]
    return Staged([Shard.whole(str(number), tensor) for number, tensor in enumerate(tensors)]), tensors


def take(found: Staged, number: int) -> float:
    tensor = found.take((str(number), (0, 0)))
    assert tensor.is_contiguous()
    return float(tensor[0, 0])


def test_training_changes_nothing_that_is_written_later() -> None:
    found, tensors = staged()
    assert take(found, 0) == 0.0
    found.settle()
    for tensor in tensors:
        tensor.fill_(-1.0)
    assert [take(found, number) for number in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_what_was_taken_before_is_a_copy() -> None:
    found, tensors = staged()
    first = found.take(("0", (0, 0)))
    tensors[0].fill_(-1.0)
    assert float(first[0, 0]) == 0.0


def test_only_what_this_rank_writes_is_copied() -> None:
    found, tensors = staged()
    found.keep([("2", (0, 0))])
    found.settle()
    assert list(found._copies) == [("2", (0, 0))]
    tensors[2].fill_(-1.0)
    assert take(found, 2) == 2.0
    assert not found._copies, "a copy is forgotten once it is written"


def test_the_plan_may_come_after_training_went_on() -> None:
    found, _ = staged()
    found.settle()
    found.keep([("1", (0, 0)), ("3", (0, 0))])
    assert sorted(found._copies) == [("1", (0, 0)), ("3", (0, 0))]
    found.drop()
    assert not found._copies


def test_a_writer_and_training_side_by_side() -> None:
    found, tensors = staged(200)
    values: dict[int, float] = {}

    def write() -> None:
        for number in range(200):
            values[number] = take(found, number)

    writer = threading.Thread(target=write)
    writer.start()
    found.settle()
    for tensor in tensors:
        tensor.fill_(-1.0)
    writer.join(10)
    assert values == {number: float(number) for number in range(200)}

"""What follows from a failed attempt to train: another attempt, from which checkpoint, or the end.

An attempt begins when workers start, and ends when training finishes or fails. This module decides by the history of a
run's attempts alone. It needs no cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, NamedTuple


class FailureKind(NamedTuple):
    """Why an attempt fails, and what follows.

    Args:
        again: whether another attempt follows: `never`; `counted`, as long as `cluster.max_failures` allows; or `always`.
        once: whether another failure with the same cause after the same step ends the training.
        of: whether an exception that a worker's code has raised is of this kind, for kinds of the user's (`cluster.failures`).
    """

    name: str
    again: Literal["never", "counted", "always"] = "counted"
    once: bool = False
    of: Callable[[BaseException], bool] = lambda _: False


KINDS: Mapping[str, FailureKind] = {
    kind.name: kind
    for kind in (
        FailureKind("refused", "never"),  # a user's mistake, which a worker has found
        FailureKind("unplaced"),  # the cluster had no room for the workers
        FailureKind("damaged", "always"),  # the workers found that their checkpoint is damaged; each costs a checkpoint
        FailureKind("preempted", "always"),  # the cluster took a node back, with a notice
        FailureKind("lost"),  # processes or nodes of workers were lost, or the connections between them
        FailureKind("controller"),  # the process of Ray Train that starts the workers was lost
        FailureKind("stalled"),  # ranks waited for longer than their deadline
        FailureKind("raised", once=True),  # the code of a worker raised an error, such as a gradient that is no number
    )
}


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed.

    Args:
        kind: the name of a `FailureKind`.
        what: the failure in one line.
        ranks: the ranks where it happened, as far as known.
        cause: what one cause has in common each time (`causes.identity`). Failures of one kind and cause are equal.
        after: finished steps, by the rank that failed; None if only rank 0 tells, whose records may be late.
    """

    kind: str
    what: str = field(compare=False)
    ranks: tuple[int, ...] = field(default=(), compare=False)
    cause: str = ""
    after: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Attempt:
    """An attempt that failed, after the step that it reached.

    `saved` are the finished steps in the newest undamaged checkpoint after the failure; 0 if there is none.
    """

    reached: int
    saved: int
    failure: Failure


@dataclass(frozen=True)
class GoOn:
    """Start the workers again, from the newest checkpoint that is not damaged."""


@dataclass(frozen=True)
class GiveUp:
    """End the training. The reason says why no further attempt would help; it is empty if the failure itself says it."""

    reason: str = ""


Decision = GoOn | GiveUp
_UNPLACED = 4  # times in a row, after workers have been lost: a node that replaces another one takes minutes to come


def decide(attempts: Sequence[Attempt], most: int | None, kinds: Mapping[str, FailureKind] = KINDS) -> Decision:
    """Return what follows from the newest of a training's attempts so far, which all have failed.

    At most `most` of them may fail without a new checkpoint between them; None is any number.
    """
    *earlier, last = attempts
    kind = kinds[last.failure.kind]
    if kind.again == "never":
        return GiveUp()
    if last.failure.kind == "unplaced":
        tried = len(attempts) - len([*takewhile(lambda attempt: attempt.failure.kind == "unplaced", reversed(attempts))])
        return GoOn() if tried and len(attempts) - tried < _UNPLACED else GiveUp()
    if kind.again == "always":
        return GoOn()
    repeats = (last.reached, last.failure) in [(attempt.reached, attempt.failure) for attempt in earlier]
    if kind.once and repeats:
        return GiveUp(f"every attempt fails in this way after step {last.reached}")
    since = takewhile(lambda attempt: attempt.saved == last.saved, reversed(attempts))
    failed = sum(kinds[attempt.failure.kind].again != "always" for attempt in since)
    if most is not None and failed > most:
        if most == 0:
            return GiveUp()
        return GiveUp(f"{failed} attempts failed without a new checkpoint; cluster.max_failures allows {most}")
    return GoOn()

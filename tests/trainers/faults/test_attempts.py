"""What follows from failed attempts, decided without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.faults.attempts import KINDS, Attempt, Failure, GiveUp, GoOn, decide


def attempt(kind: str, saved: int = 0, reached: int = 0, cause: str = "it", ranks: tuple[int, ...] = ()) -> Attempt:
    return Attempt(reached, saved, Failure(kind, f"{cause} on {ranks}", ranks, cause))


@pytest.mark.parametrize("kind", ["refused", "unplaced"])
def test_what_no_other_attempt_would_help(kind: str) -> None:
    assert decide([attempt(kind)], None) == GiveUp()


def test_a_lost_node_has_time_to_be_replaced() -> None:
    """But workers that never had a place will hardly get one."""
    lost, unplaced = attempt("lost", 10, 14), attempt("unplaced")
    assert [decide([lost, *[unplaced] * count], 1) for count in range(1, 5)] == [GoOn()] * 3 + [GiveUp()]
    assert decide([unplaced, unplaced], None) == GiveUp()
    assert decide([lost, *[unplaced] * 3, attempt("lost", 20, 21), unplaced], 1) == GoOn()


@pytest.mark.parametrize("kind", ["lost", "controller", "stalled"])
def test_as_many_failures_without_a_new_checkpoint_as_allowed(kind: str) -> None:
    failed = [attempt(kind, saved=10, reached=number) for number in range(4)]
    assert decide(failed[:3], 3) == GoOn()
    assert decide(failed, 3) == GiveUp("4 attempts failed without a new checkpoint; cluster.max_failures allows 3")
    assert decide(failed, None) == GoOn()
    assert decide(failed[:2], 1) == GiveUp("2 attempts failed without a new checkpoint; cluster.max_failures allows 1")
    assert decide(failed[:1], 0) == GiveUp(), "the failure itself says all"


def test_a_new_checkpoint_starts_the_count_again() -> None:
    """A training of a week may lose many workers, as long as it gets on."""
    failed = [attempt("lost", saved=10 * number, reached=10 * number + 3) for number in range(50)]
    assert decide(failed, 1) == GoOn()
    assert decide([*failed, failed[-1], failed[-1]], 1) != GoOn()


@pytest.mark.parametrize("kind", ["damaged", "preempted"])
def test_what_does_not_count(kind: str) -> None:
    assert decide([attempt(kind)] * 9, 0) == GoOn()
    assert decide([attempt("lost"), *[attempt(kind)] * 9, attempt("lost")], 2) == GoOn()


def test_an_error_that_comes_back_at_the_same_step() -> None:
    """It may come from a bad bit once, but twice it is the code, or the data. Neither words nor ranks matter."""
    first, again = (attempt("raised", 10, 14, "ValueError in a, f", (rank,)) for rank in (0, 1))
    assert decide([first], 9) == GoOn()
    assert decide([first, again], 9) == GiveUp("every attempt fails in this way after step 14")
    assert decide([first, attempt("lost", 10, 12), again], 9) == GiveUp("every attempt fails in this way after step 14")
    assert decide([first, attempt("raised", 10, 15, "ValueError in a, f")], 9) == GoOn()
    assert decide([first, attempt("raised", 10, 14, "ValueError in a, g")], 9) == GoOn()
    assert decide([attempt("lost"), attempt("lost")], 9) == GoOn(), "workers may be lost at the same step by chance"


@given(
    st.lists(
        st.builds(attempt, st.sampled_from(list(KINDS)), st.integers(0, 3), st.integers(0, 5), st.sampled_from("ab")), min_size=1
    ),
    st.integers(0, 4),
)
def test_a_training_that_gets_nowhere_ends(history: list[Attempt], most: int) -> None:
    """After any history, at most `most` + 1 further losses without a checkpoint follow."""
    lost = attempt("lost", saved=9)
    goes_on = [isinstance(decide([*history, *[lost] * count], most), GoOn) for count in range(1, most + 3)]
    assert goes_on == [True] * most + [False] * 2

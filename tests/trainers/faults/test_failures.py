"""Failures, from Ray's exceptions."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray._private.worker
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import PreemptionError

from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.trainers.faults.test_watch import WAITS, beat, watch
from trainers.faults.attempts import Attempt, Failure, GiveUp, GoOn, decide
from trainers.faults.failures import failure_of, kinds_of
from trainers.faults.watch import Standstill, Watch
from trainers.telemetry.records import Place

OWN = "tests.trainers.faults.busy"
LOST = WorkerHealthCheckFailedError("worker died", ActorDiedError())
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:47631")
LATE = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete")


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found = [{"NodeID": f"node{i}", "Alive": True} for i in range(2)]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    return found


def places() -> dict[int, Place]:
    seat: Any = {"kind": "place", "actor": "a", "pid": 1, "attention": {}, "moe": {}}
    return {rank: {**seat, "rank": rank, "node": f"node{rank // 2}", "node_ip": f"10.0.0.{1 + rank // 2}"} for rank in range(4)}


def of_workers(watching: Watch | None = None, **failures: Exception) -> Failure:
    error = WorkerGroupError("text", {int(rank[1:]): failure for rank, failure in failures.items()})
    return failure_of(error, places(), watching or Watch(), 20.0)


def told(failure: Failure) -> tuple[str, str, tuple[int, ...]]:
    return failure.kind, failure.what, failure.ranks


def test_lost_workers() -> None:
    assert told(of_workers(r1=LOST)) == ("lost", "the process of rank 1 on 10.0.0.1 ended", (1,))
    assert told(of_workers(r0=CLOSED, r1=LOST, r3=LOST)) == (
        "lost",
        "the processes of ranks 1, 3 on 10.0.0.1, 10.0.0.2 ended",
        (1, 3),
    )
    assert told(of_workers(r0=CLOSED)) == ("lost", "connections between ranks broke (connection closed by peer)", (0,))


def test_broken_connections_to_another_host() -> None:
    text = "[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:47320: Connection reset by peer. This is typically caused by"
    found = told(of_workers(r0=RuntimeError(text), r1=CLOSED))
    assert found == ("lost", "connections to ranks 2, 3 on 10.0.0.2 broke (connection reset by peer)", (2, 3))
    assert told(of_workers(r1=CLOSED, r2=RuntimeError(text)))[1] == "connections between ranks broke (connection closed by peer)"


def test_a_lost_node(nodes: list[dict[str, Any]]) -> None:
    nodes[1]["Alive"] = False
    assert told(of_workers(r0=CLOSED, r2=LOST)) == ("lost", "node 10.0.0.2 was lost, with ranks 2, 3", (2, 3))


def test_an_error_of_a_worker() -> None:
    """Its peers lose their connections, and come first."""
    assert told(of_workers(r0=CLOSED, r1=ValueError("bad\ntoken"), r2=LOST)) == ("raised", "ValueError: bad token", (1,))
    assert told(of_workers(r1=UserError("data.path", "x", "is gone")))[:2] == ("refused", "data.path=x: is gone")


def test_an_error_is_dated_by_its_own_rank() -> None:
    """Rank 0 tells of its steps once a second, so what the driver knows of them is late."""
    error = ValueError("bad")
    error.add_note("after step 12")
    assert of_workers(r0=CLOSED, r1=error).after == 12
    assert of_workers(r1=LOST).after is None


def test_a_storage_that_does_not_answer_is_no_rank_that_stands_still() -> None:
    failure = of_workers(r0=CLOSED, r1=OSError("AWS Error NETWORK_CONNECTION: timeout was reached"))
    assert told(failure) == ("raised", "OSError: AWS Error NETWORK_CONNECTION: timeout was reached", (1,))


def test_ranks_that_wait_too_long() -> None:
    found = watch(beat(0, "F combine", WAITS), beat(1), ages=(0, 20))
    assert told(of_workers(found, r0=LATE)) == (
        "stalled",
        "rank 1 showed no sign of life for 20 s; rank 0 waits in F combine for all-to-all 7 of tokens",
        (1,),
    )
    still = watch(beat(0, "F combine", WAITS), beat(1, "reads its sequences", still_s=33.0))
    assert told(of_workers(still, r1=LOST))[::2] == ("stalled", (1,)), "it has ended itself"


def test_an_attempt_that_the_driver_has_ended(nodes: list[dict[str, Any]]) -> None:
    ended = Standstill((1,), "rank 1 showed no sign of life for 70 s")
    found = failure_of(ActorDiedError(), places(), Watch(), 20, ended)
    assert told(found) == ("stalled", "rank 1 showed no sign of life for 70 s", (1,))
    nodes[0]["Alive"] = False
    assert failure_of(ActorDiedError(), places(), Watch(), 20, ended).what == "node 10.0.0.1 was lost, with ranks 0, 1"


def test_what_is_not_a_workers_fault() -> None:
    unplaced = failure_of(ControllerError(WorkerGroupStartupTimeoutError(4)), {}, Watch(), 20)
    assert told(unplaced)[:2] == ("unplaced", "the cluster had no room for 4 workers, and did not start them in time")
    assert failure_of(ControllerError(KeyError("x")), {}, Watch(), 20).what == "Ray Train failed (KeyError: 'x')"
    assert failure_of(ActorDiedError(), {}, Watch(), 20).kind == "controller"
    notice = PreemptionError(_notice())
    assert told(failure_of(notice, places(), Watch(), 20)) == (
        "preempted",
        "the cluster takes back the node of ranks 2, 3",
        (2, 3),
    )
    assert failure_of(ValueError("x"), {}, Watch(), 20).kind == "raised"


def test_kinds_of_the_users_own() -> None:
    """A connection that is refused looks as if another worker had ended. The user's row says what it is."""
    recipe = {"model": {"preset": "tiny"}, "cluster": {"failures": [f"{OWN}:HOPELESS", f"{OWN}:BUSY"]}}
    kinds = kinds_of(Recipe.parse(recipe))
    error = WorkerGroupError("text", {0: CLOSED, 1: ConnectionRefusedError("no service"), 2: LOST})
    busy, odd = (failure_of(each, places(), Watch(), 20, None, kinds) for each in (error, ValueError("Odd: it is")))
    assert told(busy) == ("busy", "ConnectionRefusedError: no service", (1,))
    assert decide([Attempt(3, 2, busy)] * 9, 0, kinds) == GoOn()
    assert odd.kind == "hopeless"
    assert decide([Attempt(3, 2, odd)], 9, kinds) == GiveUp()


@pytest.mark.parametrize(
    ("name", "rule"), [("TAKEN", "has the name 'lost', which another kind has"), ("Failure", "cannot be imported")]
)
def test_a_row_that_is_no_kind_is_refused(name: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        kinds_of(Recipe.parse({"model": {"preset": "tiny"}, "cluster": {"failures": [f"{OWN}:{name}"]}}))


def test_a_full_disk_of_rays_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SimpleNamespace(get_session_dir_path=lambda: "/disk/ray")
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    for free, told_of in ((1 << 20, True), (1 << 30, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        what = failure_of(ActorDiedError(), {}, Watch(), 20).what
        assert what.endswith("; the disk of Ray's files is full: /disk/ray)") == told_of
    monkeypatch.setattr(ray._private.worker, "_global_node", None)
    assert failure_of(ActorDiedError(), {}, Watch(), 20).what.endswith("(ActorDiedError)")


def _notice() -> Any:
    class Notice:
        preempted_ranks = (3, 2)

    return Notice()

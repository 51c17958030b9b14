"""From Ray's exceptions to the failure of an attempt, in one line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import ray
import ray._private.worker
from ray.exceptions import RayError
from ray.train import ControllerError, TrainingFailedError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import PreemptionError

from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.tables import find_row
from trainers.faults.attempts import KINDS, Failure, FailureKind
from trainers.faults.causes import BROKE, LOST, TIMEOUT, Preempted, follows, identity, reason, root_cause, steps_before
from trainers.faults.watch import Standstill, Watch, named
from trainers.telemetry.records import Place

_CONTROLLER = "the process of Ray Train that starts the workers"
_LEAST_FREE = 32 * 2**20
"""Bytes that the disk of Ray's files needs, at the least, because Ray starts no process whose log it cannot write."""
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")


def kinds_of(recipe: Recipe) -> dict[str, FailureKind]:
    """Return foldray's kinds of failures, and those of a recipe, by their names."""
    kinds = dict(KINDS)
    for name in recipe.cluster.failures:
        row = find_row("cluster.failures", {}, FailureKind, name)
        if row.name in kinds:
            raise UserError("cluster.failures", name, f"has the name {row.name!r}, which another kind has")
        kinds[row.name] = row
    return kinds


def failure_of(
    error: Exception,
    places: Mapping[int, Place],
    watch: Watch,
    timeout: float,
    ended: Standstill | None = None,
    kinds: Mapping[str, FailureKind] = KINDS,
) -> Failure:
    """Return why an attempt failed.

    One fault makes other ranks fail as well. So a lost node counts first, then errors of the workers' own code, then ranks that
    stand still, then processes that ended, and broken connections last.

    Places of ranks are known as far as they have told. After `timeout` seconds, a wait for other ranks fails. `ended` is why the
    driver has ended the attempt itself, if it has.
    """
    if ended is not None:
        return _of_nodes(places) or Failure("stalled", ended.what, ended.ranks)
    cause = root_cause(error)
    if isinstance(cause, UserError):
        return Failure("refused", str(cause))
    if isinstance(cause, Preempted):
        return Failure("preempted", str(cause))
    if isinstance(error, PreemptionError):
        ranks = tuple(sorted(error.preemption_info.preempted_ranks))
        return Failure("preempted", f"the cluster takes back the node of {named(ranks)}", ranks)
    if isinstance(error, ControllerError):
        return _of_controller(error.controller_failure)
    if not isinstance(error, TrainingFailedError):
        if isinstance(error, RayError):
            return Failure("controller", f"{_CONTROLLER} was lost ({type(error).__name__}{_full_disk()})")
        return _raised(cause, kinds)
    failures = dict(getattr(error, "worker_failures", None) or {})
    return _of_nodes(places) or _of_workers(failures, places, cause, watch, timeout, kinds)


def _raised(cause: BaseException, kinds: Mapping[str, FailureKind], ranks: tuple[int, ...] = ()) -> Failure:
    kind = next((kind.name for kind in kinds.values() if kind.of(cause)), "raised")
    return Failure(kind, reason(cause), ranks, identity(cause), steps_before(cause))


def _of_controller(error: BaseException) -> Failure:
    if isinstance(error, WorkerGroupStartupTimeoutError):
        return Failure("unplaced", f"the cluster had no room for {error.num_workers} workers, and did not start them in time")
    if isinstance(error, WorkerGroupStartupFailedError):
        return Failure("unplaced", f"the cluster did not start the workers ({reason(error)}{_full_disk()})")
    return Failure("controller", f"Ray Train failed ({reason(error)}{_full_disk()})")


def _full_disk() -> str:
    """Tell of a full disk of Ray's own files on this node, or return an empty text."""
    node = ray._private.worker._global_node
    with suppress(OSError):
        if node is not None and shutil.disk_usage(folder := node.get_session_dir_path()).free < _LEAST_FREE:
            return f"; the disk of Ray's files is full: {folder}"
    return ""


def _of_nodes(places: Mapping[int, Place]) -> Failure | None:
    nodes = dict(_lost_nodes(places.values()))
    ranks = tuple(sorted(rank for rank, place in places.items() if place["node"] in nodes))
    if not ranks:
        return None
    where = ", ".join(dict.fromkeys(nodes.values()))
    return Failure("lost", f"node {where} was lost, with {named(ranks)}", ranks)


def _of_workers(
    failures: Mapping[int, Exception],
    places: Mapping[int, Place],
    cause: BaseException,
    watch: Watch,
    timeout: float,
    kinds: Mapping[str, FailureKind],
) -> Failure:
    lost = tuple(sorted(rank for rank, error in failures.items() if isinstance(error, LOST)))
    if raised := tuple(sorted(rank for rank, error in failures.items() if not follows(error))):
        return _raised(cause, kinds, raised)
    if watch.stands(timeout) or TIMEOUT.search(str(cause)):
        standstill = watch.standstill()
        return Failure("stalled", standstill.what, standstill.ranks)
    if lost:
        at = ", ".join(sorted({places[rank]["node_ip"] for rank in lost if rank in places}))
        text = f"the {'process' if len(lost) == 1 else 'processes'} of {named(lost)}{' on ' + at if at else ''} ended"
        return Failure("lost", text, lost)
    return _of_connection(failures, places, cause)


def _of_connection(failures: Mapping[int, Exception], places: Mapping[int, Place], cause: BaseException) -> Failure:
    """Return the failure of ranks that can no longer reach others. It names the others if they are on another host.

    Ray tells only later that a host was lost. gloo's error has the address that did not answer.
    """
    address, what = _ADDRESS.search(str(cause)), BROKE.search(str(cause))
    why = what[0].lower() if address and what else reason(cause)
    ranks = tuple(rank for rank, place in sorted(places.items()) if address and place["node_ip"] == address[1])
    if not ranks or set(ranks) & set(failures):
        return Failure("lost", f"connections between ranks broke ({why})", tuple(sorted(failures)))
    return Failure("lost", f"connections to {named(ranks)} on {places[ranks[0]]['node_ip']} broke ({why})", ranks)


def _lost_nodes(places: Iterable[Place]) -> Iterator[tuple[str, str]]:
    """Yield the id and the address of every node with ranks that is gone."""
    try:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    except Exception:  # without Ray's head, no node can be asked for
        return
    yield from ((place["node"], place["node_ip"]) for place in places if place["node"] not in alive)

"""Records: their way through the queue, and the history that they make up."""

import json
import math
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.trainers.telemetry.records import history, place, resumed, saved, step, validation
from trainers.telemetry import mail, mailbox
from trainers.telemetry.history import LOAD_WINDOW, History
from trainers.telemetry.mail import Mail
from trainers.telemetry.mailbox import Inbox, Outbox
from trainers.telemetry.records import KINDS, Record, Sink, as_json, number


@ray.remote(num_cpus=0)
def worker(queue: Any, rank: int, steps: int) -> bool:
    outbox = Outbox(queue)
    outbox.send(place(rank))
    if rank == 0:
        for count in range(1, steps + 1):
            outbox.send(step(count))
    return outbox.flush()


def test_all_records_of_all_ranks_arrive_in_order(ray_session):
    seen: list[Record] = []
    seen_too: list[Record] = []
    with Inbox([seen.append, seen_too.append]) as inbox:
        assert all(ray.get([worker.remote(inbox.queue, rank, 300) for rank in range(2)]))
    assert {record["rank"] for record in seen if record["kind"] == "place"} == {0, 1}
    assert [record["step"] for record in seen if record["kind"] == "step"] == list(range(1, 301))
    assert all(abs(record["time"] - time.time()) < 60 for record in seen)
    assert seen == seen_too


def test_records_are_followed_while_the_training_runs(ray_session):
    seen: list[Record] = []
    with Inbox([seen.append], period=0.01) as inbox:
        Outbox(inbox.queue).send(step(1))
        deadline = time.monotonic() + 120
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [record["step"] for record in seen if record["kind"] == "step"] == [1]


def test_a_failing_subscriber_is_reported_and_stops_nobody(ray_session, caplog):
    seen: list[Record] = []

    def fails(record):
        raise OSError("disk full")

    def train():
        with Inbox([fails, seen.append]) as inbox:
            assert ray.get(worker.remote(inbox.queue, 0, 3))

    with pytest.raises(OSError, match="disk full"):
        train()
    assert [record["step"] for record in seen if record["kind"] == "step"] == [1, 2, 3]
    assert caplog.text.count("disk full") == 1


def test_signs_of_life_that_cannot_be_used_cost_no_records(ray_session, caplog):
    """A disk may be full for a moment, or Ray's head away."""
    seen, looked = [], []

    def fails(beats):
        looked.extend(beats)
        raise OSError(28, "No space left on device")

    with Inbox([seen.append], fails, period=0.01) as inbox:
        outbox = Outbox(inbox.queue)
        for number in range(3):
            outbox.send({"kind": "beat", "rank": number})
            outbox.send(step(number))
            outbox.flush()
    assert [record["step"] for record in seen] == [0, 1, 2]
    assert len(looked) == 3
    assert caplog.text.count("signs of life cannot be used (OSError: [Errno 28] No space left on device)") == 1


def test_a_failing_subscriber_does_not_hide_the_trainings_own_failure(ray_session):
    def fails(record):
        raise OSError("disk full")

    def train():
        with Inbox([fails]) as inbox:
            assert ray.get(worker.remote(inbox.queue, 0, 3))
            raise RuntimeError("worker lost")

    with pytest.raises(RuntimeError, match="worker lost"):
        train()


def test_a_queue_that_is_gone_costs_records_and_not_the_training(ray_session, monkeypatch):
    queue = ray.remote(Mail).options(num_cpus=0).remote()
    assert ray.get(queue.take.remote(False)) == []
    outbox = Outbox(queue, limit=50)
    ray.kill(queue)
    wait, waited = ray.wait, []
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (waited.append(timeout), wait(refs, timeout=timeout))[1])
    for count in range(200):
        outbox.send(step(count))
    assert waited
    assert not any(waited), "only `flush` waits"
    assert not outbox.flush(timeout=1)


def test_an_inbox_that_lost_its_queue_says_so(ray_session, caplog):
    with pytest.raises(ray.exceptions.RayError), Inbox([lambda record: None], period=0.01) as inbox:
        ray.kill(inbox.queue)
    assert "the queue is lost" in caplog.text


def test_a_queue_that_comes_back_costs_nothing(ray_session, caplog, monkeypatch):
    monkeypatch.setattr(mailbox, "_ANSWER_S", 0.2)
    seen: list[Record] = []
    with Inbox([seen.append], period=0.01, patience=0.3) as inbox:
        pid = ray.get(inbox.queue.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while "the queue is lost" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
        while "the queue is back" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        outbox = Outbox(inbox.queue)
        outbox.send(step(1))
        assert outbox.flush()
    assert [record["step"] for record in seen] == [1]


def test_what_waits_for_a_driver_that_hangs_is_bounded(monkeypatch):
    """Steps are told every second, and signs of life by every rank."""
    monkeypatch.setattr(mail, "MOST", 10)
    waiting = Mail()
    for count in range(1, 101):
        waiting.put(
            [*([place(count % 2)] if count < 5 else []), step(count), {"kind": "beat", "rank": count % 2, "count": count}]
        )
    taken = waiting.take(False)
    assert [record["kind"] for record in taken].count("place") == 4
    steps = [record["step"] for record in taken if record["kind"] == "step"]
    assert steps == list(range(steps[0], 101)), "the newest, in order"
    assert len(steps) <= 20
    assert [record["count"] for record in taken if record["kind"] == "beat"] == [99, 100]
    assert waiting.take(False) == []


def test_settling_waits_for_a_record_that_came_after_the_last_look(monkeypatch):
    """A look that is under way may have left the queue before the record came. So what an attempt failed of was not yet known."""
    looks, seen = threading.Event(), []

    def taken():
        inbox._reads += 1
        if inbox._reads == 1:
            looks.wait(60)
        return [step(1)] if inbox._reads == 2 else []

    inbox = Inbox([seen.append])
    monkeypatch.setattr(inbox, "_taken", taken)
    inbox._thread.start()
    threading.Timer(0.3, looks.set).start()
    inbox.settle()
    assert seen == [step(1)]
    inbox._leaving.set()
    inbox._thread.join(60)


def test_records_that_have_time_go_together(ray_session):
    batches: list[list[int]] = []

    def put(records: list[Record]) -> Any:
        batches.append([record["step"] for record in records])
        return ray.put(False)

    outbox = Outbox(SimpleNamespace(put=SimpleNamespace(remote=put)))
    for count in range(1, 5):
        outbox.send(step(count), urgent=False)
    assert batches == [[1]]
    outbox.send(saved(4))
    assert batches == [[1], [2, 3, 4, 4]]
    outbox.send(step(5), urgent=False)
    assert outbox.flush()
    assert batches[2:] == [[5]]


def test_an_order_to_stop_reaches_the_workers_and_is_taken_back(ray_session):
    with Inbox([], period=0.01) as inbox:
        outbox = Outbox(inbox.queue)
        for stops in (False, True, False):
            inbox.stops = stops
            deadline = time.monotonic() + 120
            while True:
                outbox.send(step(1))
                assert outbox.flush()
                if outbox.stops == stops:
                    break
                assert time.monotonic() < deadline


def test_an_order_to_stop_outlives_the_queue(ray_session):
    with Inbox([], period=0.01) as inbox:
        inbox.stops, outbox = True, Outbox(inbox.queue)
        ray.kill(inbox.queue, no_restart=False)
        deadline = time.monotonic() + 120
        while not outbox.stops:
            outbox.send(step(1))
            outbox.flush()
            assert time.monotonic() < deadline


def test_a_history_keeps_the_records_by_step():
    past = history(place(0), step(1), step(2), validation(2), saved(2), step(3, loss=1.5))
    assert list(past.steps) == [1, 2, 3]
    assert (past.last_step, past.steps[3]["loss"]) == (3, 1.5)
    assert (past.validations[2]["bits_per_byte"], past.checkpoints[2]["path"]) == (3.0, "/storage/run/checkpoint_2")
    assert past.places[0]["pid"] == 100


def test_steps_that_are_run_again_take_the_place_of_the_earlier_ones():
    lost = [step(count, loss=9.0, load=[[9, 1]]) for count in range(1, 6)]
    again = [step(count, loss=1.0, load=[[1, 1]]) for count in range(3, 5)]
    past = history(*lost[:4], validation(4), saved(2), lost[4], resumed(2), *again)
    assert {count: record["loss"] for count, record in past.steps.items()} == {1: 9.0, 2: 9.0, 3: 1.0, 4: 1.0}
    assert (past.resumes, past.validations, list(past.checkpoints)) == ([2], {}, [2])
    assert past.load is not None
    assert past.load.tolist() == [[20, 4]]
    assert past.imbalance.ends().tolist() == [1, 2, 3, 4]


def test_an_attempt_from_the_beginning_starts_the_history_anew():
    past = history(step(1, loss=9.0), step(2, loss=9.0), validation(2), step(1, loss=1.0))
    assert {count: record["loss"] for count, record in past.steps.items()} == {1: 1.0}
    assert past.validations == {}


def test_loads_are_summed_over_the_newest_steps_only():
    past = history(*(step(count, load=[[count, 0, 0, 0]]) for count in range(1, LOAD_WINDOW + 11)))
    assert past.load is not None
    assert past.load.tolist() == [[sum(range(11, LOAD_WINDOW + 11)), 0, 0, 0]]
    assert past.imbalance.means()[0].tolist() == [4.0]
    assert history(step(1)).load is None


def test_unused_experts_are_those_of_the_newest_steps():
    fed = [step(count, load=[[40, 40, 1, 0]]) for count in range(1, 6)]
    past = history(*fed, *(step(count, load=[[40, 40, 0, 0]]) for count in range(6, LOAD_WINDOW + 10)))
    unused = past.unused.means().tolist()
    assert [unused[count - 1] for count in (1, LOAD_WINDOW, LOAD_WINDOW + 4, LOAD_WINDOW + 5)] == [[1, 2]] * 3 + [[2, 2]]
    assert past.newest == range(10, LOAD_WINDOW + 10)


def test_balance_over_time_forgets_steps_that_run_again():
    past = history(*(step(count, load=[[3, 1]]) for count in range(1, 6)), resumed(3), step(4, load=[[1, 1]]))
    assert past.entropy.ends().tolist() == past.unused.ends().tolist() == [1, 2, 3, 4]
    assert past.entropy.means()[-1].tolist() == [1.0]
    assert [column.first for column in past.course.columns] == [1, 2, 3, 4]
    assert past.steps[4].get("by_layer") is None  # metrics.jsonl has them


def test_lines_of_an_older_foldray_are_read(tmp_path):
    added = ("rank_max_over_mean", "load_entropy", "by_layer")
    old = {key: value for key, value in step(1, load=[[1, 2]]).items() if key not in added}
    new = {**old, "step": 2, "rank_max_over_mean": None, "by_layer": None}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(old)}\n{json.dumps(new)}\n")
    past = History.read(tmp_path / "metrics.jsonl")
    assert past.entropy.ends().tolist() == [1, 2]
    health = past.health(ep=2)
    assert health is not None
    assert health.rank_max_over_mean.tolist() == pytest.approx([4 / 3])


def test_a_history_is_read_back_from_its_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [place(0), step(1, load=[[1, 2]]), step(2, loss=math.nan), validation(2), resumed(1), step(2)]
    path.write_text("".join(as_json(record) + "\n" for record in records) + '{"kind": "ste')
    past = History.read(path)
    assert list(past.steps) == [1, 2]
    assert (past.resumes, past.validations) == ([1], {})
    assert History.read(tmp_path / "nothing").steps == {}


def test_lines_are_strict_json():
    line = as_json(step(1, loss=math.inf))
    assert math.isnan(number(json.loads(line, parse_constant=pytest.fail)["loss"]))


def test_a_method_for_no_kind_is_refused() -> None:
    """A record would never reach a method whose name has a slip."""
    with pytest.raises(TypeError, match="take_stepp takes no kind of record"):
        type("Loud", (Sink,), {"take_stepp": lambda self, record: None})


def test_the_history_takes_every_kind() -> None:
    assert [kind for kind in KINDS if not hasattr(History, f"take_{kind}")] == []

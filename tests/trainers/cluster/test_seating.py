"""Which worker becomes which rank, and on which node: with workers that are made up, and on a Ray cluster of several nodes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.execution.context import DistributedContext

from foldray.cli import main
from foldray.fold import Fold
from foldray.nodes import Edges, Flow
from tests.foldray.parity import make_recipe
from tests.trainers.driver.runs import MODEL, write_texts
from trainers.cluster import seating
from trainers.cluster.seating import NODE_ID, Host, Seating, chosen_nodes, seated, traffic_of

PAIRS = Edges(Fold(4, tp=2, order="dp-tp-cp-pp"), (Flow("tp", "ring", 10.0),))  # ranks 0 and 2, and ranks 1 and 3


def test_workers_of_a_node_get_ranks_that_talk() -> None:
    anywhere = [""] * 4
    assert seated(PAIRS, ["a", "b", "b", "c"], anywhere, anywhere) in ([1, 0, 2, 3], [0, 1, 3, 2])
    assert seated(PAIRS, ["a", "a", "b", "b"], anywhere, anywhere) in ([0, 2, 1, 3], [2, 0, 3, 1])
    assert seated(Edges(PAIRS.fold, ()), ["a", "b", "a", "b"], anywhere, anywhere) == [0, 2, 1, 3]  # node by node


def test_a_rank_has_a_worker_of_its_kind() -> None:
    kinds = ["experts", "attention", "experts", "attention"]
    wanted = ["attention", "attention", "experts", "experts"]
    order = seated(PAIRS, ["a", "a", "b", "b"], kinds, wanted)
    assert [kinds[worker] for worker in order] == wanted
    assert order in ([1, 3, 0, 2], [3, 1, 2, 0])  # ranks 0 and 2 on one node


def made_up(nodes: str) -> list[Any]:
    """Return workers as Ray makes them, one for each letter, numbered node by node."""
    counts = Counter(nodes)
    contexts = (
        DistributedContext(rank, len(nodes), nodes[:rank].count(node), counts[node], list(counts).index(node))
        for rank, node in enumerate(nodes)
    )
    return [
        SimpleNamespace(placement_group_bundle_index=rank, metadata=SimpleNamespace(node_id=node), distributed_context=context)
        for rank, (node, context) in enumerate(zip(nodes, contexts, strict=True))
    ]


def started(**context: Any) -> SimpleNamespace:
    values = {"num_workers": 4, "resources_per_worker": {"CPU": 1.0}, "placement_strategy": "PACK", "label_selector": None}
    return SimpleNamespace(**{**values, **context})


def test_all_of_ray_train_has_the_ranks_of_foldray() -> None:
    callback, workers = pickle.loads(pickle.dumps(Seating({4: PAIRS}))), made_up("aabb")
    callback.before_worker_group_start(started())
    assert callback.before_init_train_context(workers) == {}
    assert [worker.distributed_context.world_rank for worker in workers] == [0, 1, 2, 3]
    assert [worker.metadata.node_id for worker in workers] == ["a", "b", "a", "b"]
    assert [worker.distributed_context.local_rank for worker in workers] == [0, 0, 1, 1]
    assert [worker.placement_group_bundle_index for worker in workers] == [0, 2, 1, 3]


def test_workers_with_labels_keep_their_half() -> None:
    callback, workers = Seating({4: PAIRS}), made_up("aabb")
    for worker, bundle in zip(workers, (2, 0, 3, 1), strict=True):  # Ray numbers node by node
        worker.placement_group_bundle_index = bundle
    selectors = [{"half": half} for half in ("attention", "attention", "experts", "experts")]
    callback.before_worker_group_start(started(label_selector=selectors))
    callback.before_init_train_context(workers)
    assert [worker.placement_group_bundle_index // 2 for worker in workers] == [0, 0, 1, 1]
    assert all(NODE_ID not in each for each in selectors)


CHOICES = [
    ([3, 3], {"x0": 2, "x1": 2}),  # not three and one
    ([1, 3, 2], {"x1": 2, "x2": 2}),
    ([4, 3], None),  # Ray packs them itself
    ([1, 2, 1], None),  # there is no choice
    ([1, 1], None),  # Ray waits for room
]


@pytest.mark.parametrize(("seats", "chosen"), CHOICES)
def test_nodes_are_chosen_where_ray_has_a_choice(
    seats: list[int], chosen: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [Host(f"x{number}", "", count) for number, count in enumerate(seats)]
    monkeypatch.setattr(seating, "hosts", lambda needs, free: there)
    monkeypatch.setattr(seating, "_RELEASED_S", 0.05)
    edges = Edges(PAIRS.fold, (*PAIRS.flows, Flow("dp_cp", "ring", 1.0)))
    nodes = chosen_nodes(edges, {"CPU": 1.0})
    assert (nodes and Counter(nodes)) == chosen
    selectors: list[dict[str, str]] = [{}, {}, {}, {}]
    Seating({4: edges}).before_worker_group_start(started(label_selector=selectors))
    assert [each.get(NODE_ID) for each in selectors] == (nodes or [None] * 4)
    selectors = [{}, {}, {}, {}]
    Seating({4: edges}).before_worker_group_start(started(label_selector=selectors, placement_strategy="SPREAD"))
    assert not any(selectors)


def test_room_that_is_given_back_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = iter([[0, 2], [1, 2], [3, 3]])
    monkeypatch.setattr(seating, "hosts", lambda needs, free: [Host(f"x{n}", "", count) for n, count in enumerate(next(seats))])
    monkeypatch.setattr(seating, "_RELEASED_S", 1.0)
    assert Counter(chosen_nodes(PAIRS, {"CPU": 1.0}) or ()) == {"x0": 2, "x1": 2}


@pytest.mark.parametrize("fold", [{"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"cp": 2, "etp": 2}])
def test_the_traffic_of_a_recipe(fold: dict[str, int]) -> None:
    edges = traffic_of(make_recipe(4, fold))
    assert {"tp", "ep", "cp", "etp", "pp"} & edges.split([0, 1, 2, 3]).keys() == fold.keys()
    assert edges.across([0, 1, 2, 3]) > 0 == edges.across([0, 0, 0, 0])


def on_several_nodes(nodes: str, what: str, folder: Path) -> dict[str, Any]:
    """Run `several_nodes`, and return what it found. TP groups and EP groups are ranks 0 and 2, and ranks 1 and 3."""
    write_texts(folder, files=3)
    recipe = {
        "name": "test", "model": MODEL,
        "data": {"source": "text", "path": str(folder / "*.txt"), "seq_len": 32, "validation": {"fraction": 0.3}},
        "fold": {"tp": 2, "ep": 2, "order": "dp-cp-tp-pp", "moe_order": "edp-ep-etp-pp"},
        "training": {"steps": 3, "global_batch": 8, "micro_batch": 2, "eval_sequences": 4},
        "engine": {"kind": "torch"}, "cluster": {"workers": 4, "storage": str(folder)},
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "tests.trainers.cluster.several_nodes", nodes, str(folder / "recipe.json"), what]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly("a Ray cluster of its own, and two trainings")
def test_a_training_on_unequal_nodes_has_its_groups_together(tmp_path: Path) -> None:
    found = on_several_nodes("1,2,1", "train", tmp_path)
    together = {order: sum(run["nodes"][a] == run["nodes"][b] for a, b in ((0, 2), (1, 3))) for order, run in found.items()}
    assert together == {"ray": 0, "foldray": 1}
    for run in found.values():
        assert len(set(run["nodes"])) == 3
    ray, foldray = found["ray"], found["foldray"]
    assert len(ray["losses"]) == 3
    assert ray["losses"] == foldray["losses"]
    assert ray["validation"] == foldray["validation"]
    sent = {order: run["traffic"]["tensor"] for order, run in found.items()}
    assert sent["ray"]["inside_bytes"] == 0
    assert sent["ray"]["across_bytes"] == 2 * sent["foldray"]["across_bytes"] == 2 * sent["foldray"]["inside_bytes"]


@pytest.mark.nightly("a Ray cluster of its own")
def test_actors_have_nodes_that_hold_their_groups(tmp_path: Path) -> None:
    found = on_several_nodes("3,3", "start", tmp_path)
    ray, foldray = found["ray"]["nodes"], found["foldray"]["nodes"]
    assert found["foldray"]["ranks"] == [0, 1, 2, 3]
    assert sorted(Counter(ray).values()) == [1, 3]
    assert sorted(Counter(foldray).values()) == [2, 2]
    assert foldray[0] == foldray[2] != foldray[1] == foldray[3]


def test_explain_asks_a_cluster_that_runs(ray_session: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--world-size", "2", "--tp", "2", "--cluster", "auto", "--json"]) == 0
    (node,) = json.loads(capsys.readouterr().out)["seats"]["nodes"]
    assert (node["seats"], node["before"], node["after"]) == (2, [0, 1], [0, 1])
    assert node["name"] == ray.util.get_node_ip_address()
    assert main(["explain", "--world-size", "4", "--cluster", "auto"]) == 2
    assert "cluster=2: have room for 2 of 4 ranks" in capsys.readouterr().err

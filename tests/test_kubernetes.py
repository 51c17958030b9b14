"""The manifest for Kubernetes: what it runs exists, and its versions and numbers are those of the rest of the repository."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from foldray.cli.arguments import make_parser
from foldray.recipe import Recipe

ROOT = Path(__file__).parents[1]
IMAGE = "/home/ray/foldray/"  # where the image has the repository


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((ROOT / "recipes" / "kubernetes" / "rayjob.yaml").read_text()))
    (job,) = (document for document in documents if document["kind"] == "RayJob")
    return job["spec"]


@pytest.fixture(scope="module")
def recipe(job: dict[str, Any]) -> Recipe:
    """The recipe with its changes, as the entry point's arguments parse."""
    assert job["submissionMode"] == "HTTPMode"  # the others let a shell read the entry point before
    words = shlex.split(job["entrypoint"].split("exec ")[1])
    assert words[:3] == ["python", "-m", "foldray"]
    given = make_parser().parse_args(words[3:])
    assert (given.command, given.resume) == ("train", "newest")
    assert given.recipe.startswith(IMAGE)
    return Recipe.load(ROOT / given.recipe.removeprefix(IMAGE), given.overrides)


def containers(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the pods of the head and of the workers."""
    cluster = job["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"]["spec"], "workers": workers["template"]["spec"]}


def test_the_workers_fit_into_the_pods(job: dict[str, Any], recipe: Recipe) -> None:
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = containers(job)["workers"]["containers"]
    limits = container["resources"]["limits"]
    assert group["replicas"] * limits["nvidia.com/gpu"] == recipe.cluster.workers
    assert int(limits["cpu"]) > limits["nvidia.com/gpu"] * recipe.cluster.cpus_per_worker  # some are left for Ray Data
    assert job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_all_pods_see_the_storage_and_the_texts(job: dict[str, Any], recipe: Recipe) -> None:
    for pod in containers(job).values():
        paths = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        for path in (recipe.cluster.storage, recipe.data.path):
            assert any(str(path).startswith(f"{mounted}/") for mounted in paths), path
        assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}


def test_ray_is_the_version_of_the_constraints(job: dict[str, Any]) -> None:
    found = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found
    assert job["rayClusterSpec"]["rayVersion"] == found[1]
    for pod in containers(job).values():
        assert pod["containers"][0]["image"].endswith(f"ray-{found[1]}")
    assert f"FROM rayproject/ray:{found[1]}-" in (ROOT / "docs" / "running.md").read_text()


def test_a_pod_has_time_for_a_checkpoint(job: dict[str, Any]) -> None:
    head, workers = containers(job)["head"], containers(job)["workers"]
    pids = re.findall(r"\S+\.pid", f"{job['entrypoint']} {head['containers'][0]['lifecycle']}")
    assert len({each.strip(";") for each in pids}) == 1
    (wait,) = (int(each["value"]) for each in head["containers"][0]["env"] if each["name"] == "RAY_JOB_STOP_WAIT_TIME_S")
    told = int(re.findall(r"--deadline-remaining-seconds (\d+)", str(workers["containers"][0]["lifecycle"]))[0])
    for pod in (head, workers):
        assert max(wait, told) < pod["terminationGracePeriodSeconds"]

"""Joules are those that counters show, each device's once, and no number where one cannot be read."""

from __future__ import annotations

import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.orders import Ordering
from foldray.recipe import Recipe
from tests.foldray.parity import make_recipe
from tests.patches import patched
from tests.trainers.powercap import make, use
from trainers.measure import bench
from trainers.telemetry import energy as module
from trainers.telemetry.energy import POWERCAP, Counter, Energy

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def one_rank(device: torch.device = CPU, powercap: Path = POWERCAP) -> Energy:
    return Energy(Groups.create(Fold(1)).control, device, powercap)


def test_processors_are_read_past_the_ends_of_their_counters(tmp_path: Path) -> None:
    energy = one_rank(powercap=make(tmp_path, 2))
    assert energy.lacking is None
    assert math.isnan(energy.taken()), "nothing to compare with"
    used = []
    for joules in (2, 2, 0, 5):  # the second one goes past the end
        use(tmp_path, 0, joules)
        use(tmp_path, 1, 10 * joules)
        used.append(energy.taken())
    assert used == pytest.approx([22, 22, 0, 55], abs=1e-9)


def test_pauses_are_left_out(tmp_path: Path) -> None:
    energy = one_rank(powercap=make(tmp_path, 1))
    energy.taken()
    use(tmp_path, 0, 1)
    with energy.paused():
        use(tmp_path, 0, 100)
    use(tmp_path, 0, 10)
    assert energy.taken() == pytest.approx(11)


def test_a_counter_that_fails_gives_no_number_until_it_was_read_twice(tmp_path: Path) -> None:
    energy, file = one_rank(powercap=make(tmp_path, 1)), tmp_path / "intel-rapl:0" / "energy_uj"
    energy.taken()
    file.rename(file.with_name("away"))
    assert math.isnan(energy.taken())
    file.with_name("away").rename(file)
    use(tmp_path, 0, 1)
    assert math.isnan(energy.taken()), "of two steps"
    use(tmp_path, 0, 1)
    assert energy.taken() == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: shutil.rmtree(folder / "intel-rapl:1"), "has no counter of a processor"),
        (lambda folder: (folder / "intel-rapl:1" / "energy_uj").unlink(), "intel-rapl:1/energy_uj"),
        (lambda folder: (folder / "intel-rapl:1" / "energy_uj").write_text("?"), "invalid literal for int"),
    ],
)
def test_counters_that_cannot_be_read_are_told(tmp_path: Path, change: Any, words: str) -> None:
    make(tmp_path, 2)
    shutil.rmtree(tmp_path / "intel-rapl:0")
    change(tmp_path)
    energy = one_rank(powercap=tmp_path)
    assert words in str(energy.lacking)
    assert math.isnan(energy.taken())


def sums(rank: int, folder: Path, boots: list[str]) -> tuple[float, str | None]:
    """Return the joules of all ranks, if each uses its own processor, and runs on the machine that `boots` names."""
    groups = Groups.create(Fold(len(boots)), rank)
    boot = folder / f"boot_{rank}"
    boot.write_text(boots[rank])
    with patched(module, "_BOOT", boot):
        energy = Energy(groups.control, CPU, folder / boots[rank])
    energy.taken()
    groups.control.all_reduce(torch.zeros(1))  # all have read
    use(folder / boots[rank], rank, 2**rank)
    groups.control.all_reduce(torch.zeros(1))  # all have used
    joules = groups.control.all_reduce(torch.tensor(energy.taken(), dtype=torch.float64))
    groups.close()
    return float(joules), energy.lacking


def test_a_machine_counts_once(ranks: Any, tmp_path: Path) -> None:
    for name in "ab":
        make(tmp_path / name, 2)
    for boots in (list("aa"), list("ab")):
        assert ranks(2).run(sums, tmp_path, boots) == [(pytest.approx(3), None)] * 2
    shutil.rmtree(tmp_path / "b")
    for joules, lacking in ranks(2).run(sums, tmp_path, list("ab")):
        assert math.isnan(joules), "part of a sum is none"
        assert "b has no counter" in str(lacking)


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """NVML with two GPUs, by UUID. The one that CUDA calls 0 is the second one."""
    millijoules = {"GPU-first": 7_000, "GPU-second": 1_000}

    def handle(uuid: str) -> str:
        if uuid not in millijoules:
            raise NVMLError("Not Found")
        return uuid

    fake = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetTotalEnergyConsumption=millijoules.__getitem__,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=["second"][device.index]))
    return millijoules


def test_a_gpu_is_found_by_its_uuid(nvml: dict[str, int]) -> None:
    energy = one_rank(CUDA)
    assert energy.lacking is None
    energy.taken()
    nvml["GPU-second"] += 2_500
    nvml["GPU-first"] += 9_000
    assert energy.taken() == pytest.approx(2.5)
    nvml["GPU-second"] = 500  # the driver was loaded again
    assert math.isnan(energy.taken())


def test_every_rank_reads_its_gpu(nvml: dict[str, int]) -> None:
    """Ranks of a node have a GPU each, so nothing is counted twice."""
    others: Any = SimpleNamespace(index=1, all_gather_object=lambda own: [own, own])
    energy = Energy(others, CUDA)
    energy.taken()
    nvml["GPU-second"] += 1_000
    assert energy.taken() == pytest.approx(1)


def test_a_gpu_without_counter_is_told(nvml: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    del nvml["GPU-second"]
    assert one_rank(CUDA).lacking == "NVML: Not Found"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    energy = one_rank(CUDA)
    assert "pip install nvidia-ml-py" in str(energy.lacking)
    assert math.isnan(energy.taken())


def test_a_count_is_in_joules() -> None:
    counts = iter([5, 9])
    counter = Counter(lambda: next(counts), 0.5)
    assert math.isnan(counter.taken())
    assert counter.taken() == 2.0


def compared(rank: int, recipe: Recipe, orderings: list[Ordering], folder: Path) -> dict[str, Any] | None:
    """Compare schedules. For a piece of a sequence, the first rank's machine uses a joule, and the second's two."""
    make_engine, boot, powercap = bench.make_engine, folder.with_name(f"boot_{rank}"), folder / f"{rank}"
    boot.write_text(f"{rank}")

    def counting(*arguments: Any) -> Any:
        engine = make_engine(*arguments)
        train = engine.train

        def used(batches: Any) -> Any:
            use(powercap, 0, engine.execution.ordering.degree * (rank + 1))
            return train(batches)

        engine.train = used
        return engine

    groups = Groups.create(recipe.placed_fold, rank)
    energy = patched(bench, "Energy", partial(Energy, powercap=powercap))
    with patched(module, "_BOOT", boot), patched(bench, "make_engine", counting), energy:
        found = bench._compare(recipe, groups, CPU, orderings, rounds=1)
    groups.close()
    return found


def test_schedules_are_compared_by_their_joules(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, names = make_recipe(2, 2), ["sequential", "stream:4"]
    orderings = [recipe.named_ordering(name) for name in names]
    shown = []
    for name in "01":
        make(tmp_path / "powercap" / name, 1)
    for folder in (tmp_path / "powercap", tmp_path / "nowhere"):
        found = ranks(2).run(compared, recipe, orderings, folder)[0]
        monkeypatch.setattr(bench, "on_workers", lambda *_, found=found, **__: found)
        for as_json in (False, True):
            bench.bench(recipe, names, 1, as_json=as_json)
            shown.append(capsys.readouterr().out)
    table, document, without, nothing = shown
    assert [line.split()[-1] for line in table.splitlines() if line.startswith("schedule")] == ["joules"]
    rows = [line.removesuffix("  fastest").split()[-1] for line in table.splitlines() if line.startswith(tuple(names))]
    assert rows == ["3", "12"], "of both ranks"
    assert [result["energy_j"] for result in json.loads(document)["results"]] == pytest.approx([3, 12])
    assert [line for line in without.splitlines() if "joules" in line] == [f"no joules: {folder}/0 has no counter of a processor"]
    assert [result["energy_j"] for result in json.loads(nothing)["results"]] == [None, None]
    assert json.loads(nothing)["lacks_energy"].endswith("has no counter of a processor")

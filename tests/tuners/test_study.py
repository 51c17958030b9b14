"""Whole studies on real ranks with made-up step times: they find the best setting although trials fail or hang."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from foldray.cli import main
from foldray.errors import UserError
from foldray.recipe import EngineSpec, Recipe
from trainers.measure.trial import Turn
from tuners.measure import Measurement, disjoint_nodes
from tuners.record import TrialRecord, write_trial
from tuners.report import summary, write_report
from tuners.space import Setting
from tuners.study import FoldTuner, could_be_best

SPACE = {"tp": [1], "cp": [1], "pp": [1], "kind": ["sequential", "moe_only", "stream"], "degree": [1, 2, 4]}


def recipe(folder: Path, **tune: Any) -> Recipe:
    return Recipe.parse(
        {
            "model": {"preset": "tiny", "layers": 2},
            "engine": {"kind": "torch"},
            "data": {"seq_len": 64},
            "cluster": {"workers": 2, "storage": str(folder)},
            "tune": {"space": SPACE, "turns": 2, "steps": 1, "pairs": 2, "prune": None, **tune},
        }
    )


def made_up(state: dict[str, Any], given: dict[str, Any], steps: int, keep: int, record: bool) -> Turn:
    """Return step times by a formula. Three settings run out of memory, kill a rank, or hang."""
    row = Setting.of(Recipe.parse(given))
    name = f"{row.ep}{row.etp} {row.kind}{row.degree}"
    if name == "21 stream4" and state["rank"] == 1:
        _eat_all()
    if name == "21 moe_only4" and state["rank"] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "21 stream2" and state["rank"] == 1:
        time.sleep(3600)
    best = name == "21 moe_only2"
    seconds = 0.4 if best else 1.0 if row.kind == "sequential" and row.ep == 1 else 0.7
    return Turn([seconds] * steps, peak=1 << 30)


def _eat_all() -> None:
    """Allocate more memory than the limit."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    bytearray(16 << 30)


@pytest.mark.nightly("a trial hangs until its limit")
def test_a_sweep_survives_its_trials(ray_session, tmp_path: Path) -> None:
    """One trial runs out of memory, one hangs, one loses a worker. The study keeps the reasons and finds the best."""
    tuner = FoldTuner(recipe(tmp_path, sampler="random", trials=50, trial_s=20), tmp_path, measure_turn=made_up)
    outcome = tuner.fit()
    assert (outcome.best.ep, outcome.best.etp, outcome.best.kind, outcome.best.degree) == (2, 1, "moe_only", 2)
    assert outcome.seconds == pytest.approx(0.4)
    assert outcome.gain is not None
    assert outcome.gain.times == pytest.approx(2.5)
    reasons = {each.record.setting: each.record.reason for each in outcome.trials if each.record.reason}
    assert set(reasons) == {"EP2 stream d=4", "EP2 moe_only d=4", "EP2 stream d=2"}
    assert reasons["EP2 stream d=4"].startswith("memory")
    assert reasons["EP2 moe_only d=4"].startswith("lost a worker")
    assert reasons["EP2 stream d=2"] == "took more than 20 s"
    assert len(outcome.trials) == len(tuner.table.rows), "each row once"


def unwell(state: dict[str, Any], given: dict[str, Any], steps: int, keep: int, record: bool) -> Turn:
    """Fail for every recipe, also for the unchanged one."""
    if state["rank"] == 1:
        raise MemoryError("no room")
    time.sleep(3600)
    return Turn([1.0] * steps, peak=1)


@pytest.mark.nightly("another study on Ray")
def test_a_recipe_that_does_not_run_itself_is_told_in_one_line(ray_session, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^the recipe as it stands could not be measured: memory: .*no room"):
        FoldTuner(recipe(tmp_path, sampler="random", trials=3), tmp_path, measure_turn=unwell).fit()


def killed_late(state: dict[str, Any], given: dict[str, Any], steps: int, keep: int, record: bool) -> Turn:
    """Kill a rank while the winner is compared. A file has the number of times."""
    row = Setting.of(Recipe.parse(given))
    state[row] = state.get(row, 0) + 1
    deaths = Path(given["cluster"]["storage"]) / "deaths"
    left = int(deaths.read_text())
    if row.ep == 2 and state[row] > 2 and left and state["rank"] == 0:
        deaths.with_suffix(".new").write_text(str(left - 1))
        deaths.with_suffix(".new").replace(deaths)  # the other rank may read it at the same time
        os.kill(os.getpid(), signal.SIGKILL)
    return steady(state, given, steps, keep, record)


@pytest.mark.nightly("two studies that lose ranks")
def test_a_rank_lost_while_the_winner_is_compared(ray_session, tmp_path: Path) -> None:
    """If all finalists are lost twice, the tuner ends with one line. The next one continues, and compares again after a loss."""
    (tmp_path / "deaths").write_text("99")
    given = recipe(tmp_path, sampler="random", trials=6)
    with pytest.raises(RuntimeError, match=r"^all trials are done, but .* lost a worker.*; the same command tries it again$"):
        FoldTuner(given, tmp_path, measure_turn=killed_late).fit()
    (tmp_path / "deaths").write_text("1")
    outcome = FoldTuner(given, tmp_path, measure_turn=killed_late).fit()
    assert (tmp_path / "deaths").read_text() == "0"
    assert len(outcome.trials) == 6
    assert outcome.gain is not None
    assert outcome.gain.times == pytest.approx(4)


@pytest.mark.gate(1 / 3)
def test_trials_that_are_surely_slower_are_stopped(ray_session, tmp_path: Path) -> None:
    outcome = FoldTuner(recipe(tmp_path, sampler="random", trials=6, turns=4, prune=1.2), tmp_path, measure_turn=steady).fit()
    stopped = [each for each in outcome.trials if each.state.name == "PRUNED"]
    assert stopped
    assert all(len(each.record.steps_s) < 4 for each in stopped)
    assert outcome.best.ep == 2


def steady(state: dict[str, Any], given: dict[str, Any], steps: int, keep: int, record: bool) -> Turn:
    row = Setting.of(Recipe.parse(given))
    return Turn([0.5 if row.ep == 2 and row.etp == 1 else 2.0] * steps, peak=1)


def lucky(state: dict[str, Any], given: dict[str, Any], steps: int, keep: int, record: bool) -> Turn:
    """Return times that are short in a setting's trial and long afterwards."""
    row = Setting.of(Recipe.parse(given))
    state[row] = state.get(row, 0) + 1
    default = row.ep == 1 and row.kind == "sequential"
    return Turn([1.0 if default else 0.5 if state[row] <= 2 else 1.5] * steps, peak=1)


def roomy(state: dict[str, Any], given: dict[str, Any], steps: int, keep: int, record: bool) -> Turn:
    """Return times and memory such that the fast setting needs more memory than the slow one."""
    row = Setting.of(Recipe.parse(given))
    fast = row.ep == 2 and row.kind == "stream"
    slow = row.ep == 2 and row.kind == "sequential"
    return Turn([0.5 if fast else 4.0 if slow else 2.0] * steps, peak=(3 if fast else 1 if slow else 4) << 30)


@pytest.mark.nightly("another study on Ray")
def test_memory_may_be_an_objective_too(ray_session, tmp_path: Path) -> None:
    """The best setting is the fastest. The front also has a slow setting with less memory, which was not stopped early."""
    given = recipe(tmp_path, sampler="random", trials=50, prune=1.2, turns=3, second="memory")
    tuner = FoldTuner(given, tmp_path, measure_turn=roomy)
    outcome = tuner.fit()
    assert (outcome.best.ep, outcome.best.kind) == (2, "stream")
    assert {each.state.name for each in outcome.trials} == {"COMPLETE"}
    found = {(round(each.record.seconds, 6), each.record.peak_gib) for each in outcome.front}
    assert found == {(0.5, 3.0), (4.0, 1.0)}
    files = write_report(outcome, tuner.study, tmp_path / "report")
    assert files["front"].stat().st_size > 1000
    assert "at both time and memory" in files["report"].read_text()
    assert summary(outcome)["front"] == [each.number for each in outcome.front]
    with pytest.raises(UserError, match="study of another recipe"):
        FoldTuner(recipe(tmp_path, sampler="random", trials=50), tmp_path, measure_turn=roomy).fit()


@pytest.mark.nightly("another study on Ray")
def test_a_tuner_that_slept_too_long_goes_on(ray_session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tuner has released the trial meanwhile, so its measurement is dropped, and the study continues."""
    tuner = FoldTuner(recipe(tmp_path, sampler="random", trials=3), tmp_path, measure_turn=steady)
    measure, slept = tuner._measure, []

    def asleep(*given: Any) -> Any:
        found = measure(*given)
        if not slept:
            slept.append(True)
            running = tuner.study.get_trials(states=[TrialState.RUNNING])[0]
            write_trial(optuna.Trial(tuner.study, running._trial_id), TrialRecord(lost=True))
            tuner.study.tell(running.number, state=TrialState.FAIL)
        return found

    monkeypatch.setattr(tuner, "_measure", asleep)
    outcome = tuner.fit()
    assert [each.state.name for each in outcome.trials].count("COMPLETE") == 3
    assert len(outcome.trials) == 4


@pytest.mark.nightly("another study on Ray")
def test_luck_does_not_win(ray_session, tmp_path: Path) -> None:
    outcome = FoldTuner(recipe(tmp_path, sampler="random", trials=4), tmp_path, measure_turn=lucky).fit()
    assert outcome.best == outcome.table.default
    assert outcome.gain is None
    assert outcome.recipe == recipe(tmp_path, sampler="random", trials=4)


@pytest.mark.nightly("a study and a training")
def test_from_tune_to_train(ray_session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Run the command with real steps, and train its best recipe."""
    monkeypatch.chdir(tmp_path)
    given = recipe(tmp_path, trials=3, study="here").model_dump(mode="json", exclude_defaults=True)
    given["training"] = {"steps": 2, "global_batch": 4}
    Path("recipe.yaml").write_text(yaml.safe_dump(given))
    assert main(["tune", "recipe.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["trials"]) == 3
    assert all(each["state"] == "complete" for each in document["trials"])
    for path in document["files"].values():
        assert Path(path).stat().st_size > 100
    assert (tmp_path / "tune" / "here" / "timelines" / "trial-0.png").exists()

    from mlflow import MlflowClient

    client = MlflowClient(document["mlflow_uri"])
    runs = client.search_runs([client.get_experiment_by_name("foldray").experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
    assert (len(parents), len(children)) == (1, 3)
    assert all(run.info.status == "FINISHED" for run in runs)
    assert all(run.data.metrics["step_time_s"] > 0 for run in children)
    trials = optuna.load_study(study_name="here", storage=f"sqlite:///{tmp_path}/tune/here/tune.db").get_trials()
    ran = {(round(each.datetime_start.timestamp() * 1e3), round(each.datetime_complete.timestamp() * 1e3)) for each in trials}
    assert {(run.info.start_time, run.info.end_time) for run in children} == ran
    names = {each.path for each in client.list_artifacts(children[0].info.run_id)}
    assert "recipe.yaml" in names

    assert main(["train", document["files"]["best"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2

    assert main(["tune", "recipe.yaml", "--json"]) == 0, "a study that is done is told again"
    again = json.loads(capsys.readouterr().out)
    assert [each["number"] for each in again["trials"]] == [0, 1, 2]
    assert (again["best"], again["gain"]) == (document["best"], document["gain"])

    assert main(["tune", "recipe.yaml", "model.layers=3"]) == 2
    assert "tune.study=here: is a study of another recipe" in capsys.readouterr().err


@pytest.mark.nightly("a study with DeepSpeed")
def test_deepspeed_engines_take_turns(ray_session, tmp_path: Path) -> None:
    """With `beside=False`, each engine is closed before the next one starts, also that of the unchanged recipe."""
    space = {**SPACE, "kind": ["sequential", "one_a_one_m"], "degree": [1, 2]}
    given = recipe(tmp_path, trials=4, turns=1, pairs=2, beside=False, sampler="random", space=space)
    outcome = FoldTuner(given.model_copy(update={"engine": EngineSpec(kind="deepspeed")}), tmp_path).fit()
    assert [each.state.name for each in outcome.trials] == ["COMPLETE"] * 4
    assert {each.record.setting.split()[0] for each in outcome.trials} > {"EP2"}


def test_noise_decides_what_is_surely_slower() -> None:
    assert Measurement(ratios=[1.5]).is_surely_slower_than(1.0) is False, "one turn tells nothing about noise"
    assert Measurement(ratios=[1.5, 1.5]).is_surely_slower_than(1.35)
    assert not Measurement(ratios=[1.5, 1.5]).is_surely_slower_than(1.4), "two may agree by chance"
    assert Measurement(ratios=[1.5, 1.5, 1.5]).is_surely_slower_than(1.4)
    assert not Measurement(ratios=[1.1, 1.9]).is_surely_slower_than(1.0)


def test_sets_of_nodes_have_room_and_nothing_in_common() -> None:
    def node(name: str, cpus: float) -> dict[str, Any]:
        return {"NodeID": name, "Resources": {"CPU": cpus}}

    each = {"CPU": 1.0}
    assert disjoint_nodes(4, [node("a", 2), node("b", 2), node("c", 4), node("d", 1)], each, 9) == [["c"], ["a", "b"]]
    assert disjoint_nodes(4, [node("a", 2), node("b", 2)], each, 1) == [["a", "b"]]
    assert disjoint_nodes(4, [node("a", 2), node("b", 1)], each, 2) == []


@pytest.mark.parametrize(("limit", "fits"), [(None, True), (2.0, True), (1.5, False)])
def test_a_setting_beyond_the_memory_limit_may_not_win(tmp_path: Path, limit: float | None, fits: bool) -> None:
    tuner = FoldTuner(recipe(tmp_path, sampler="random", trials=2, memory_gib=limit), tmp_path)
    tuner._reference_s = 1.0
    trial = tuner.shared.claim_trial()
    assert trial is not None
    bench = SimpleNamespace(hosts=["host"], measure=lambda given: iter([Measurement([[1.0]], [0.5], 2 << 30)]))
    tuner._run_trial(bench, trial)
    (stored,) = tuner.shared.trials()
    assert stored.record.feasible is fits
    assert stored.record.reason == (None if fits else "memory: 2.00 GiB, 1.5 GiB are allowed")
    constraints = tuner.study.trials[0].constraints
    assert constraints == ({"runs": -1.0} if limit is None else {"runs": -1.0, "memory": 2.0 - limit})
    if fits:
        assert could_be_best([stored], default=-1) == [stored]
    else:
        with pytest.raises(RuntimeError, match=r"no setting could be measured: memory: 2\.00 GiB"):
            could_be_best([stored], default=-1)

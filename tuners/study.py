"""`FoldTuner`, which runs a study: from the table of legal settings to the winner and its gain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import optuna
import ray
from optuna.trial import FrozenTrial, TrialState

from foldray.costs.hardware import load_hardware
from foldray.errors import refuse_hidden
from foldray.recipe import Recipe
from trainers.cluster import joining
from trainers.cluster.actors import MEMORY, RankFailure
from trainers.measure.trial import measure_turn
from tuners.measure import Bench, Gain, Measurement, MeasureTurn, disjoint_nodes, measure_gain
from tuners.outcome import Outcome, Watcher
from tuners.predictions import Predictions, predict_rows
from tuners.record import StoredTrial, TrialRecord, write_constraints, write_trial
from tuners.shared_study import Heartbeat, SharedStudy
from tuners.space import Setting, Settings, apply_setting
from tuners.storage import study_folder, study_url

_GIB = 2**30


class FoldTuner:
    """Finds the fastest way to train a recipe on its cluster. The section `tune` of the recipe has the options.

    The ranks stay alive between settings, and every setting takes turns with the unchanged recipe. Several tuners on any
    machines may work on one study if they share its storage. The constructor reads and checks the input. It writes nothing.

    Args:
        folder: folder of the study's database, unless the recipe names a storage; None is that of `foldray tune`.
        measure_turn: the function that the ranks run; tests replace it.

    Raises:
        UserError: the recipe cannot be tuned, or its hardware cannot be read.
    """

    def __init__(self, recipe: Recipe, folder: str | Path | None = None, measure_turn: MeasureTurn = measure_turn):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.recipe, self._measure_turn = recipe, measure_turn
        self.url = study_url(recipe, study_folder(recipe) if folder is None else Path(folder).expanduser())
        refuse_hidden("tune.storage", self.url)
        self.hardware = load_hardware(recipe.tune.hardware, "tune.hardware") if recipe.tune.hardware else None
        self.table = Settings(recipe)
        self._watchers: Sequence[Watcher] = ()
        self._notifying = threading.Lock()  # trials on different nodes may end at the same time

    @cached_property
    def predictions(self) -> Predictions | None:
        total = len(self.table.rows)

        def notify(done: int) -> None:
            self._notify(lambda watcher: watcher.on_predicted(done, total))

        return predict_rows(self.table, self.hardware, notify) if self.hardware else None

    @cached_property
    def shared(self) -> SharedStudy:
        return SharedStudy(self.recipe, self.table, self.predictions, self.url)

    @property
    def study(self) -> optuna.Study:
        return self.shared.study

    def fit(self, watchers: Sequence[Watcher] = ()) -> Outcome:
        """Run trials until all are spent, then measure the winner beside the unchanged recipe once more.

        Raises:
            UserError: the study cannot be opened, or the recipe cannot run here.
            RuntimeError: the unchanged recipe could not be measured, no setting could be measured, or the winner could not
                be compared with the unchanged recipe.
        """
        self._watchers = watchers
        study = self.shared.study
        joining.connect(self.recipe, crowded=True)
        joining.check_room(self.recipe)
        self._notify(lambda watcher: watcher.on_study_start(study, self.shared.trials(), self.table, self.predictions))
        benches = [Bench(self.recipe, nodes, self._measure_turn) for nodes in self._choose_nodes()]
        try:
            self._reference_s = self.shared.reference_seconds(lambda: self._measure_reference(benches[0]))
            self._run_trials(benches)
            outcome = self._conclude(benches[0])
        finally:
            for bench in benches:
                bench.close()
        self._notify(lambda watcher: watcher.on_study_end(study, outcome))
        return outcome

    def _notify(self, event: Callable[[Watcher], None]) -> None:
        with self._notifying:
            for watcher in self._watchers:
                event(watcher)

    def _choose_nodes(self) -> list[list[str] | None]:
        """Return the node ids of every bench; None lets Ray choose the nodes."""
        most = self.recipe.tune.parallel
        if most == 1:
            return [None]
        alive = [node for node in ray.nodes() if node["Alive"]]
        return list(disjoint_nodes(self.recipe.cluster.workers, alive, joining.resources(self.recipe), most)) or [None]

    def _measure_reference(self, bench: Bench) -> float:
        try:
            return bench.measure_step(self.recipe)
        except RankFailure as failure:
            raise RuntimeError(f"the recipe as it stands could not be measured: {failure.reason}") from failure

    def _run_trials(self, benches: list[Bench]) -> None:
        """Run trials on all benches at once. After an error, no further trial starts, and the error is raised."""
        errors: list[BaseException] = []

        def work(bench: Bench) -> None:
            try:
                while not errors and (trial := self.shared.claim_trial()) is not None:
                    self._run_trial(bench, trial)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(bench,), daemon=True) for bench in benches[1:]]
        for thread in threads:
            thread.start()
        work(benches[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _run_trial(self, bench: Bench, trial: optuna.Trial) -> None:
        setting = self.table.row(trial.params)
        known = TrialRecord(setting=str(setting))
        if self.predictions is not None:
            known = TrialRecord(setting=str(setting), predicted_s=self.predictions.seconds[self.table.number[setting]])
        try:
            with Heartbeat(trial):
                write_trial(trial, known)
                ended = self.shared.read(self._measure_and_tell(bench, trial, setting))
        except optuna.exceptions.UpdateFinishedTrialError:
            return  # this tuner sent no heartbeat for so long (its machine slept) that another tuner released the trial
        self._notify(lambda watcher: watcher.on_trial_end(self.study, ended))

    def _measure_and_tell(self, bench: Bench, trial: optuna.Trial, setting: Setting) -> FrozenTrial:
        try:
            state, measurement = self._measure(bench, setting)
        except RankFailure as failure:
            write_trial(trial, TrialRecord(reason=failure.reason, feasible=False))
            write_constraints(trial, ran=False)
            return self.study.tell(trial, state=TrialState.FAIL)
        seconds, peak_gib = measurement.ratio * self._reference_s, measurement.peak_bytes / _GIB
        self._write_measurement(trial, measurement, seconds, peak_gib, bench.hosts)
        self._notify(lambda watcher: watcher.on_measured(trial, setting, measurement))
        if state == TrialState.PRUNED:
            trial.report(seconds, step=len(measurement.ratios))
            return self.study.tell(trial, state=state)
        return self.study.tell(trial, seconds if self.recipe.tune.second is None else [seconds, peak_gib])

    def _measure(self, bench: Bench, setting: Setting) -> tuple[TrialState, Measurement]:
        """Measure in turns, and stop early if the setting is surely `tune.prune` times slower than the best one."""
        spec, measurement = self.recipe.tune, Measurement()
        prune = None if spec.second else spec.prune  # a slow setting may be the one that needs least memory
        for measurement in bench.measure(apply_setting(self.recipe, setting)):
            best = self.shared.best_ratio()
            if prune and best and len(measurement.ratios) < spec.turns and measurement.is_surely_slower_than(best * prune):
                return TrialState.PRUNED, measurement
        return TrialState.COMPLETE, measurement

    def _write_measurement(
        self, trial: optuna.Trial, measurement: Measurement, seconds: float, peak_gib: float, hosts: Sequence[str]
    ) -> None:
        limit = self.recipe.tune.memory_gib
        excess_gib = None if limit is None else peak_gib - limit
        fits = excess_gib is None or excess_gib <= 0
        record = TrialRecord(
            hosts=tuple(hosts), seconds=seconds, ratio=measurement.ratio,
            ratio_half_interval=measurement.half_interval if len(measurement.ratios) > 1 else None, peak_gib=peak_gib,
            compute_ms=measurement.compute_ms, exposed_comm_ms=measurement.exposed_comm_ms, over_bound=measurement.over_bound(),
            steps_s=tuple(map(tuple, measurement.seconds)), feasible=fits,
        )  # fmt: skip
        write_trial(trial, record)
        if not fits:
            write_trial(trial, TrialRecord(reason=f"{MEMORY}: {peak_gib:.2f} GiB, {limit:g} GiB are allowed"))
        write_constraints(trial, ran=True, excess_gib=excess_gib)

    def _conclude(self, bench: Bench) -> Outcome:
        trials, default = self.shared.trials(), self.table.default
        best = _fastest(trials)
        assert best.row is not None
        assert best.record.seconds is not None
        setting, seconds = self.table.rows[best.row], best.record.seconds
        recipe = apply_setting(self.recipe, setting)
        gain = None
        if setting != default:
            gain = self.shared.gain(best.row, self.recipe.tune.pairs, lambda: self._measure_gain(bench, recipe))
        if gain is not None and gain.times <= 1:  # the setting was faster only in its trial, by chance
            recipe, setting, gain = self.recipe, default, None
        if gain is None:
            seconds = self._reference_s
        return Outcome(recipe, setting, seconds, self._reference_s, trials, gain, self.table, self.shared.front())

    def _measure_gain(self, bench: Bench, recipe: Recipe, retry: bool = True) -> Gain:
        """Compare the winner with the unchanged recipe. If a rank fails, try once more."""
        try:
            return measure_gain(bench, recipe, self.recipe.tune.pairs)
        except RankFailure as failure:
            if retry:
                return self._measure_gain(bench, recipe, retry=False)
            what = "all trials are done, but the winner could not be compared with the recipe as it stands"
            raise RuntimeError(f"{what}: {failure.reason}; the same command tries it again") from failure


def _fastest(trials: Sequence[StoredTrial]) -> StoredTrial:
    candidates = [
        trial for trial in trials if trial.state == TrialState.COMPLETE and trial.was_measured and trial.record.feasible
    ]
    if not candidates:
        reasons = {trial.record.reason for trial in trials if trial.state == TrialState.FAIL}
        raise RuntimeError(f"no setting could be measured: {'; '.join(sorted(filter(None, reasons)))[:500]}")
    return min(candidates, key=lambda trial: trial.record.seconds or 0.0)

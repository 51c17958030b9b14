"""`FoldTuner`, which runs a study: from the table of legal settings to the winner and its gain."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import optuna
import ray
from optuna.trial import FrozenTrial, TrialState

from foldray.costs.hardware import load_hardware
from foldray.errors import UserError, refuse_hidden
from foldray.recipe import Recipe
from trainers.cluster import joining
from trainers.cluster.actors import MEMORY, RankFailure
from trainers.measure.trial import measure_turn
from tuners.measure import Bench, Gain, Measurement, MeasureTurn, disjoint_nodes, measure_pairs
from tuners.outcome import Outcome, Watcher
from tuners.predictions import Predictions, predict_rows
from tuners.record import StoredTrial, TrialRecord, write_constraints, write_trial
from tuners.shared_study import Heartbeat, SharedStudy
from tuners.space import Setting, Settings, apply_setting
from tuners.storage import study_folder, study_url

AS_IT_STANDS = " (A/A: the recipe as it stands, beside itself)"
_GIB = 2**30
_MOST_FINALISTS = 8  # settings in the run-off; each takes as long as some trials


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
        """Run trials until all are spent, then measure what could be the best beside the unchanged recipe once more.

        Raises:
            UserError: the study cannot be opened, or the recipe cannot run here.
            RuntimeError: the unchanged recipe could not be measured, no setting could be measured, or none of those that could
                be the best could be compared with the unchanged recipe.
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
        told = f"{setting}{AS_IT_STANDS if setting == self.table.default else ''}"
        known = TrialRecord(setting=told)
        if self.predictions is not None:
            known = TrialRecord(setting=told, predicted_s=self.predictions.seconds[self.table.number[setting]])
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
            record = self._record(measurement, bench.hosts)
        except UserError:  # the cluster has no room; no other row would have
            raise
        except Exception as error:  # whatever it is, other rows may do
            bench.close()
            reason = error.reason if isinstance(error, RankFailure) else f"failed: {type(error).__name__}: {error}"[:200]
            write_trial(trial, TrialRecord(reason=" ".join(reason.split()), feasible=False))
            write_constraints(trial, ran=False)
            return self.study.tell(trial, state=TrialState.FAIL)
        write_trial(trial, record)
        limit = self.recipe.tune.memory_gib
        write_constraints(trial, ran=True, excess_gib=None if limit is None else (record.peak_gib or 0.0) - limit)
        self._notify(lambda watcher: watcher.on_measured(trial, setting, measurement))
        assert record.seconds is not None
        if state == TrialState.COMPLETE and record.feasible:
            seconds, second = record.seconds, self.recipe.tune.second
            return self.study.tell(trial, seconds if second is None else [seconds, record.peak_gib or 0.0])
        if self.recipe.tune.second is None:
            trial.report(record.seconds, step=len(measurement.ratios))
        return self.study.tell(trial, state=TrialState.PRUNED)  # so it is nobody's best trial

    def _measure(self, bench: Bench, setting: Setting) -> tuple[TrialState, Measurement]:
        """Measure in turns, and stop early if the setting is surely `tune.prune` times slower than the best one."""
        spec, measurement = self.recipe.tune, Measurement()
        prune = None if spec.second else spec.prune  # a slow setting may be the one that needs least memory
        for measurement in bench.measure(self._recipe_of(setting)):
            best = self.shared.best_ratio()
            if prune and best and len(measurement.ratios) < spec.turns and measurement.is_surely_slower_than(best * prune):
                return TrialState.PRUNED, measurement
        return TrialState.COMPLETE, measurement

    def _recipe_of(self, setting: Setting) -> Recipe:
        """Return the recipe with a setting; with its own one, the recipe as it stands."""
        return self.recipe if setting == self.table.default else apply_setting(self.recipe, setting)

    def _record(self, measurement: Measurement, hosts: Sequence[str]) -> TrialRecord:
        peak_gib, limit = measurement.peak_bytes / _GIB, self.recipe.tune.memory_gib
        fits = limit is None or peak_gib <= limit
        return TrialRecord(
            hosts=tuple(hosts), seconds=measurement.ratio * self._reference_s, ratio=measurement.ratio,
            ratio_half_interval=measurement.half_interval if len(measurement.ratios) > 1 else None, peak_gib=peak_gib,
            compute_ms=measurement.compute_ms, exposed_comm_ms=measurement.exposed_comm_ms, over_bound=measurement.over_bound(),
            steps_s=tuple(map(tuple, measurement.seconds)), feasible=fits,
            reason=None if fits else f"{MEMORY}: {peak_gib:.2f} GiB, {limit:g} GiB are allowed",
        )  # fmt: skip

    def _conclude(self, bench: Bench) -> Outcome:
        """Compare all settings that could be the best with the unchanged recipe. The fastest one wins, if it is surely faster."""
        trials = self.shared.trials()
        finalists = could_be_best(trials, self.table.number[self.table.default])
        run_off: list[tuple[StoredTrial, Gain | str]] = []
        best, gain = self.table.default, None
        for trial in finalists:
            assert trial.row is not None
            result = self._compare(bench, trial.row, len(finalists), gain.low if gain else 1.0)
            run_off.append((trial, result))
            if isinstance(result, Gain) and result.low > 1 and (gain is None or result.times > gain.times):
                best, gain = self.table.rows[trial.row], result
        reasons = [result for _, result in run_off if isinstance(result, str)]
        if reasons and len(reasons) == len(run_off):
            what = "all trials are done, but the winner could not be compared with the recipe as it stands"
            raise RuntimeError(f"{what}: {reasons[0]}; the same command tries it again")
        run_off.sort(key=lambda compared: -compared[1].times if isinstance(compared[1], Gain) else 0.0)
        seconds = self._reference_s / (gain.times if gain else 1.0)
        front = self.shared.front()
        return Outcome(self._recipe_of(best), best, seconds, self._reference_s, trials, gain, self.table, front, tuple(run_off))

    def _compare(self, bench: Bench, row: int, among: int, enough: float) -> Gain | str:
        """Compare a row with the unchanged recipe. If a rank fails, try once more, then return why."""
        pairs, recipe = self.recipe.tune.pairs, self._recipe_of(self.table.rows[row])

        def measure() -> list[float]:
            return measure_pairs(bench, recipe, pairs, among, enough)

        reason = ""
        for _ in range(2):
            try:
                return Gain.of(self.shared.pairs_of(row, pairs, measure), among)
            except RankFailure as failure:
                reason = failure.reason
        return reason


def could_be_best(trials: Sequence[StoredTrial], default: int) -> list[StoredTrial]:
    """Return the trials whose rows may be faster than all others and than the unchanged recipe, the fastest first.

    Their intervals go below the end of the fastest one's, and below 1. There are at most `_MOST_FINALISTS`.

    Args:
        default: the row of the unchanged recipe, with which the others are compared.
    """
    measured = [
        (trial.record.ratio, trial)
        for trial in trials
        if trial.state == TrialState.COMPLETE and trial.was_measured and trial.record.feasible and trial.record.ratio
    ]
    if not measured:
        reasons = {trial.record.reason for trial in trials if trial.record.reason and not trial.record.lost}
        raise RuntimeError(f"no setting could be measured: {'; '.join(sorted(filter(None, reasons)))[:500]}")
    measured.sort(key=lambda pair: pair[0])
    ratio, fastest = measured[0]
    limit = min(1.0, ratio + _half(fastest))
    possible = [trial for ratio, trial in measured if trial.row != default and ratio - _half(trial) <= limit]
    return possible[:_MOST_FINALISTS]


def _half(trial: StoredTrial) -> float:
    half = trial.record.ratio_half_interval
    return math.inf if half is None else half

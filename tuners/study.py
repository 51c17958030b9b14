"""`FoldTuner`: a study of how to train a recipe, from the table of legal settings to the best one."""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import ray
from optuna.trial import FrozenTrial, TrialState

from foldray.errors import UserError
from foldray.planner.costs import OpWork
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware, load_hardware
from foldray.planner.memo import Memo
from foldray.planner.memory import ledger
from foldray.planner.prediction import Step
from foldray.planner.whole import whole_seconds
from foldray.recipe import Recipe
from trainers.cluster import joining
from trainers.cluster.actors import MEMORY, RankFailure
from trainers.measure.trial import turn
from tuners.measure import Bench, Measured, TakeTurn, nodes_apart
from tuners.sampler import LOST, REASON, TableSampler
from tuners.space import Setting, Settings, candidate, changed
from tuners.storage import Alive, claim, give_back, open_storage
from tuners.storage import turn as alone

_WHOLE = 500  # rows up to which every op of each is simulated; above, blocks are put together
_SPACE, _REFERENCE = "space", "reference_s"
_METRIC, _SECOND = "step time (s)", "memory (GiB)"  # what is minimised, as dashboards name it


class Predictions(NamedTuple):
    """Of every row: seconds of a step, and bytes of the fullest rank."""

    seconds: list[float]
    held: list[float]


@dataclass(frozen=True)
class Gain:
    """The winner beside the recipe as it stands, measured once more, taking turns.

    Args:
        times: how many times as fast, the median of neighbouring pairs.
        low, high: its 95 % interval, by resampling the pairs.
    """

    times: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Outcome:
    """What a study found.

    Args:
        best: the fastest setting that fits.
        seconds: of its step, in the reference's terms.
        trials: everything that was tried, in order.
        gain: None where the best is the recipe as it stands, or nothing kept its lead over it.
        front: trials that none beats at both time and memory, fastest first; empty where memory was no objective.
    """

    recipe: Recipe
    best: Setting
    seconds: float
    trials: list[FrozenTrial]
    gain: Gain | None
    table: Settings
    front: tuple[FrozenTrial, ...] = ()


class Watcher:
    """Is told what happens; does nothing."""

    def started(self, study: optuna.Study, table: Settings, predictions: Predictions | None) -> None: ...

    def measured(self, trial: optuna.Trial, setting: Setting, found: Measured) -> None: ...

    def finished(self, study: optuna.Study, trial: FrozenTrial) -> None: ...

    def ended(self, study: optuna.Study, outcome: Outcome) -> None: ...


class FoldTuner:
    """Finds the fastest way to train a recipe on its cluster (`Recipe.tune` says how).

    Settings are measured on ranks that stay, each beside the recipe as it stands. Several tuners, on any machines, may work on
    one study: they share its storage.

    Args:
        watchers: are told of every trial.
        take: what ranks run; tests have theirs.
        folder: where the study's database is, unless the recipe names one.

    Raises:
        UserError: the recipe cannot be tuned here.
    """

    def __init__(self, recipe: Recipe, folder: Path, watchers: tuple[Watcher, ...] = (), take: TakeTurn = turn):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.recipe, self._watchers, self._take = recipe, watchers, take
        self._telling = threading.Lock()  # of watchers: trials on other nodes end at the same time
        self.table = Settings(recipe)
        self.hardware = load_hardware(recipe.tune.hardware) if recipe.tune.hardware else None
        self.predictions = predictions(self.table, self.hardware) if self.hardware else None
        self.url = recipe.tune.storage or f"sqlite:///{folder.absolute()}/tune.db"
        self._storage = open_storage(self.url)
        spec = recipe.tune
        held = self.predictions.held if self.predictions else None
        seconds = self.predictions.seconds if self.predictions else None
        sampler = TableSampler(self.table, spec.sampler, spec.seed, seconds, held, both=spec.second is not None)
        metrics = [_METRIC] if spec.second is None else [_METRIC, _SECOND]
        with self._alone():
            self.study = optuna.create_study(
                storage=self._storage, study_name=spec.study, sampler=sampler, load_if_exists=True,
                directions=["minimize"] * len(metrics),
            )  # fmt: skip
            self._begin()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study.set_metric_names(metrics)

    def fit(self) -> Outcome:
        """Measure until all trials are spent; then the winner against the recipe as it stands.

        Raises:
            UserError: the recipe cannot run here.
            RuntimeError: the recipe as it stands could not be measured, or no trial, or not the winner beside the recipe.
        """
        joining.connect(self.recipe, crowded=True)
        joining.check_room(self.recipe)
        for watcher in self._watchers:
            watcher.started(self.study, self.table, self.predictions)
        benches = [Bench(self.recipe, nodes, self._take) for nodes in self._nodes()]
        try:
            self._reference_s = self._reference(benches[0])
            self._all(benches)
            outcome = self._outcome(benches[0])
        finally:
            for bench in benches:
                bench.close()
        for watcher in self._watchers:
            watcher.ended(self.study, outcome)
        return outcome

    # Beginning.

    def _begin(self) -> None:
        """A new study gets its first trials; one that is there must be about the same."""
        told = _fingerprint(self.table, self.recipe.tune.second)
        known = self.study.user_attrs.get(_SPACE)
        if known not in (None, told):
            rule = "is a study of another recipe or another space; choose another name"
            raise UserError("tune.study", self.recipe.tune.study, rule)
        if known is not None:
            return
        self.study.set_user_attr(_SPACE, told)
        own = self.table.default
        if own in self.table.number and self.predictions is None:
            self.study.enqueue_trial(self.table.params(own), skip_if_exists=True)
        if self.predictions is not None and self.recipe.tune.sampler != "random":
            seconds = self.predictions.seconds
            for number in sorted(range(len(seconds)), key=seconds.__getitem__)[
                : min(self.recipe.tune.starts, self.recipe.tune.trials)
            ]:
                self.study.enqueue_trial(self.table.params(self.table.rows[number]), skip_if_exists=True)

    def _reference(self, bench: Bench) -> float:
        """Seconds of a step of the recipe as it stands, measured once for all tuners."""
        with self._alone():
            known = self.study.user_attrs.get(_REFERENCE)
            if known is None:
                try:
                    known = bench.step_seconds(self.recipe)
                except RankFailure as failure:
                    raise RuntimeError(f"the recipe as it stands could not be measured: {failure.reason}") from failure
                self.study.set_user_attr(_REFERENCE, known)
        return float(known)

    def _nodes(self) -> list[list[str] | None]:
        spec = self.recipe.cluster
        if self.recipe.tune.parallel == 1:
            return [None]
        each = {"CPU": float(spec.cpus_per_worker), **({"GPU": 1.0} if spec.gpu else {})}
        alive = [node for node in ray.nodes() if node["Alive"]]
        return list(nodes_apart(spec.workers, alive, each, self.recipe.tune.parallel)) or [None]

    # Trials.

    def _all(self, benches: list[Bench]) -> None:
        failures: list[BaseException] = []

        def work(bench: Bench) -> None:
            try:
                while not failures and (trial := self._ask()) is not None:
                    self._run(bench, trial)
            except BaseException as error:
                failures.append(error)

        others = [threading.Thread(target=work, args=(bench,), daemon=True) for bench in benches[1:]]
        for thread in others:
            thread.start()
        work(benches[0])
        for thread in others:
            thread.join()
        if failures:
            raise failures[0]

    def _alone(self) -> Any:
        return alone(self.url, self.recipe.tune.study)

    def _ask(self) -> optuna.Trial | None:
        """The next trial; None when all are spent, or no row is left."""
        with self._alone():
            give_back(self.study)
            trials = self.study.get_trials(deepcopy=False)
            counted = [each for each in trials if each.state != TrialState.WAITING and not each.user_attrs.get(LOST)]
            sampler = self.study.sampler
            assert isinstance(sampler, TableSampler)
            if len(counted) >= self.recipe.tune.trials or not sampler.free(counted):
                return None
            trial = self.study.ask(self.table.distributions)
            claim(trial)
        return trial

    def _run(self, bench: Bench, trial: optuna.Trial) -> None:
        setting = self.table.row(trial.params)
        trial.set_user_attr("setting", str(setting))
        if self.predictions is not None:
            trial.set_user_attr("predicted_s", self.predictions.seconds[self.table.number[setting]])
        try:
            with Alive(trial):
                told = self._measured(bench, trial, setting)
        except optuna.exceptions.UpdateFinishedTrialError:  # silent for so long (asleep, say) that others gave its row back
            return
        with self._telling:
            for watcher in self._watchers:
                watcher.finished(self.study, told)

    def _measured(self, bench: Bench, trial: optuna.Trial, setting: Setting) -> FrozenTrial:
        try:
            state, found = self._measure(bench, setting)
        except RankFailure as failure:
            trial.set_user_attr(REASON, failure.reason)
            trial.set_user_attr("feasible", False)
            trial.set_constraint("runs", 1.0)
            return self.study.tell(trial, state=TrialState.FAIL)
        trial.set_user_attr("hosts", bench.hosts)
        return self._tell(trial, setting, state, found)

    def _measure(self, bench: Bench, setting: Setting) -> tuple[TrialState, Measured]:
        """Turn by turn, until it is known well enough that it cannot be the best."""
        spec, found = self.recipe.tune, Measured()
        prune = None if spec.second else spec.prune  # what is slow may yet be the one that needs least
        for found in bench.turns(changed(self.recipe, setting)):
            best = self._best_ratio()
            if prune and best and len(found.ratios) < spec.turns and found.surely_slower_than(best * prune):
                return TrialState.PRUNED, found
        return TrialState.COMPLETE, found

    def _best_ratio(self) -> float | None:
        ratios = [each.user_attrs["ratio"] for each in self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])]
        return min(ratios, default=None)

    def _tell(self, trial: optuna.Trial, setting: Setting, state: TrialState, found: Measured) -> FrozenTrial:
        seconds, limit = found.ratio * self._reference_s, self.recipe.tune.memory_gib
        room = found.peak / 2**30 - limit if limit is not None else -1.0
        attributes = {
            "seconds": seconds, "ratio": found.ratio, "ratio_half_interval": found.interval if len(found.ratios) > 1 else None,
            "peak_gib": found.peak / 2**30, "compute_ms": found.compute, "exposed_comm_ms": found.exposed,
            "steps_s": found.seconds, "feasible": room <= 0,
        }  # fmt: skip
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        trial.set_constraint("runs", -1.0)
        if limit is not None:
            trial.set_constraint("memory", room)
            if room > 0:
                trial.set_user_attr(REASON, f"{MEMORY}: {found.peak / 2**30:.2f} GiB, {limit:g} GiB are allowed")
        with self._telling:
            for watcher in self._watchers:
                watcher.measured(trial, setting, found)
        if state == TrialState.PRUNED:
            trial.report(seconds, step=len(found.ratios))
            return self.study.tell(trial, state=state)
        return self.study.tell(trial, seconds if self.recipe.tune.second is None else [seconds, found.peak / 2**30])

    # The end.

    def _outcome(self, bench: Bench) -> Outcome:
        trials = self.study.get_trials(deepcopy=False)
        done = [each for each in trials if each.state == TrialState.COMPLETE and each.user_attrs.get("feasible")]
        if not done:
            reasons = {str(each.user_attrs.get(REASON, "")) for each in trials if each.state == TrialState.FAIL}
            raise RuntimeError(f"no setting could be measured: {'; '.join(sorted(filter(None, reasons)))[:500]}")
        best = min(done, key=lambda each: each.user_attrs["seconds"])
        setting, default = self.table.row(best.params), self.table.default
        recipe = changed(self.recipe, setting)
        gain = None if setting == default else self._gain(bench, recipe)
        if gain is not None and gain.times <= 1:  # what looked fast was luck
            recipe, setting, gain = self.recipe, default, None
        seconds = self._reference_s if gain is None else best.user_attrs["seconds"]
        return Outcome(recipe, setting, seconds, trials, gain, self.table, self._front())

    def _gain(self, bench: Bench, recipe: Recipe, again: bool = True) -> Gain:
        """The winner beside the recipe as it stands; where a rank is lost meanwhile, once more."""
        try:
            return compared(bench, recipe, self.recipe.tune.pairs)
        except RankFailure as failure:
            if again:
                return self._gain(bench, recipe, again=False)
            what = "all trials are done, but the winner could not be compared with the recipe as it stands"
            raise RuntimeError(f"{what}: {failure.reason}; the same command tries it again") from failure

    def _front(self) -> tuple[FrozenTrial, ...]:
        if self.recipe.tune.second is None:
            return ()
        found = [each for each in self.study.best_trials if each.user_attrs.get("feasible")]
        return tuple(sorted(found, key=lambda each: each.user_attrs["seconds"]))


def compared(bench: Bench, recipe: Recipe, pairs: int, seed: int = 0) -> Gain:
    """How many times as fast a recipe is as the reference, in so many alternating pairs."""
    import numpy as np

    times: list[float] = []
    for _ in range(pairs + 1):
        times += [bench.step_seconds(bench.reference), bench.step_seconds(recipe)]
    ratios = [before / after for before, after in list(pairwise(times))[::2]][1:]
    drawn = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return Gain(statistics.median(ratios), float(low), float(high), len(ratios))


def predictions(table: Settings, hardware: Hardware) -> Predictions:
    """Every row's step and memory, as the planner has them."""
    seconds, held = [], []
    memo = Memo()
    for row in table.rows:
        each = candidate(changed(table.recipe, row))
        device = Device.of(each.job, hardware)
        work = OpWork(each, device, memo=memo)
        seconds.append(whole_seconds(each, work) if len(table.rows) <= _WHOLE else Step(each, work).prediction().seconds)
        held.append(ledger(each, work.rank).total)
    return Predictions(seconds, held)


def _fingerprint(table: Settings, second: str | None) -> str:
    """Of what a study is about: the recipe but for how it is searched, the table, and what is to be small."""
    about = table.recipe.model_dump(mode="json", exclude={"tune", "name", "tracking", "cluster"})
    return hashlib.sha256(json.dumps([about, table.rows, *([second] if second else [])]).encode()).hexdigest()[:16]

"""The training loop of a worker: it builds its engine, loads a checkpoint, trains, validates, saves and sends records."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, cast

import numpy as np
import ray
import ray.train
import torch
from ray.train.v2._internal.execution.context import get_train_context as get_internal_train_context

from foldray.blueprint import step_flops
from foldray.comm import APART, TRAFFIC, Activity, Count, Groups, nccl, probe
from foldray.costs.candidate import DTYPES as SHORT_DTYPES
from foldray.costs.hardware import data_sheet_peak
from foldray.kernels.transfer import move
from foldray.model import IGNORED, Batch, Losses, all_losses
from foldray.recipe import Recipe
from foldray.runtime import Engine, learning_rate
from foldray.runtime.peak import matmul_peak, processor
from trainers.checkpoints.reading import time_for
from trainers.checkpoints.saver import Saver
from trainers.checkpoints.stored import Found
from trainers.data.mixture import Mixture, opened
from trainers.data.packed import Batches, PackedData, Sequences, Split
from trainers.faults.causes import AFTER, Preempted
from trainers.faults.guard import Guard, Spikes
from trainers.faults.lease import check_holder
from trainers.faults.watch import Pulse
from trainers.folders import Folder
from trainers.routes.files import About
from trainers.telemetry.energy import Energy
from trainers.telemetry.expert_health import Health
from trainers.telemetry.mailbox import Outbox
from trainers.telemetry.metrics import Finished, Totals, metrics_of, reported
from trainers.telemetry.records import Measured, Step, Validation, averaged, number, validated
from trainers.worker import ground
from trainers.worker.engines import DTYPES, make_engine, read_adapter, read_weights
from trainers.worker.online import Knobs, MakeSearch
from trainers.worker.orders import online_search
from trainers.worker.placing import ExpertPlacing
from trainers.worker.routes import StepRoutes
from trainers.worker.seat import check_node, nodes, place_of

_LONGER = 1.5  # a rank that stands still ends itself after those that wait for it
_BUILDING_S = 3600.0  # a rank ends itself if it needs longer to read the index of its data and to build its model and engine
_EVALUATED = 8  # micro-batches in one evaluation, for each pipeline position


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Run the training loop; Ray calls this on every worker. If the checkpoint cannot be read, all ranks raise DamagedCheckpoint.

    The configuration has the recipes by number of workers, as dictionaries, the folder of packed data, the queue for records, the
    holder of the run's lease, and optionally a search, the checkpoint to start from, and whether steps and data begin anew.
    """
    recipe = Recipe.parse(config["recipes"][ray.train.get_context().get_world_size()])
    torch.set_num_threads(recipe.cluster.cpus_per_worker)
    rank, activity, outbox = ray.train.get_context().get_world_rank(), Activity(), Outbox(config["queue"])
    beats = Outbox(config["queue"], limit=1)
    try:
        with Pulse(rank, activity, beats, _LONGER * recipe.cluster.timeout) as pulse:
            with activity.during("building", _BUILDING_S):
                data = opened(config["data"], list(recipe.data.parts))
                start = config.get("start"), config.get("anew", False)
                worker = Worker(recipe, data, outbox, activity, config["holder"], config.get("search"), *start)
            pulse.trains()
            try:
                return worker.run(pulse)
            except Exception as error:
                if worker.done is not None:
                    error.add_note(f"{AFTER}{worker.done}")
                raise
    finally:
        outbox.flush()


class Worker:
    """One rank of a training.

    Args:
        holder: the driver of this training, as the run's lease names it.
        search: makes the search for degrees and sizes of chunks; None searches nothing.
        start: a checkpoint of another run. The training starts from it if this run has no checkpoint.
        anew: whether it takes only weights and optimizer from there, and begins at step 0.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: PackedData | Mixture,
        outbox: Outbox,
        activity: Activity,
        holder: str,
        search: MakeSearch | None = None,
        start: ray.train.Checkpoint | None = None,
        anew: bool = False,
    ):
        self.recipe, self.data, self.outbox, self.activity = recipe, data, outbox, activity
        self.start, self.anew = start, anew
        self.batches = Batches(data.train, recipe.training.seed)
        self.rank = ray.train.get_context().get_world_rank()
        self.device = ray.train.torch.get_device() if recipe.cluster.gpu else torch.device("cpu")
        timeout = timedelta(seconds=recipe.cluster.timeout)
        nccl.take_adapters(recipe.adapters[self.rank])
        self.groups = Groups.create(recipe.placed_fold, self.rank, timeout, nodes().__getitem__, activity)
        check_node(recipe.labels[self.rank])
        self.outbox.send(place_of(self.groups))
        probe(self.groups, self.device, DTYPES[recipe.precision])
        self.engine: Engine = make_engine(recipe, self.groups, self.device)
        self.guard = Guard(self.engine, self.groups, recipe.model, recipe.training.skip_steps)
        storage = ray.train.get_context().get_storage()
        self.folder = Folder(storage.experiment_fs_path, storage.storage_filesystem)
        check = partial(check_holder, self.folder, holder)
        self.saver = Saver(recipe.checkpoint.asynchronous, time_for(self._largest_state()), check)
        self.products = self._all_ranks(matmul_peak(self.device, DTYPES[recipe.precision]))
        peak = data_sheet_peak(processor(self.device), SHORT_DTYPES[recipe.precision])
        self.peak = self._all_ranks(math.nan if peak is None else peak)  # not a number if a rank's device is not known
        self.flops = step_flops(recipe.model, recipe.data.seq_len, recipe.training.global_batch)
        self.spikes, self.metrics = Spikes(), metrics_of(recipe)
        self.energy = Energy(self.groups.control, self.device)
        self.validation: dict[str, Any] = {}
        self.last: Step
        self.done: int | None = None  # finished steps, once the state to start from is there
        self.search, self.online = online_search(recipe, self.engine.execution, self.device, search, lambda: self.done or 0)
        # The result of a search holds only for these settings on these machines. Otherwise training searches again.
        self.ground = {
            **ground.settings(recipe), "machines": ground.machines(self.device, self.groups.control),
            "orders": list(self.online.names),
        }  # fmt: skip
        self.speeds = {"products": self.products, "link": ground.link_rate(self.groups, self.device)}

    def run(self, pulse: Pulse) -> dict[str, Any]:
        """Train to the last step of the recipe, and return a summary. Ray returns the summary of rank 0."""
        training = self.recipe.training
        first, last = self._restore(), training.stop_after or training.steps
        about = About.of(self.recipe, self.batches.version, self.data.content)
        self.routes = StepRoutes(self.recipe, self.groups, self.engine.execution, self.folder, about)
        self.placing = ExpertPlacing(self.recipe, self.groups, self.engine, self.outbox.send)
        totals, done = None, first
        self.done = done
        online = self.online.steps(self.search, self.outbox.send)
        next(online, None)
        for step in range(first, last):
            started = time.perf_counter()
            totals = self._step(step, pulse.stops)
            self.done = done = step + 1
            with suppress(StopIteration):
                online.send(time.perf_counter() - started)
            final = done == last or totals.stops or totals.preempted
            due = done == last or (training.eval_every and done % training.eval_every == 0)
            if due and not totals.preempted:  # a node that is taken back has no time for it
                with self.energy.paused():
                    self._validate(done)
            if final or (self.recipe.checkpoint.every and done % self.recipe.checkpoint.every == 0):
                with self.energy.paused():
                    self._save(done, final)
            if totals.preempted and done < last:
                raise Preempted(f"the cluster takes back a node; step {done} is saved")
            if totals.stops:
                break
        self.routes.close()
        loss = totals.language if totals else math.nan
        return {"steps": done, "final_loss": loss, "validation": self.validation, "stopped": done < last}

    def _step(self, step: int, stops: bool) -> Totals:
        """Run one step, numbered from 0. `stops` says whether this rank has been asked to stop."""
        started, training = time.perf_counter(), self.recipe.training
        self.groups.traffic.clear()
        self.activity.doing = "reads its sequences"
        self.routes.begin(step + 1)
        losses = self.engine.train([self._train_batch(step, m) for m in range(self.recipe.accumulation)])
        joules = self.energy.taken()  # until here from here in the step before; a GPU still computes what it has been given
        rate = learning_rate(self.recipe.optimizer, step, training.steps)
        self.activity.doing = "updates weights"
        self.saver.settle()
        norms = self.guard.update(step + 1, rate)
        totals = self._totals(losses, joules, stops)
        if self.guard.in_a_row:
            self.engine.model.forget_margins()
        else:
            self.engine.model.update_biases(totals.count_ME)
        self.placing.after(step + 1, totals.count_ME)
        self.routes.record(step + 1, losses)
        self.last = self._record(step + 1, totals, rate, norms.total, time.perf_counter() - started)
        self._tell_saved()
        if self.rank == 0:
            self.outbox.send(self.last, urgent=False)  # sending takes the time of a small kernel or two
            if (median := self.spikes.look(totals.language)) is not None:
                self.outbox.send({"kind": "spiked", "step": step + 1, "loss": totals.language, "median": median})
        return totals

    def _train_batch(self, step: int, m: int) -> Batch:
        """Make a step's micro-batch m. It is the same on all ranks of a data-parallel place."""
        if not self.groups.owns_tokens:
            return self._no_sequences
        training, dp = self.recipe.training, self.groups.fold.dp
        indices = self.batches.indices(step, m, self.groups.dp_rank, dp, training.micro_batch, training.global_batch)
        batch = batch_of(self.data.train, indices, self.recipe.data.mask_documents, self.device)
        return self.routes.replayed(step + 1, m, batch)

    @property
    def _no_sequences(self) -> Batch:
        """The micro-batch of a rank that owns only experts."""
        return Batch.empty(self.recipe.data.seq_len, self.device)

    def _record(self, done: int, totals: Totals, rate: float, norm: float, seconds: float) -> Step:
        moe, trained = totals.count_ME.numel() > 0, not self.guard.in_a_row
        # The counts are on the host already, because biases of experts need them.
        health = Health.of([totals.count_ME.numpy()], self.recipe.placed_fold.ep) if moe else None
        finished = Finished(
            self.recipe, totals, rate, norm, seconds, trained, self.guard.skipped, self.flops, self.peak, self.products, health,
            copying.last if (copying := self.engine.execution.copying) is not None else None,
        )  # fmt: skip
        record = {
            "kind": "step", "step": done, **{metric.name: metric.measure(finished) for metric in self.metrics},
            "load": totals.count_ME.tolist() if moe else None, "by_layer": health.by_layer() if health else None,
            "traffic": {name: asdict(count) for name, count in totals.traffic.items() if count.calls},
        }  # fmt: skip
        return cast(Step, record)

    def _validate(self, done: int) -> None:
        """Measure the loss on the first validation sequences of every source, and average it by the sources' weights."""
        parts = {name: self._measure(part.validation) for name, part in self.data.parts.items()}
        whole = averaged(list(parts.values()), self.data.weights)
        record: Validation = {
            "kind": "validation", "step": done, "loss": number(whole["loss"]), "bits_per_byte": whole["bits_per_byte"],
            "sequences": whole["sequences"],
        }  # fmt: skip
        if isinstance(self.data, Mixture):
            record["sources"] = parts
        self.validation = dict(record)
        if self.rank == 0:
            self.outbox.send(record)

    def _measure(self, split: Split) -> Measured:
        """Measure the loss on the first sequences of a split.

        Every rank runs the same number of micro-batches, because ranks of different data-parallel places share all-to-alls.
        """
        size, fold = self.recipe.training.micro_batch, self.groups.fold
        count = min(len(split), self.recipe.training.eval_sequences or len(split))
        passes, most, losses = range(math.ceil(count / (fold.dp * size))), _EVALUATED * fold.positions, list[Losses]()
        for first in range(0, len(passes), most):
            batches = [self._validation_batch(split, m, size, count) for m in passes[first : first + most]]
            losses += self.engine.execution.evaluate(batches)
        loss = float(all_losses(losses, self.groups.control).means()[0])
        length = None if split.masked else split.bytes(count) / (count * split.seq_len)
        return {"loss": loss, "bits_per_byte": length and loss / math.log(2) / length, "sequences": count}

    def _validation_batch(self, split: Split, m: int, size: int, count: int) -> Batch:
        """Make micro-batch m of this rank's data-parallel place, of the first `count` sequences of a split."""
        if not self.groups.owns_tokens:
            return self._no_sequences
        start = (m * self.groups.fold.dp + self.groups.dp_rank) * size
        indices = range(start, min(count, start + size))
        return batch_of(split, indices, self.recipe.data.mask_documents, self.device)

    def _save(self, done: int, final: bool) -> None:
        fold, training = self.recipe.fold.model_dump(), self.recipe.training
        fold["placement"] = self.recipe.placement and self.recipe.placement.model_dump()
        online = {"on": self.ground, "speeds": self.speeds, "chosen": self.online.chosen, "seconds": self.online.seconds}
        progress = {
            "step": done, "data": self.data.folder.name, "content": self.data.content, "fold": fold,
            "validation": self.validation, "seed": training.seed, "global_batch": training.global_batch,
            "order": self.batches.version, "skipped": self.guard.skipped, "online": online,
        }  # fmt: skip
        self.routes.flush()
        with self.activity.during("saves a checkpoint", self.saver.limit.total_seconds()):
            metrics = reported(self.last, self.metrics) | validated(done, self.validation)
            self.saver.save(self.engine.shards(), progress, metrics, last=final)
            if final:  # Ray ends all ranks once one of them raises, so none may be first
                self.saver.meet()
        self._tell_saved()

    def _tell_saved(self) -> None:
        """Send a record of every checkpoint that has been written by now."""
        while self.saver.written:
            step, path = self.saver.written.popleft()
            if self.rank == 0:
                self.outbox.send({"kind": "checkpoint", "step": step, "path": path})

    def _restore(self) -> int:
        """Load the checkpoint, if there is one, and return the number of finished steps.

        A training that begins anew with other data has finished none. Its weights and moments are those of the checkpoint.
        """
        newest = ray.train.get_checkpoint()  # of this run
        checkpoint, training = newest or self.start, self.recipe.training
        if training.weights is not None and (checkpoint is None or self.recipe.model.adapter is not None):
            with self.activity.during("loads weights", self.saver.limit.total_seconds()):
                read_weights(self.engine, self.recipe)
                if training.adapter is not None and checkpoint is None:
                    read_adapter(self.engine, self.recipe)
                self.saver.meet()  # ranks that have read wait longer here than in the engine's groups
                self.engine.load_shards()
        if checkpoint is None:
            return 0
        from trainers.checkpoints import tensors  # takes most of a second

        opening = self.activity.during("opens a checkpoint", self.saver.limit.total_seconds())
        with opening, tensors.opened(checkpoint, self.saver.group) as stored:
            during = partial(self.activity.during, "loads a checkpoint")
            tensors.load(stored, self.engine.shards(), self.saver.group, during)
            self.engine.load_shards()
        self._recall(stored.progress.online)
        if newest is None and self.anew:
            return 0
        step = stored.progress.step
        self.validation, self.guard.skipped = stored.progress.validation, stored.progress.skipped
        self.batches = Batches(self.data.train, self.recipe.training.seed, stored.progress.order)
        if self.rank == 0:
            self.outbox.send({"kind": "resumed", "step": step})
        return step

    def _recall(self, earlier: Found | None) -> None:
        """Take over the choice of an earlier search, if it holds for these settings and machines."""
        if self.search is None or earlier is None or earlier.chosen is None:
            return
        knobs, holds = Knobs(*earlier.chosen), earlier.on == self.ground and ground.alike(self.speeds, earlier.speeds)
        # The first rank decides, because speeds could differ between ranks by rounding.
        (agreed,) = self.groups.control.all_gather(torch.tensor([holds], device=self.device))[:1].tolist()
        if agreed and knobs.order in self.online.orderings and bool(knobs.sp_bytes) == self.online.sizes:
            self.online.choose(knobs, earlier.seconds)

    def _totals(self, losses: list[Losses], joules: float, stops: bool) -> Totals:
        """Return the means and sums over ranks and micro-batches."""
        by_name = self.groups.traffic.by_name()
        names = {**TRAFFIC, **APART} if self.groups.fold.disjoint else TRAFFIC
        counts = [by_name.get(name, Count()) for name in names]
        rows = [(count.calls, count.inside_bytes, count.across_bytes) for count in counts] + [(stops, _is_preempted(), joules)]
        sent = torch.tensor(rows, dtype=torch.float64, device=self.device)
        total = all_losses(losses, self.groups.control, sent)
        *sums, (stop, preempted, joules) = sent.tolist()
        traffic = {name: Count(*map(int, row)) for name, row in zip(names, sums, strict=True)}
        language, balance, z = total.means().tolist()
        tokens, dropped, count_ME = int(total.tokens), float(total.dropped), total.count_ME.cpu()
        replaced = float(total.replaced)
        further = float(total.further()) if self.recipe.model.mtp_depth else None
        return Totals(
            tokens, language, balance, z, further, dropped, replaced, count_ME, traffic, joules, stop > 0, preempted > 0
        )

    def _largest_state(self) -> float:
        """Return the bytes of the largest state of a rank, with two numbers for every weight, if nothing is sharded."""
        size = sum(3 * parameter.numel() * max(parameter.element_size(), 4) for parameter in self.engine.model.parameters())
        return float(self.groups.control.all_reduce(torch.tensor(size, dtype=torch.float64, device=self.device), "max"))

    def _all_ranks(self, value: float) -> float:
        return float(self.groups.control.all_reduce(torch.tensor(value, dtype=torch.float64, device=self.device)))


def _is_preempted() -> bool:
    """Whether Ray has told this worker that the cluster takes back a node of the workers."""
    return get_internal_train_context().preemption_context.preemption_info is not None


def batch_of(split: Sequences, indices: Sequence[int] | np.ndarray, documents: bool, device: torch.device) -> Batch:
    """Make a batch of these sequences: inputs, and targets, of which those that do not count are ignored.

    There may be no sequences. `documents` says whether attention stops at the boundaries of documents.
    """
    tokens = move(split.tokens(indices), device)
    targets = tokens[:, 1:]
    if split.masked:
        targets = targets.masked_fill(~move(split.trained(indices), device), IGNORED)
    return Batch(tokens[:, :-1], targets, move(split.segments(indices), device) if documents else None)

"""Recorded routes, read without trust."""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from pydantic import TypeAdapter

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.folders import UNREACHED, DamagedFile, Folder, read_json
from trainers.routes.files import ABOUT, FOLDER, About, FileName

_MOST_FILES, _MOST_BYTES = 1 << 20, 1 << 30  # of a run; of an array
_SAMPLED = 256
_SAME = {
    "layers": "model.moe_every, or another number of blocks", "experts": "model.experts", "topk": "model.topk",
    "seq_len": "data.seq_len", "global_batch": "training.global_batch", "seed": "training.seed",
    "content": "section data", "order": "order of sequences, from another version of foldray",
}  # fmt: skip


class Recorded:
    """The routes of a run.

    Args:
        run: the run's folder, or its URI.
        field: how messages call the value.

    Raises:
        UserError: the run has no routes, or they cannot be read. So do the methods, if a file is damaged.
    """

    def __init__(self, run: str, field: str):
        self.run, self.field = run, field
        try:
            self._folder = Folder(run.rstrip("/")) / FOLDER
            names = self._folder.names()
        except UNREACHED as error:
            raise UserError(field, run, f"cannot be reached ({error})") from None
        if names is None or ABOUT not in names:
            raise UserError(field, run, "has no recorded routes; routes.record in its recipe would have kept them")
        try:
            self.about = read_json(self._folder, ABOUT, TypeAdapter(About))
        except (DamagedFile, OSError) as error:
            raise UserError(field, run, f"its {FOLDER}/{error}") from None
        files = sorted(file for name in names[:_MOST_FILES] if (file := FileName.read(name)) is not None)
        self._attempts: dict[int, dict[int, list[FileName]]] = defaultdict(lambda: defaultdict(list))
        for file in files:
            self._attempts[file.attempt][file.rank].append(file)
        self._known: dict[FileName, np.ndarray] = {}
        self._counts: dict[int, tuple[FileName, np.ndarray]] = {}  # by rank: of the file that was read last

    def check(self, about: About) -> None:
        """Raise a UserError if these routes are not of the tokens of a training."""
        for name, key in _SAME.items():
            if (had := getattr(self.about, name)) != (has := getattr(about, name)):
                difference = f" ({had} there, {has} here)" if isinstance(had, int) else ""
                raise UserError(self.field, self.run, f"has routes of a training with another {key}{difference}")
        if not self.has_tokens:
            rule = "has only counts; routes.record_tokens in its recipe would have kept the experts of tokens"
            raise UserError(self.field, self.run, rule)

    @property
    def has_tokens(self) -> bool:
        """Whether any step has the experts of its tokens."""
        files = (file for ranks in self._attempts.values() for files in ranks.values() for file in files)
        return any(name.startswith("experts_") for file in files for name in self._names(file))

    @cached_property
    def steps(self) -> list[int]:
        """The steps whose counts are recorded, in order."""
        files = [file for ranks in self._attempts.values() for files in ranks.values() for file in files]
        return sorted({int(step) for file in files for step in self._steps_in(file)})

    @property
    def sampled(self) -> list[int]:
        """At most `_SAMPLED` of these steps, evenly over all of them."""
        return self.steps[:: max(1, -(-len(self.steps) // _SAMPLED))]

    def ranks(self, step: int) -> list[int]:
        """Return the ranks that have files of a step, in the order of `counts`."""
        return [file.rank for file in self._files(step)]

    def counts(self, step: int) -> np.ndarray:
        """Return the assignments of each rank's tokens in a step: int64 [R, M, E]. Blocks of other ranks have zeros."""
        files = self._files(step)
        result = np.zeros((len(files), len(self.about.layers), self.about.experts), np.int64)
        for row, file in zip(result, files, strict=True):
            counts, at = self._counts_in(file), int(np.searchsorted(self._steps_in(file), step))
            rows = self._rows(file)
            if counts.shape != (len(self._steps_in(file)), len(rows), self.about.experts):
                raise self._damaged(file, f"has counts of the shape {list(counts.shape)}")
            row[rows] = counts[at]
        return result

    def experts(self, step: int, places: Sequence[int]) -> np.ndarray | None:
        """Return the experts of all tokens of some sequences, by their places in the step's batch: int32 [M, B, L, K].

        None if the step has none.
        """
        about = self.about
        result = np.full((len(about.layers), len(places), about.seq_len, about.topk), -1, np.int32)
        row_of = {place: row for row, place in enumerate(places)}
        files = [file for file in self._files(step) if f"experts_{step}" in self._names(file)]
        for file in files:
            sequences, rows = self._array(file, f"sequences_{step}"), self._rows(file)
            held = [at for at, place in enumerate(sequences.tolist()) if place in row_of]
            if not held:
                continue
            experts, positions = self._array(file, f"experts_{step}"), self._array(file, "positions")
            if experts.shape != (len(rows), len(sequences), len(positions), about.topk):
                raise self._damaged(file, f"has experts of the shape {list(experts.shape)}")
            if positions.min(initial=0) < 0 or positions.max(initial=0) >= about.seq_len:
                raise self._damaged(file, "has positions beyond its sequences")
            if experts.max(initial=0) >= about.experts:
                raise self._damaged(file, "has experts that the model has not")
            wanted = [row_of[int(sequences[at])] for at in held]
            result[np.ix_(np.array(rows), np.array(wanted), positions)] = experts[:, held]
        if files and len(places) and result.min() < 0:
            raise UserError(self.field, self.run, f"lacks files of step {step}: experts of some tokens are missing")
        return result if files else None

    def typical_shares(self) -> tuple[float, ...]:
        """Return the share of tokens that each expert gets in one block and one step: where the fullest expert has the median
        load, among all blocks of at most `_SAMPLED` steps."""
        if not self.steps:
            raise UserError(self.field, self.run, "has no recorded step yet")
        load_NE = np.concatenate([self.counts(step).sum(axis=0) for step in self.sampled]).astype(np.float64)
        load_NE = load_NE[load_NE.sum(axis=1) > 0]
        shares_NE = load_NE * self.about.topk / load_NE.sum(axis=1, keepdims=True)
        return tuple(np.minimum(shares_NE[np.argsort(shares_NE.max(axis=1))[len(shares_NE) // 2]], 1.0).tolist())

    def _files(self, step: int) -> list[FileName]:
        """Return the files of a step, one for each rank, of the newest attempt that has it."""
        for attempt in sorted(self._attempts, reverse=True):
            found = [next((file for file in files if file.last >= step), None) for files in self._attempts[attempt].values()]
            if (files := [file for file in found if file is not None]) and step in self._steps_in(files[0]):
                return files
        return []

    def _counts_in(self, file: FileName) -> np.ndarray:
        """Return the counts of a file, which has many steps. Whoever reads step by step reads it once."""
        known, counts = self._counts.get(file.rank, (None, None))
        if known != file or counts is None:
            counts = self._array(file, "counts")
            self._counts[file.rank] = file, counts
        return counts

    def _steps_in(self, file: FileName) -> np.ndarray:
        if file not in self._known:
            steps = self._array(file, "steps").astype(np.int64)
            if steps.ndim != 1 or not len(steps) or (np.diff(steps) <= 0).any():
                raise self._damaged(file, "has steps that do not rise")
            self._known[file] = steps
        return self._known[file]

    def _rows(self, file: FileName) -> list[int]:
        """Return the places of a rank's MoE blocks among those of the model."""
        layers = self._array(file, "layers").tolist()
        if not set(layers) <= set(self.about.layers):
            raise self._damaged(file, "has MoE blocks that the model has not")
        return [self.about.layers.index(layer) for layer in layers]

    def _names(self, file: FileName) -> set[str]:
        with self._opened(file) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}

    def _array(self, file: FileName, name: str) -> np.ndarray:
        try:
            with self._opened(file) as archive:
                if archive.getinfo(f"{name}.npy").file_size > _MOST_BYTES:
                    raise self._damaged(file, f"has too many bytes in {name}")
                array = np.load(io.BytesIO(archive.read(f"{name}.npy")), allow_pickle=False)
        except (KeyError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile):
            raise self._damaged(file, f"has no {name} that can be read") from None
        if array.dtype.kind not in "iu":
            raise self._damaged(file, f"has a {name} of {array.dtype}, not of whole numbers")
        return array

    def _opened(self, file: FileName) -> zipfile.ZipFile:
        try:
            self._folder.size(str(file))
            return zipfile.ZipFile(self._folder.open(str(file)))
        except (DamagedFile, OSError, zipfile.BadZipFile) as error:
            raise self._damaged(file, f"cannot be read ({error})") from None

    def _damaged(self, file: FileName, what: str) -> UserError:
        return UserError(self.field, self.run, f"its {FOLDER}/{file} {what}")


def replayed_by(recipe: Recipe) -> Recorded | None:
    """Return the routes that a recipe's training takes instead of its routers' choice (`routes.replay`), if any."""
    return None if recipe.routes.replay is None else Recorded(recipe.routes.replay, "routes.replay")

"""Documents that a program hands over, as datasets of Ray or rows in memory: stored as files, which are then read as any others.

A folder of files is named by the hash of its documents. So equal documents in the same order are the same data, and a run that
continues finds them again, also from the command line. Of a dataset of Ray, a task writes each block, on the node that has it.
The driver sees names and hashes alone.
"""

from __future__ import annotations

import glob
import logging
import os
import pickle
import platform
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import ray.data
from ray.data import DataContext
from ray.exceptions import RayError

from foldray.errors import UserError
from foldray.recipe import DataSpec
from foldray.recipe.data import Invalid
from trainers.data.drafts import check_seen, publish, writing
from trainers.data.encode import grouped, quiet_console
from trainers.data.identity import Chain
from trainers.data.prepare import cache_folder
from trainers.data.sources import STORED
from trainers.data.unfit import Tally, as_utf8, halves_in, refused, unfit_summary

Documents = Any
"""A dataset of Ray, a function that makes one, or rows in memory: mappings with the text field, or texts."""
_log = logging.getLogger(__name__)
_NAMES = ("train", "validation")
_GROUP = 8 << 20  # bytes of text in a row group, which one task reads


def check_datasets(datasets: Mapping[str, Any], data: DataSpec) -> None:
    """Refuse datasets that cannot become the training and validation text of a recipe. Nothing is read."""
    if data.sources is not None:
        raise UserError("datasets", ", ".join(datasets), "cannot be combined with data.sources; give one of both")
    for name, dataset in datasets.items():
        if name not in _NAMES:
            raise UserError("datasets", name, "is not a name of a dataset", _NAMES)
        rows = isinstance(dataset, Iterable) and not isinstance(dataset, str | bytes | Mapping)
        if hasattr(dataset, "iloc") or not (isinstance(dataset, ray.data.Dataset) or callable(dataset) or rows):
            rule = "is neither a ray.data.Dataset nor rows in memory, such as [{'text': …}]; ray.data.from_pandas makes a dataset"
            raise UserError(f"datasets.{name}", type(dataset).__name__, rule)
    if "train" not in datasets:
        raise UserError("datasets", ", ".join(datasets), "must have 'train'")
    if "validation" not in datasets and data.validation.path is None:
        rule = "needs 'validation' beside it: train, validation = dataset.train_test_split(0.05), or data.validation.path"
        raise UserError("datasets", "train", rule)


def store(datasets: Mapping[str, Documents], data: DataSpec, cache: str | Path) -> DataSpec:
    """Store the documents of datasets as Parquet files, and return the section `data` that reads these files.

    A dataset of Ray is written by the nodes that have its blocks. All of them must see the cache.

    Args:
        datasets: "train", and perhaps "validation"; otherwise `data.validation.path` names Parquet files.
        data: its `text_field` is the column of the text.
        cache: folder of packed data. The files go into its folder `documents`.
    """
    folder = cache_folder(cache) / "documents"
    paths = {name: _stored(f"datasets.{name}", dataset, data, folder) for name, dataset in datasets.items()}
    if paths.get("validation") == paths["train"]:
        raise UserError("datasets.validation", "the same documents", "must differ from those of datasets.train")
    validation = data.validation.model_copy(update={"path": paths.get("validation", data.validation.path)})
    return data.model_copy(update={"source": "parquet", "path": paths["train"], "validation": validation})


def _stored(name: str, dataset: Documents, data: DataSpec, folder: Path) -> str:
    """Write the documents of one dataset, unless they are there already, and return the glob of their files."""
    draft, content, unfit = folder / f".{uuid.uuid4().hex[:8]}", Chain(), Tally()
    rows = documents = 0
    with writing(folder):
        draft.mkdir(parents=True)
    try:
        for part in _parts(dataset, _Write(draft, name, data.text_field, data.invalid)):
            if part.documents:
                check_seen(partial(_has_size, draft / part.file, part.size), folder.parent, part.node)
                with writing(folder):
                    os.replace(draft / part.file, draft / f"part-{documents:012d}.parquet")
            content.extend(Chain.parse(part.content))
            if part.unfit:
                unfit.add({name: (part.unfit, part.unfit_bytes, f"row {rows + part.first_unfit}")})
            rows, documents = rows + part.rows, documents + part.documents
        if not documents:
            raise UserError(name, "no rows", "has no documents")
        if line := unfit_summary({"unfit": {"rule": data.invalid, **unfit.as_dict()}}):
            _log.warning(line)
        stored = folder / f"hash-{content.value:064x}"
        with writing(folder):
            for path in draft.glob(".*"):  # without documents, or of tasks that ran twice
                path.unlink()
            publish(draft, stored, stored.exists)
    except _Mistake as mistake:
        row = f"row {rows + mistake.row}"
        if mistake.kind is None:
            raise refused(name, row) from None
        raise UserError("data.text_field", data.text_field, f"is not text but {mistake.kind} in {row} of {name}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    paths = os.path.join(glob.escape(str(stored)), "*.parquet")
    assert STORED.search(paths), "the preparation knows stored documents by their path"
    return paths


def _has_size(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def _parts(dataset: Documents, write: _Write) -> Iterator[_Part]:
    """Write the documents of a dataset, and yield what was written, in order."""
    if callable(dataset) and not isinstance(dataset, ray.data.Dataset):
        dataset = dataset()
    if not isinstance(dataset, ray.data.Dataset):
        yield write(dataset)
        return
    if write.text_field in (dataset.columns(fetch_if_missing=False) or ()):
        dataset = dataset.select_columns([write.text_field])
    written = dataset.map_batches(write.of_block, batch_size=None, batch_format="pyarrow", zero_copy_batch=True)
    try:
        with _in_order(written.context), quiet_console():
            for row in written.iter_rows():
                result = pickle.loads(row["result"])
                if isinstance(result, Exception):
                    raise result
                yield result
    except RayError as error:
        first = str(error).partition("\n\nThe above exception was")[0]  # the exception of a user's function comes first
        reason = (first.strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(write.name, "a dataset", f"cannot be read ({reason})") from None


@dataclass
class _Part:
    """A file of documents.

    Args:
        node: name of the node that has written it.
        content: hash of the documents (`identity.Chain`).
        rows: rows of the dataset that were read for it.
        documents: how many it has. A file without any is not kept.
        unfit: number of rows that cannot be used as they are.
        unfit_bytes: bytes of these rows that are not UTF-8.
        first_unfit: number of the first of these rows.
    """

    file: str = field(default_factory=lambda: f".{uuid.uuid4().hex}")
    size: int = 0
    node: str = field(default_factory=platform.node)
    content: str = ""
    rows: int = 0
    documents: int = 0
    unfit: int = 0
    unfit_bytes: int = 0
    first_unfit: int = 0

    def count_unfit(self, row: int, bytes_: int) -> None:
        self.first_unfit = self.first_unfit if self.unfit else row
        self.unfit, self.unfit_bytes = self.unfit + 1, self.unfit_bytes + bytes_


class _Mistake(Exception):
    """A row is no document.

    Args:
        row: its number in its part.
        kind: the type of what it has instead of a text; None if it has a text that is not UTF-8.
    """

    def __init__(self, row: int, kind: str | None):
        super().__init__(row, kind)
        self.row, self.kind = row, kind


@dataclass(frozen=True)
class _Write:
    """Writes documents into a file of its own.

    Args:
        name: what errors call the dataset.
        rule: what becomes of documents that cannot be used. Halves of surrogate pairs have no UTF-8.
    """

    folder: Path
    name: str
    text_field: str
    rule: Invalid

    def of_block(self, block: pyarrow.Table) -> pyarrow.Table:
        """Write a block of a dataset of Ray, and return one row. An error travels as a result, so Ray does not wrap it."""
        result: _Part | Exception
        try:
            if block.num_rows and self.text_field not in block.column_names:
                raise UserError("data.text_field", self.text_field, "is not a column of the dataset", block.column_names)
            batches = block.select([self.text_field]).to_batches(max_chunksize=1024) if block.num_rows else ()
            result = self(text for batch in batches for text in batch.column(0).to_pylist())
        except (UserError, _Mistake) as error:
            result = error
        return pyarrow.table({"result": [pickle.dumps(result)]})

    def __call__(self, rows: Iterable[Any]) -> _Part:
        """Write rows: texts, or mappings with the text."""
        part, content = _Part(), Chain()
        schema = pyarrow.schema([(self.text_field, pyarrow.large_string())])
        try:
            with pyarrow.parquet.ParquetWriter(self.folder / part.file, schema) as writer:
                for texts in grouped(self._texts(rows, part), len, _GROUP):
                    writer.write_table(pyarrow.table([pyarrow.array(texts, pyarrow.large_string())], schema=schema))
                    part.documents += len(texts)
                    for text in texts:
                        content.add(text.encode())
            part.size, part.content = (self.folder / part.file).stat().st_size, str(content)
        except OSError as error:
            rule = f"cannot be written on node {part.node} ({error.strerror or error}); every node must see it"
            raise UserError("data.cache", self.folder.parent.parent, rule) from None
        return part

    def _texts(self, rows: Iterable[Any], part: _Part) -> Iterator[str]:
        """Yield the documents of rows, and count the rows."""
        for number, row in enumerate(rows):
            part.rows += 1
            if isinstance(row, Mapping) and self.text_field not in row:
                raise UserError("data.text_field", self.text_field, f"is not a column of {self.name}", row)
            text = row[self.text_field] if isinstance(row, Mapping) else row
            if not isinstance(text, str):
                if self.rule != "skip":
                    raise _Mistake(number, type(text).__name__)
                part.count_unfit(number, 0)
                continue
            if halves := halves_in(text):
                if self.rule == "refuse":
                    raise _Mistake(number, None)
                part.count_unfit(number, 3 * halves)
            if not halves or self.rule == "replace":
                yield as_utf8(text)


@contextmanager
def _in_order(context: DataContext) -> Iterator[None]:
    """Keep the order of rows, and show no progress bars. By default, Ray Data yields blocks as they are done."""
    options, bars = context.execution_options, context.enable_progress_bars
    ordered = options.preserve_order
    options.preserve_order, context.enable_progress_bars = True, False
    try:
        yield
    finally:
        options.preserve_order, context.enable_progress_bars = ordered, bars

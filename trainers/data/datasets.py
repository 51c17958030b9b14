"""Documents that a program hands over, as datasets of Ray or rows in memory: stored as files, which are then read as any others.

A file is named by the hash of its documents. So equal documents in the same order are the same data, and a run that continues
finds them again, also from the command line.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import ray.data
from ray.data import DataContext
from ray.exceptions import RayError

from foldray.errors import UserError
from foldray.recipe import DataSpec
from trainers.data.encode import quiet_console
from trainers.data.prepare import cache_folder
from trainers.data.sources import STORED
from trainers.data.unfit import Unfit, as_utf8, halves_in

Documents = Any
"""A dataset of Ray, a function that makes one, or rows in memory: mappings with the text field, or texts."""
_log = logging.getLogger(__name__)
_NAMES = ("train", "validation")
_GROUP = 8 << 20  # bytes of text in a row group, which one task reads


def check_datasets(datasets: Mapping[str, Any], data: DataSpec) -> None:
    """Refuse datasets that cannot become the training and validation text of a recipe. Nothing is read.

    Raises:
        UserError: a name is unknown or missing, a value is no dataset, or the recipe has a mixture of sources.
    """
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

    Args:
        datasets: "train", and perhaps "validation"; otherwise `data.validation.path` names Parquet files.
        data: section `data` of the recipe. Its `text_field` is the column of the text.
        cache: folder of packed data. The files go into its folder `documents`.

    Raises:
        UserError: a dataset cannot be read, has no documents, or lacks the text field; or a file cannot be written.
    """
    folder = cache_folder(cache) / "documents"
    paths = {name: str(_stored(name, dataset, data, folder)) for name, dataset in datasets.items()}
    if paths.get("validation") == paths["train"]:
        raise UserError("datasets.validation", "the same documents", "must differ from those of datasets.train")
    validation = data.validation.model_copy(update={"path": paths.get("validation", data.validation.path)})
    return data.model_copy(update={"source": "parquet", "path": paths["train"], "validation": validation})


def _stored(name: str, dataset: Documents, data: DataSpec, folder: Path) -> Path:
    """Write the documents of one dataset, unless their file exists already, and return its path."""
    draft, digest, count = folder / f".{uuid.uuid4().hex[:8]}", hashlib.sha256(), 0
    schema, unfit = pyarrow.schema([(data.text_field, pyarrow.large_string())]), Unfit(data.invalid)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with pyarrow.parquet.ParquetWriter(draft, schema) as writer:
                for texts in _groups(_texts(name, dataset, data.text_field, unfit)):
                    writer.write_table(pyarrow.table([pyarrow.array(texts, pyarrow.large_string())], schema=schema))
                    count += len(texts)
                    for text in map(str.encode, texts):
                        digest.update(len(text).to_bytes(8) + text)
            if not count:
                raise UserError(f"datasets.{name}", "no rows", "has no documents")
            for field, (documents, bytes_, first) in unfit.found.items():
                _log.warning("%s: %d documents are not UTF-8, %d bytes of them, the first in %s", field, documents, bytes_, first)
            path = folder / f"sha256-{digest.hexdigest()}.parquet"
            assert STORED.search(str(path)), "the preparation knows stored documents by their path"
            os.replace(draft, path)
            return path
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UserError("data.cache", folder, f"cannot be written ({error.strerror or error})") from None


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group, size = list[str](), 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _texts(name: str, dataset: Documents, text_field: str, unfit: Unfit) -> Iterator[str]:
    """Yield the documents of a dataset, in order. Halves of surrogate pairs have no UTF-8."""
    field = f"datasets.{name}"
    try:
        for number, row in enumerate(_rows(dataset, text_field)):
            if isinstance(row, Mapping) and text_field not in row:
                raise UserError("data.text_field", text_field, f"is not a column of {field}", row)
            text = row[text_field] if isinstance(row, Mapping) else row
            if not isinstance(text, str):
                rule = f"is not text but {type(text).__name__} in row {number} of {field}"
                raise UserError("data.text_field", text_field, rule)
            halves = halves_in(text)
            if not halves or unfit.keeps(field, 3 * halves, f"row {number}"):
                yield as_utf8(text)
    except RayError as error:
        first = str(error).partition("\n\nThe above exception was")[0]  # the exception of a user's function comes first
        reason = (first.strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(field, "a dataset", f"cannot be read ({reason})") from None


def _rows(dataset: Documents, text_field: str) -> Iterator[Any]:
    if callable(dataset) and not isinstance(dataset, ray.data.Dataset):
        dataset = dataset()
    if not isinstance(dataset, ray.data.Dataset):
        yield from dataset
        return
    if text_field in (dataset.columns(fetch_if_missing=False) or ()):
        dataset = dataset.select_columns([text_field])
    with _in_order(dataset.context), quiet_console():
        for batch in dataset.iter_batches(batch_size=1024, batch_format="pyarrow"):
            if text_field not in batch.column_names:
                raise UserError("data.text_field", text_field, "is not a column of the dataset", batch.column_names)
            yield from ({text_field: text} for text in batch.column(text_field).to_pylist())


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

"""Datasets of Ray and rows in memory as documents: equal documents are the same data, wherever and however they come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import ray

from foldray.errors import UserError
from foldray.recipe import DataSpec
from trainers.data import datasets, drafts
from trainers.data.datasets import store
from trainers.data.prepare import prepare

pytestmark = pytest.mark.usefixtures("ray_session")

TEXTS = [f"document {i}: " + "naïve\n" * i for i in range(60)]
ROWS = [{"text": text, "number": i} for i, text in enumerate(TEXTS)]
SPEC = DataSpec(seq_len=8)


def of_ray(rows: list[Any]) -> ray.data.Dataset:
    """A dataset whose blocks are done in another order than theirs."""

    def slowly(row: dict[str, Any]) -> dict[str, Any]:
        import time

        time.sleep(0.2 if row.get("number", 1) == 0 else 0)
        return row

    return ray.data.from_items(rows, override_num_blocks=6).map(slowly)


def generated() -> Iterator[str]:
    yield from TEXTS


def files(spec: DataSpec) -> list[Path]:
    return sorted(Path(str(spec.path)).parent.glob("*.parquet"))


def documents(spec: DataSpec) -> list[str]:
    return [text for file in files(spec) for text in pyarrow.parquet.read_table(file)["text"].to_pylist()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> DataSpec:
    return store({"train": TEXTS, "validation": TEXTS[:9]}, SPEC, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "train",
    [ROWS, lambda: of_ray(ROWS), np.array(TEXTS), tuple(TEXTS), generated],
    ids=["rows", "dataset", "array", "tuple", "generator"],
)
def test_equal_documents_are_the_same_folder(plain: DataSpec, tmp_path: Path, train: Any) -> None:
    given = train() if train is generated else train
    spec = store({"train": given, "validation": TEXTS[:9]}, SPEC, tmp_path)
    assert files(spec)[0].parent.name == files(plain)[0].parent.name
    assert documents(spec) == TEXTS
    assert {path.parent.name for path in (tmp_path / "documents").glob("*/*")} == set(os.listdir(tmp_path / "documents"))
    assert len(os.listdir(tmp_path / "documents")) == 2


def test_another_order_is_other_data(plain: DataSpec, tmp_path: Path) -> None:
    spec = store({"train": TEXTS[::-1], "validation": TEXTS[:9]}, SPEC, tmp_path)
    assert files(spec)[0].parent.name != files(plain)[0].parent.name


def test_blocks_are_written_by_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver writes no document of a dataset of Ray. A task that has run twice leaves nothing."""
    monkeypatch.setattr(datasets, "grouped", lambda *_: pytest.fail("the driver reads documents"))  # not in other processes
    spec = store({"train": of_ray(ROWS)}, SPEC, tmp_path)
    assert [pyarrow.parquet.read_metadata(file).num_rows for file in files(spec)] == [10] * 6
    assert documents(spec) == TEXTS
    assert len(os.listdir(files(spec)[0].parent)) == 6
    before = [file.stat().st_ino for file in files(spec)]
    assert store({"train": of_ray(ROWS).repartition(2)}, SPEC, tmp_path).path == spec.path
    assert [file.stat().st_ino for file in files(spec)] == before


def test_a_node_that_writes_elsewhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_LOOKS", 1)
    monkeypatch.setattr(drafts, "_LOOK_S", 0.0)
    monkeypatch.setattr(datasets, "_has_size", lambda path, size: False)
    with pytest.raises(UserError, match=r"^data.cache=.*: is not the same folder everywhere: node .* has written files"):
        store({"train": ROWS}, SPEC, tmp_path)
    assert not os.listdir(tmp_path / "documents")


def test_stored_documents_are_packed_as_files_are(plain: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files and row groups, and another place, are the same data."""
    monkeypatch.setattr(datasets, "_GROUP", 100)
    spec = store({"train": of_ray(ROWS), "validation": TEXTS[:9]}, SPEC, tmp_path / "a")
    assert len(files(spec)) == 6
    assert pyarrow.parquet.ParquetFile(files(spec.model_copy(update={"path": spec.validation.path}))[0]).num_row_groups == 3
    found, other = prepare(spec, 264, tmp_path / "a"), prepare(plain, 264, tmp_path / "b")
    assert (found.folder.name, found.content) == (other.folder.name, other.content)
    for name in ("train", "validation"):
        one, two = getattr(found, name), getattr(other, name)
        assert one.tokens(range(len(one))).tolist() == two.tokens(range(len(two))).tolist()
    stream = [token for text in TEXTS for token in (found.meta["separator"], *text.encode())]
    assert found.train.tokens(range(len(found.train)))[:, :-1].flatten().tolist() == stream[: 8 * len(found.train)]


def test_files_of_a_recipe_validate_a_dataset(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:9]}), tmp_path / "held.parquet")
    spec = SPEC.model_copy(update={"validation": SPEC.validation.model_copy(update={"path": str(tmp_path / "held.parquet")})})
    found = prepare(store({"train": ROWS}, spec, tmp_path / "cache"), 264, tmp_path / "cache")
    assert found.meta["validation"]["documents"] == 9


def failing(row: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("a row of the user's")


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (lambda: of_ray([{"body": "x"}]), r"^data\.text_field=text: is not a column of the dataset; legal: body$"),
        (lambda: of_ray(["x", "y"]), r"^data\.text_field=text: is not a column of the dataset; legal: item$"),
        (lambda: of_ray([{"text": 3}]), r"^data\.text_field=text: is not text but int in row 0 of datasets\.train$"),
        (lambda: of_ray([*ROWS, {"text": None}]), r"^data\.text_field=text: is not text but NoneType in row 60 of datasets\.tr"),
        ([{"text": "a"}, {"body": "b"}], r"^data\.text_field=text: is not a column of datasets\.train; legal: body$"),
        (["a", None], r"^data\.text_field=text: is not text but NoneType in row 1 of datasets\.train$"),
        ([], r"^datasets\.train=no rows: has no documents$"),
        (lambda: of_ray(ROWS).map(failing), r"^datasets\.train=a dataset: cannot be read \(ValueError: a row of the user's\)$"),
        (TEXTS[:9], r"^datasets\.validation=the same documents: must differ"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_one_line(tmp_path: Path, train: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        store({"train": train, "validation": TEXTS[:9]}, SPEC, tmp_path)
    assert [name for name in os.listdir(tmp_path / "documents") if not name.startswith("hash-")] == []


def test_halves_of_surrogate_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"train": ["fine", "a\ud83d"], "validation": TEXTS[:3]}
    with pytest.raises(UserError, match=r"^data.invalid=refuse: row 1 of datasets.train is not UTF-8; skip leaves"):
        store(given, SPEC, tmp_path)
    assert not caplog.messages
    for rule, texts in (("skip", ["fine"]), ("replace", ["fine", "a?"])):
        caplog.clear()
        assert documents(store(given, SPEC.model_copy(update={"invalid": rule}), tmp_path)) == texts
        what = "cannot be used (3 bytes are not UTF-8); they are left out" if rule == "skip" else "are not UTF-8, 3 bytes"
        assert caplog.messages[0].startswith(f"1 documents in 1 files {what}")
        assert caplog.messages[0].endswith(": datasets.train (1, the first: row 1)")
    spec = SPEC.model_copy(update={"invalid": "skip"})
    assert documents(store({**given, "train": ["fine", None, "too"]}, spec, tmp_path)) == ["fine", "too"]
    assert caplog.messages[-1].endswith("datasets.train (1, the first: row 1)")

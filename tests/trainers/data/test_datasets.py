"""Datasets of Ray and rows in memory as documents: equal documents are the same data, wherever and however they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import ray

from foldray.errors import UserError
from foldray.recipe import DataSpec
from trainers.data import datasets
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


def documents(spec: DataSpec) -> list[str]:
    return pyarrow.parquet.read_table(spec.path)["text"].to_pylist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> DataSpec:
    return store({"train": TEXTS, "validation": TEXTS[:9]}, SPEC, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "train",
    [ROWS, lambda: of_ray(ROWS), np.array(TEXTS), tuple(TEXTS), generated],
    ids=["rows", "dataset", "array", "tuple", "generator"],
)
def test_equal_documents_are_the_same_file(plain: DataSpec, tmp_path: Path, train: Any) -> None:
    given = train() if train is generated else train
    spec = store({"train": given, "validation": TEXTS[:9]}, SPEC, tmp_path)
    assert spec.path is not None
    assert plain.path is not None
    assert Path(spec.path).name == Path(plain.path).name
    assert documents(spec) == TEXTS
    assert sorted(path.suffix for path in (tmp_path / "documents").iterdir()) == [".parquet"] * 2


def test_another_order_is_other_data(plain: DataSpec, tmp_path: Path) -> None:
    spec = store({"train": TEXTS[::-1], "validation": TEXTS[:9]}, SPEC, tmp_path)
    assert Path(str(spec.path)).name != Path(str(plain.path)).name


def test_stored_documents_are_packed_as_files_are(plain: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small row groups are several parts, and another place is the same data."""
    monkeypatch.setattr(datasets, "_GROUP", 100)
    spec = store({"train": of_ray(ROWS), "validation": TEXTS[:9]}, SPEC, tmp_path / "a")
    assert pyarrow.parquet.ParquetFile(str(spec.path)).num_row_groups > 3
    found, other = prepare(spec, 264, tmp_path / "a"), prepare(plain, 264, tmp_path / "b")
    assert found.folder.name == other.folder.name
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
    left = list((tmp_path / "documents").iterdir())
    assert [path for path in left if not path.name.startswith("sha256-")] == []


def test_halves_of_surrogate_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"train": ["fine", "a\ud83d"], "validation": TEXTS[:3]}
    with pytest.raises(UserError, match=r"^data.invalid=refuse: row 1 of datasets.train is not UTF-8; skip leaves"):
        store(given, SPEC, tmp_path)
    assert not caplog.messages
    for rule, texts in (("skip", ["fine"]), ("replace", ["fine", "a?"])):
        caplog.clear()
        assert documents(store(given, SPEC.model_copy(update={"invalid": rule}), tmp_path)) == texts
        assert caplog.messages == ["datasets.train: 1 documents are not UTF-8, 3 bytes of them, the first in row 1"]

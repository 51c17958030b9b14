from __future__ import annotations

import json
import sysconfig
from itertools import chain
from pathlib import Path

import pytest

from foldray.errors import UserError
from foldray.recipe import DataSpec
from trainers.data import rows, sources
from trainers.data.rows import Part, cut, read_documents
from trainers.data.sources import split_files
from trainers.data.unfit import Unfit


def spec(source: str, path: Path | str, **more) -> DataSpec:
    return DataSpec(source=source, path=str(path), **more)


def texts(folder: Path, count: int) -> Path:
    for index in range(count):
        folder.joinpath(f"{index:02d}.txt").write_text(f"document {index}")
    return folder / "*.txt"


def names(data: DataSpec) -> tuple[list[str], list[str]]:
    train, validation = split_files(data)
    return [file.name for file in train], [file.name for file in validation]


@pytest.mark.parametrize(("fraction", "held"), [(0.001, 1), (0.25, 5), (0.999, 19)])
def test_split_by_file(tmp_path: Path, fraction: float, held: int):
    train, validation = names(spec("text", texts(tmp_path, 20), validation={"fraction": fraction}))
    assert len(validation) == held
    assert sorted(train + validation) == [f"{index:02d}.txt" for index in range(20)]
    assert (train, validation) == (sorted(train), sorted(validation))


def test_split_goes_by_the_relative_name(tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    assert names(spec("text", texts(one, 20))) == names(spec("text", texts(two, 20)))
    small = names(spec("text", texts(one, 20), validation={"fraction": 0.1}))[1]
    assert set(small) < set(names(spec("text", texts(one, 20), validation={"fraction": 0.3}))[1])


def test_validation_set_of_its_own(tmp_path: Path):
    pattern = texts(tmp_path, 4)
    train, validation = names(spec("text", pattern, validation={"path": str(tmp_path / "02.txt")}))
    assert (train, validation) == (["00.txt", "01.txt", "03.txt"], ["02.txt"])  # held back, although data.path matches it
    with pytest.raises(UserError, match=r"^data.validation.path=.*nothing is left"):
        split_files(spec("text", pattern, validation={"path": str(pattern)}))


def test_glob(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    for name in ("deep/x.txt", "y.txt", "z[1].txt"):
        (tmp_path / name).write_text("text")
    train, validation = names(spec("text", tmp_path / "**" / "*.txt"))
    assert sorted(train + validation) == ["deep/x.txt", "y.txt", "z[1].txt"]
    assert names(spec("text", tmp_path / "z[1].txt", validation={"path": str(tmp_path / "y.txt")})) == (["z[1].txt"], ["y.txt"])


def test_stored_documents_are_known_by_their_path():
    """Earlier versions put the documents of a dataset into one file."""
    hashed = "0123456789abcdef" * 4
    for path, name in {
        f"/cache/documents/sha256-{hashed}.parquet": f"sha256-{hashed}.parquet",
        f"/ca[[]che/documents/hash-{hashed}/*.parquet": f"hash-{hashed}",
        f"/cache/documents/hash-{hashed}/part-000000000000.parquet": f"hash-{hashed}",
        f"/cache/documents/sha256-{hashed}.parquet/a.parquet": None,
        f"/cache/documents/hash-{hashed}.parquet": None,
        f"/cache/hash-{hashed}/a.parquet": None,
    }.items():
        found = sources.STORED.search(path)
        assert (found and found[1]) == name


@pytest.mark.parametrize("field", ["data.path", "data.validation.path"])
def test_no_file(tmp_path: Path, field: str):
    here, nothing = str(texts(tmp_path, 2)), str(tmp_path / "*.md")
    data = spec("text", nothing) if field == "data.path" else spec("text", here, validation={"path": nothing})
    with pytest.raises(UserError, match=rf"^{field}=.*matches no file"):
        split_files(data)


def test_folder_is_no_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"^data.path=.*is a folder"):
        split_files(spec("text", tmp_path))


def test_one_file_cannot_be_split(tmp_path: Path):
    with pytest.raises(UserError, match=r"^data.validation.path=null"):
        split_files(spec("text", texts(tmp_path, 1)))


def test_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train, validation = split_files(DataSpec())
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {file.name for file in train + validation}
    assert {"os.py", "json/decoder.py"} < found
    assert not any({"site-packages", "dist-packages", "__pycache__", "test", "tests"} & set(Path(name).parts) for name in found)
    assert train[0].locate() == str(root / train[0].name)
    monkeypatch.setattr(sources, "_library", lambda: tmp_path)
    with pytest.raises(UserError, match=r"^data.source=stdlib: finds no Python sources.*legal: text, jsonl, parquet"):
        split_files(DataSpec())


def documents(path: Path, kind: str, field: str = "text") -> list[list[str]]:
    file = sources._list_files(kind, str(path), "data.path")[0]
    return [list(read_documents(part, field, Unfit("replace"))) for part in cut([file])]


def test_text_replaces_what_is_not_utf8(tmp_path: Path):
    (tmp_path / "latin").write_bytes(b"caf\xe9\r\n")
    assert documents(tmp_path / "latin", "text") == [["caf�\r\n"]]


@pytest.mark.parametrize("part_bytes", [1, 7, 30, 1 << 20])
def test_jsonl_in_parts_reads_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int):
    monkeypatch.setattr(rows, "_PART_BYTES", part_bytes)
    wanted = ["first", "", "漢字\n", "x" * 50, "last"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in wanted]
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines[0] + "\r\n\n" + "\n".join(lines[1:]))
    parts = documents(tmp_path / "a.jsonl", "jsonl")
    assert list(chain(*parts)) == wanted
    assert (len(parts) == 1) == (part_bytes == 1 << 20)


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("\ufefftext \ufeff", "utf-8")
    assert documents(tmp_path / "a.txt", "text") == [["text \ufeff"]]


def test_a_number_of_many_digits_is_json(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"id": -' + "7" * 5000 + ', "few": 7, "text": "fine"}')
    assert documents(tmp_path / "a.jsonl", "jsonl") == [["fine"]]
    with pytest.raises(UserError, match=r"^data.text_field=id: is not text but Decimal in line 1 "):
        documents(tmp_path / "a.jsonl", "jsonl", "id")
    assert rows._object_of('{"few": -7}') == {"few": -7}


def test_jsonl_half_surrogate(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}')
    assert documents(tmp_path / "a.jsonl", "jsonl") == [["a?"]]


def test_parquet_row_groups(tmp_path: Path):
    table(tmp_path / "a.parquet", {"id": range(5), "text": list("abcde")}, row_group_size=2)
    assert documents(tmp_path / "a.parquet", "parquet") == [["a", "b"], ["c", "d"], ["e"]]
    table(tmp_path / "b.parquet", {"text": []})
    assert list(chain(*documents(tmp_path / "b.parquet", "parquet"))) == []


@pytest.mark.parametrize(("size", "most"), [(1 << 20, 8), (3, 64)])
def test_parquet_is_decoded_in_batches_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, most: int):
    parquet = pytest.importorskip("pyarrow.parquet")
    table(tmp_path / "a.parquet", {"text": [f"{row} ".ljust(size) for row in range(70)]}, use_dictionary=False)
    batches, plain = [], parquet.ParquetFile.iter_batches
    counted = lambda self, **more: (batches.append(len(batch)) or batch for batch in plain(self, **more))  # noqa: E731
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    assert [[int(text) for text in part] for part in documents(tmp_path / "a.parquet", "parquet")] == [[*range(70)]]
    assert sum(batches) == 70
    assert most // 2 < max(batches) <= most


def test_damage_of_parquet_is_named_if_its_pages_have_checksums(tmp_path: Path):
    path = tmp_path / "a.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    table(path, {"text": ["some text"]}, write_page_checksum=True, **options)
    path.write_bytes(path.read_bytes().replace(b"some text", b"same text", 1))
    with pytest.raises(UserError, match=r"^data.path=.*cannot be read on node .*CRC"):
        documents(path, "parquet")


def table(path: Path, columns: dict, **options) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path, **options)


def test_every_file_has_one_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "_PART_BYTES", 4)
    for name, text in [("0.jsonl", ""), ("1.jsonl", '{"text": "abc"}\n')]:
        (tmp_path / name).write_text(text)
    parts = list(cut(sources._list_files("jsonl", str(tmp_path / "*.jsonl"), "data.path")))
    assert [part.file.name for part in parts if part.last] == ["0.jsonl", "1.jsonl"]


BAD_LINES = [
    ('{"body": "b", "title": "t"}', r"^data.text_field=text: is not a field of line 3 of .*; legal: body, title$"),
    ("{not json", r"^data.path=.*: line 3 is not JSON"),
    ("[1]", r"^data.path=.*: line 3 is not a JSON object"),
    ('{"text": null}', r"^data.text_field=text: is not text but NoneType in line 3 "),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line(tmp_path: Path, line: str, message: str):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        documents(tmp_path / "a.jsonl", "jsonl")


def test_bad_parquet(tmp_path: Path):
    table(tmp_path / "a.parquet", {"body": ["b"], "title": ["t"]})
    with pytest.raises(UserError, match=r"^data.text_field=text: is not a column of .*; legal: body, title$"):
        documents(tmp_path / "a.parquet", "parquet")
    table(tmp_path / "b.parquet", {"id": [1]})
    with pytest.raises(UserError, match=r"^data.text_field=id: is not text but int in row 0 of row group 0 "):
        documents(tmp_path / "b.parquet", "parquet", "id")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"^data.text_field=text: is the name of 2 columns of "):
        documents(tmp_path / "d.parquet", "parquet")
    (tmp_path / "c.parquet").write_text("text")
    with pytest.raises(UserError, match="is not Parquet"):
        documents(tmp_path / "c.parquet", "parquet")


def test_file_that_a_node_does_not_see(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    file = sources._list_files("text", str(tmp_path / "a.txt"), "data.path")[0]
    part = Part(file, 0, file.size, file.size, last=True)
    (tmp_path / "a.txt").write_text("longer text")
    with pytest.raises(UserError, match="has another size on node"):
        list(read_documents(part, "text", Unfit("refuse")))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"cannot be read on node .*No such file"):
        list(read_documents(part, "text", Unfit("refuse")))

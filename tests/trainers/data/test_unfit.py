"""Documents that cannot be used: counted as Python's own decoder sees them, and refused, left out or replaced."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from foldray.errors import UserError
from trainers.data.rows import _value_of, cut, read_documents, read_rows
from trainers.data.sources import _list_files
from trainers.data.unfit import Tally, Unfit, decode, unfit_summary

BYTES = some.one_of(
    some.binary(max_size=60),
    some.lists(
        some.sampled_from([b"a", b"\xc3\xa9", b"\xe6\xbc", b"\xef\xbf\xbd", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f", b"\0"])
    ).map(b"".join),
)


@given(BYTES)
@example(b"\xef\xbf\xbd\xef\xbf")
@example(b"\xf0\x90\x80")
def test_bytes_are_counted_as_pythons_decoder_counts_them(content: bytes) -> None:
    bad: list[range] = []

    def record(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        bad.append(range(error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("foldray-test", record)
    expected = content.decode("utf-8", "foldray-test")
    assert decode(content) == (expected, sum(map(len, bad)), bad[0].start if bad else 0)


def documents(path: Path, kind: str, unfit: Unfit, field: str = "text") -> list[str]:
    return [text for part in cut(_list_files(kind, str(path), "data.path")) for text in read_documents(part, field, unfit)]


def write(folder: Path, kind: str) -> Path:
    """Write four documents, of which the second and the fourth are not UTF-8."""
    texts = [b"fine", b"caf\xe9 \xff\xfe", "漢".encode(), b"\xe6\xbc"]
    path = folder / f"a.{kind}"
    if kind == "text":
        path = folder / "*.txt"
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_bytes(text)
    elif kind == "jsonl":
        path.write_bytes(b"".join(b'{"text": "' + text + b'"}\n' for text in texts))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
        parquet.write_table(pyarrow.table({"text": column}), path)
    return path


KINDS = {
    "text": ("1.txt", "byte 3", "3.txt", "byte 0"),
    "jsonl": ("a.jsonl", "byte 30", "a.jsonl", "byte 30"),
    "parquet": ("a.parquet", "row 1 of row group 0", "a.parquet", "row 1 of row group 0"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_becomes_of_them(tmp_path: Path, kind: str) -> None:
    path, (first, at, last, last_at) = write(tmp_path, kind), KINDS[kind]
    with pytest.raises(UserError) as told:
        documents(path, kind, Unfit("refuse"))
    line = f"data.invalid=refuse: {at} of {tmp_path}/{first} is not UTF-8; skip leaves such documents out, replace puts U+FFFD in"
    assert str(told.value).startswith(line)
    replace, skip = Unfit("replace"), Unfit("skip")
    assert documents(path, kind, replace) == ["fine", "caf\ufffd \ufffd\ufffd", "漢", "\ufffd"]
    assert documents(path, kind, skip) == ["fine", "漢"]
    one, two = str(tmp_path / first), str(tmp_path / last)
    expected = {one: (2, 5, at)} if one == two else {one: (1, 3, at), two: (1, 2, last_at)}
    assert replace.found == skip.found == expected


def test_halves_of_surrogate_pairs_are_no_text(tmp_path: Path) -> None:
    fine = json.dumps({"text": "😀 \\ud83d", "other": "\ud83d"})  # only the text counts, and a pair is whole
    (tmp_path / "a.jsonl").write_text(fine + "\n" + r'{"text": "a\uD83d\ud83d"}' + "\n")
    replace, skip = Unfit("replace"), Unfit("skip")
    assert documents(tmp_path / "a.jsonl", "jsonl", replace) == ["😀 \\ud83d", "a??"]
    assert documents(tmp_path / "a.jsonl", "jsonl", skip) == ["😀 \\ud83d"]
    assert replace.found == skip.found == {str(tmp_path / "a.jsonl"): (1, 6, f"byte {len(fine) + 1}")}
    with pytest.raises(UserError, match=rf"^data.invalid=refuse: byte {len(fine) + 1} of "):
        documents(tmp_path / "a.jsonl", "jsonl", Unfit("refuse"))


def test_rows_without_text_and_lines_that_are_no_json(tmp_path: Path) -> None:
    lines = ['{"text": "fine"}', '{"text": null}', '{"text": 3}', "{torn", "[1]", '{"text": "too"}']
    starts = [sum(len(each) + 1 for each in lines[:number]) for number in range(len(lines))]
    for number, what in {1: "is not text but NoneType in line 2 of", 2: "int in line 2 of", 3: "line 2 is not JSON ("}.items():
        (tmp_path / "a.jsonl").write_text(f"{lines[0]}\n{lines[number]}\n")
        for rule in ("refuse", "replace"):
            with pytest.raises(UserError) as caught:
                documents(tmp_path / "a.jsonl", "jsonl", Unfit(rule))  # type: ignore[arg-type]
            assert what in str(caught.value)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    skip, path = Unfit("skip"), str(tmp_path / "a.jsonl")
    assert documents(tmp_path / "a.jsonl", "jsonl", skip) == ["fine", "too"]
    assert skip.found == {path: (4, 0, f"is not text but NoneType in the line at byte {starts[1]}")}
    tally = Tally()
    tally.add(skip.found)
    assert unfit_summary({"unfit": {"rule": "skip", **tally.as_dict()}}) == (
        f"4 documents in 1 files cannot be used; they are left out: {path} (4, the first: {skip.found[path][2]})"
    )


def test_null_rows_of_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [*"abcde", None, "g"]}), tmp_path / "a.parquet", row_group_size=3)
    with pytest.raises(
        UserError, match=r"^data.text_field=text: is not text but NoneType in row 2 of row group 1 of .*a.parquet"
    ):
        documents(tmp_path / "a.parquet", "parquet", Unfit("refuse"))
    skip = Unfit("skip")
    assert documents(tmp_path / "a.parquet", "parquet", skip) == [*"abcdeg"]
    assert skip.found == {str(tmp_path / "a.parquet"): (1, 0, "is not text but NoneType in row 2 of row group 1")}


def test_binary_files_are_left_out_or_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    skip = Unfit("skip")
    assert documents(tmp_path / "a.txt", "text", skip) == []
    assert skip.found == {str(tmp_path / "a.txt"): (1, 10, "byte 3")}
    for rule in ("refuse", "replace"):
        with pytest.raises(UserError, match="is not UTF-8 text but binary"):
            documents(tmp_path / "a.txt", "text", Unfit(rule))  # type: ignore[arg-type]


def test_nested_text_in_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = pyarrow.array([b"fine", b"bad \xff", b"fine"], pyarrow.binary()).view(pyarrow.string())
    structs = pyarrow.StructArray.from_arrays([content, pyarrow.array(["user"] * 3)], names=["content", "role"])
    lists = pyarrow.ListArray.from_arrays([0, 2, 3], structs)
    parquet.write_table(pyarrow.table({"messages": lists}), tmp_path / "a.parquet")
    (part,) = cut(_list_files("parquet", str(tmp_path / "a.parquet"), "data.path"))
    replace, skip = Unfit("replace"), Unfit("skip")
    rows = [row.value for row in read_rows(part, "f", "messages", replace)]
    user = {"role": "user"}
    assert rows == [[{"content": "fine", **user}, {"content": "bad \ufffd", **user}], [{"content": "fine", **user}]]
    assert [row.value for row in read_rows(part, "f", "messages", skip)] == rows[1:]
    assert replace.found == {str(tmp_path / "a.parquet"): (1, 1, "row 0 of row group 0")}
    assert _value_of(content.dictionary_encode()[1]) == ("bad \ufffd", 1)
    pairs = pyarrow.MapArray.from_arrays([0, 2], content[:2], content[1:])
    assert _value_of(pairs[0]) == ({"fine": "bad \ufffd", "bad \ufffd": "fine"}, 2)


def test_the_tally_names_few_files_and_counts_all() -> None:
    tally = Tally()
    for number in range(30):
        for _ in range(2):  # two parts of a file
            tally.add({f"f{number}": (1, 3, "byte 7")})
        tally.add({})
    found = tally.as_dict()
    assert {key: found[key] for key in ("documents", "bytes", "files")} == {"documents": 60, "bytes": 180, "files": 30}
    assert found["first"][0] == {"file": "f0", "documents": 2, "bytes": 6, "at": "byte 7"}
    assert len(found["first"]) == 10
    line = unfit_summary({"unfit": {"rule": "skip", **found}})
    assert line == (
        "60 documents in 30 files cannot be used (180 bytes are not UTF-8); they are left out: f0 (2, the first: byte 7), "
        "f1 (2, the first: byte 7), f2 (2, the first: byte 7), and 27 more files"
    )
    kept = unfit_summary({"unfit": {"rule": "replace", **found}})
    assert str(kept).startswith("60 documents in 30 files are not UTF-8, 180 bytes of them; their bad bytes are U+FFFD: f0 (2,")
    assert unfit_summary({"unfit": {"rule": "skip", **Tally().as_dict()}}) is None

"""Files on disks and in stores, compressed or not: listing, reading, and what is wrong with them in one line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pyarrow
import pytest

from foldray.errors import UserError
from tests.s3 import ENVIRONMENT, NO_MOTO, moto_server, s3_server
from trainers.data import places, rows
from trainers.data.places import find, open_plain, open_text, size_of
from trainers.data.rows import cut, read_documents
from trainers.data.sources import _list_files
from trainers.data.store_listing import listed
from trainers.data.unfit import Unfit


def zstd(content: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip
LINES = [f"line {number} " + "é漢" * (number % 7) for number in range(500)]
JSONL = "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()


def documents(path: str | Path, kind: str = "jsonl") -> list[str]:
    parts = cut(_list_files(kind, str(path), "data.path"))
    return [text for part in parts for text in read_documents(part, "text", Unfit("refuse"))]


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_files_read_like_plain_ones(tmp_path: Path, ending: str) -> None:
    half = JSONL.index(b"\n", len(JSONL) // 2) + 1
    pack = COMPRESS[ending]
    (tmp_path / f"one.jsonl{ending}").write_bytes(pack(JSONL))
    (tmp_path / f"two.jsonl{ending}").write_bytes(pack(JSONL[:half]) + pack(JSONL[half:]))  # as `cat` and pigz make them
    (tmp_path / f"text{ending}").write_bytes(pack(JSONL))
    for name in ("one", "two"):
        assert documents(tmp_path / f"{name}.jsonl{ending}") == LINES
    assert documents(tmp_path / f"text{ending}", "text") == [JSONL.decode()]


@pytest.mark.parametrize("kind", ["jsonl", "text"])
@pytest.mark.parametrize("ending", COMPRESS)
def test_cut_and_damaged_files_are_one_line(tmp_path: Path, ending: str, kind: str) -> None:
    whole = COMPRESS[ending](json.dumps({"text": os.urandom(3000).hex()}).encode() + b"\n" + JSONL)
    path = tmp_path / f"a{ending}"
    flipped = bytes([*whole[: len(whole) // 2], whole[len(whole) // 2] ^ 255, *whole[len(whole) // 2 + 1 :]])
    told = "is a compressed file that is cut or damaged"
    damages = [whole[:-9], whole[: len(whole) // 2], b"no archive" * 9, b""]
    for damaged in damages if ending == ".zst" else [*damages, flipped]:  # zstd has checksums only on demand
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=told if damaged is not flipped else f"({told}|is not JSON|is not UTF-8)"):
            documents(path, kind)


@pytest.mark.parametrize("chunk", [3, 1 << 16])
@pytest.mark.parametrize("ending", COMPRESS)
def test_nothing_behind_a_stream_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, chunk: int) -> None:
    monkeypatch.setattr(places, "_CHUNK", chunk)
    lines, path = LINES[:6], tmp_path / f"a.jsonl{ending}"
    parts = ["".join(json.dumps({"text": line}) + "\n" for line in each).encode() for each in (lines[:3], lines[3:])]
    one, two = map(COMPRESS[ending], parts)
    first, fourth = (bytes(byte ^ 255 if at == place else byte for at, byte in enumerate(two)) for place in (0, 3))
    padded = [one + bytes(zeros) + two + bytes(behind) for zeros, behind in ((4, 0), (64, 8), (0, 4), (64, 64))]
    # bzip2 and zstd know no padding. In xz it comes in fours.
    allowed = {".xz": padded, ".gz": padded}.get(ending, [])
    refused = [one + first, one + fourth, one + two[:3], one + b"garbage", one + parts[1], bytes(18)]
    if ending == ".xz":
        refused += [one + bytes(5) + two, one + two + bytes(2)]
    for content in allowed:
        path.write_bytes(content)
        assert documents(path) == lines
    for content in refused + [each for each in padded if not allowed]:
        path.write_bytes(content)
        with pytest.raises(UserError, match="is a compressed file that is cut or damaged"):
            documents(path)


@pytest.mark.gate(1 / 2)
def test_a_file_that_expands_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_MOST_DOCUMENT", 1 << 20)
    monkeypatch.setattr(rows, "_LONGEST_LINE", 1 << 20)
    for ending, pack in COMPRESS.items():
        path = tmp_path / f"a{ending}"
        path.write_bytes(pack(b"a" * (64 << 20)))
        assert path.stat().st_size < 1 << 17
        with pytest.raises(UserError, match="holds more than 1048576 bytes of text, one document"):
            documents(path, "text")
        with pytest.raises(UserError, match="line 1 has more than 1 MiB"):
            documents(path, "jsonl")


def test_a_file_uri_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_bytes(JSONL)
    assert documents(f"file://{tmp_path}/a%20b.jsonl") == LINES
    (tmp_path / "v#1?.jsonl").write_bytes(JSONL)
    for name in ("v#1?.jsonl", "v%231%3F.jsonl", "v#?[?].jsonl"):
        assert documents(f"file://{tmp_path}/{name}") == LINES


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("s3://me:hush@bucket/*", "holds a password, a key or a token"),
        ("https://host/a.txt?token=hush", "holds a password, a key or a token"),
        ("nowhere://bucket/*", "cannot be listed (Protocol not known: nowhere"),
        ("memory://nothing/*", "matches no file that the store shows"),
        ("s3://bucket/*?endpoint_override=127.0.0.1:9&scheme=http&region=x", "cannot be listed (When getting information"),
    ],
)
def test_stores_that_cannot_be_read_are_one_line(pattern: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "hush")
    with pytest.raises(UserError) as error:
        find("data.path", pattern)
    line = str(error.value)
    assert told in line
    assert "\n" not in line
    assert "hush" not in line


@pytest.mark.gate(1 / 2)
def test_a_store_that_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_REACHED_S", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = silent.getsockname()[1]
        with pytest.raises(UserError, match="is in a store that gives no answer in 4 s"):
            find("data.path", f"s3://bucket/*?endpoint_override=127.0.0.1:{at}&scheme=http&region=x")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("web")
    for name in ("a.jsonl", "a b.jsonl"):
        (folder / name).write_bytes(JSONL)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(JSONL))

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object, **more: object):
            super().__init__(*arguments, directory=str(folder), **more)  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_files_of_a_web_server(web: str) -> None:
    for name in ("a.jsonl", "a.jsonl.gz?download=true"):
        assert documents(f"{web}/{name}") == LINES
    for name in ("a.jsonl.gz?of=x/y", "a b.jsonl", "a%20b.jsonl?at=1#all"):
        ((path, *_),) = listed(f"{web}/{name}")
        with open_text(path) as file:
            assert file.read() == JSONL
    with pytest.raises(UserError, match="matches no file that the store shows"):
        find("data.path", f"{web}/b.jsonl")


KEYS = [
    "a 1.jsonl", "größe.jsonl", "a%41b.jsonl", "aAb.jsonl", "v#1.jsonl", "what?.jsonl", "x[1].jsonl", "50%.jsonl", "a%2Fb.jsonl",
    "day=2024-01-01.jsonl", "a+b.jsonl", "c&d.jsonl", "a:b.jsonl", "a*.jsonl", "in [1] #2/a%20b.jsonl",
]  # fmt: skip


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server of S3 with the bucket `texts`. Its value is the options of a URI."""
    if moto_server() is None:
        pytest.skip(NO_MOTO)
    with pytest.MonkeyPatch.context() as patch, s3_server() as server:
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        files = server.files()
        files.create_dir("texts")
        stored = {f"deep/er/c.jsonl{ending}": pack(JSONL) for ending, pack in COMPRESS.items()}
        for name, content in {"a.jsonl": JSONL, "b.jsonl.gz": gzip.compress(JSONL), "x.md": b"x", **stored}.items():
            with files.open_output_stream(f"texts/{name}", compression=None) as stream:
                stream.write(content)
        files.create_dir("keys")
        for key in KEYS:
            with files.open_output_stream(f"keys/{key}") as stream:
                stream.write(key.encode())
        yield server.options


@pytest.mark.gate(1 / 2)
def test_files_of_s3(s3: str) -> None:
    found = find("data.path", f"s3://texts/*.jsonl*{s3}")
    assert [(place.path, place.name, place.size) for place in found][:1] == [(f"s3://texts/a.jsonl{s3}", "a.jsonl", len(JSONL))]
    assert [place.name for place in found] == ["a.jsonl", "b.jsonl.gz"]
    assert all(place.mtime_ns for place in found)
    assert len(find("data.path", f"s3://texts/**/*.jsonl*{s3}")) == 2 + len(COMPRESS)
    assert documents(f"s3://texts/[ab].jsonl*{s3}") == LINES * 2
    assert documents(f"s3://texts/deep/**/*.jsonl*{s3}") == LINES * len(COMPRESS)
    with open_text(f"s3://texts/a.jsonl{s3}") as file:
        file.seek(10)
        assert file.readline() == JSONL[10:].split(b"\n")[0] + b"\n"
    assert size_of(f"s3://texts/a.jsonl{s3}") == len(JSONL)


def test_any_key_of_s3(s3: str) -> None:
    def found(pattern: str) -> dict[str, str]:
        """Return the content of each file, which is its key, by its name."""
        return {name: open_plain(path).read().decode() for path, name, *_ in listed(f"s3://keys/{pattern}{s3}")}

    assert found("**") == {key: key for key in KEYS}
    for key in ("x[1].jsonl", "v#1.jsonl", "50%.jsonl", KEYS[-1]):
        assert [*found(key).values()] == [*found(quote(key)).values()] == [key]
    assert [*found("what%3f.jsonl")] == ["what?.jsonl"]  # a question mark begins the options
    assert found("in [[]1] #2/*") == {KEYS[-1]: KEYS[-1]}
    assert [*found("a%41b.jsonl")] == ["a%41b.jsonl"]  # not the other one


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("s3://absent/*", "there is no bucket absent, or it is not shown to you"),
        ("s3://texts/*.txt", "matches no file that the store shows"),
        ("s3://texts/deep", "matches no file that the store shows"),
    ],
)
def test_what_s3_does_not_have_is_one_line(s3: str, pattern: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        find("data.path", pattern + s3)
    assert told in str(error.value)


def test_a_file_that_is_gone_from_its_store_is_one_line(s3: str) -> None:
    (part,) = cut(_list_files("text", f"s3://texts/x.md{s3}", "data.path"))
    gone = rows.Part(
        rows.SourceFile("text", "y", part.file.path.replace("x.md", "y.md"), 1, 0), part.start, part.stop, part.size, part.last
    )
    with pytest.raises(UserError, match=r"y.md.*: cannot be read on node .* its store must be in reach of every node"):
        list(read_documents(gone, "text", Unfit("refuse")))

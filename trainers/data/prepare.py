"""Prepares data: documents become tokens, and tokens become packed sequences on disk. Equal inputs are prepared once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from foldray.errors import UserError
from foldray.recipe import DataSpec, SourceSpec
from trainers.data import conversations
from trainers.data.baselines import PAIRS, SMOOTHING, fit
from trainers.data.chat import Chat
from trainers.data.conversations import Reader
from trainers.data.encode import Encoded, Work, deal, encode, encode_all, token_dtype
from trainers.data.mixture import FILE, Mixture, document, is_whole, opened
from trainers.data.packed import FORMAT, PackedData, is_intact
from trainers.data.rows import check_field, cut
from trainers.data.shards import SplitWriter
from trainers.data.sources import STORED, SourceFile, python_version, split_files
from trainers.data.tokenizers import Tokenizer, load_tokenizer
from trainers.data.unfit import Tally, refused

_PACKING = 1
"""Version of the rules by which documents become sequences. Other rules would change the data of runs that go on."""
Progress = Callable[[int, int, str], None]
"""A function that is called with the number of finished files, the number of all files, and the name of the work."""


def prepare(data: DataSpec, vocab: int, cache: str | Path, progress: Progress | None = None) -> PackedData | Mixture:
    """Tokenize and pack the recipe's documents into `<cache>/<digest>/`, unless this folder exists.

    Each source of a mixture has a folder of its own, so weights may change without new preparation. One more folder names
    the sources and their weights.

    The work runs on Ray, which the caller must have initialised. Every node must see the files, and every worker must see
    the cache. The result does not depend on the number of CPUs. The folder appears only when it is complete.

    Args:
        data: section `data` of the recipe.
        vocab: number of ids that the model knows.
        cache: folder of all packed data.
        progress: called with the number of finished files.

    Raises:
        UserError: the data cannot be found, read, split or stored, or the tokenizer has more ids than the model.
        RuntimeError: the data have to be prepared, and Ray is not initialised.
    """
    if data.sources is None:
        return _prepare(data, vocab, cache, progress)
    parts = dict[str, PackedData]()
    for name, part in data.parts.items():
        with _named(name):
            parts[name] = _prepare(part, vocab, cache, progress)
    content = document(parts.values(), data.weights)
    folder = cache_folder(cache) / _digest(content)
    if not is_whole(folder, content):
        with _draft(folder, lambda: is_whole(folder, content)) as draft, _writing(folder):
            (draft / FILE).write_text(json.dumps(content, indent=1))
    return opened(folder, list(parts))


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Give errors the names of the keys of one source."""
    try:
        yield
    except UserError as error:
        key = error.field.removeprefix("data.")
        if key == "seq_len":
            raise UserError(error.field, error.value, f"source {source}: {error.rule}", error.legal) from None
        if key.partition(".")[0] not in SourceSpec.model_fields:
            raise
        raise UserError(f"data.sources.{source}.{key}", error.value, error.rule, error.legal) from None


def _digest(inputs: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _prepare(data: DataSpec, vocab: int, cache: str | Path, progress: Progress | None) -> PackedData:
    tokenizer = load_tokenizer(data.tokenizer)
    if vocab < tokenizer.vocab_size:
        rule = f"must be at least {tokenizer.vocab_size}, the ids of data.tokenizer={data.tokenizer}"
        raise UserError("model.vocab", vocab, rule)
    encoding = _encoding(data, tokenizer)
    train, validation = split_files(data)
    for files in (train, validation):
        encoding.check(files[0])
    inputs = _inputs(data, tokenizer, train, validation)
    folder = cache_folder(cache) / _digest(inputs)
    if not is_intact(folder):
        if not ray.is_initialized():
            raise RuntimeError("prepare() needs an initialised Ray: call ray.init() first")
        with _draft(folder, lambda: is_intact(folder)) as draft:
            _write(draft, data, tokenizer, encoding, inputs, train, validation, progress)
    packed = PackedData.open(folder)
    if data.invalid == "refuse" and (first := packed.meta["unfit"]["first"]):  # prepared under another rule
        raise refused(first[0]["file"], first[0]["at"])
    return packed


def cache_folder(cache: str | Path) -> Path:
    """Return the absolute path of the folder of all packed data.

    Raises:
        UserError: the path begins with the home of an unknown user.
    """
    try:
        return Path(cache).expanduser().absolute()
    except RuntimeError:
        raise UserError("data.cache", cache, "names the home of an unknown user") from None


class _Encoding(NamedTuple):
    """How documents of one kind become tokens.

    Args:
        check: checks the beginning of a file.
        encode: encodes a work (`encode_all`).
        end: what follows the last token of a split, or nothing.
        least: bytes of text of the smallest work.
    """

    check: Callable[[SourceFile], None]
    encode: Callable[[Work], Encoded]
    end: Encoded | None = None
    least: int = 1 << 20


def _encoding(data: DataSpec, tokenizer: Tokenizer) -> _Encoding:
    if data.source != "conversations":
        check = partial(check_field, text_field=data.text_field, rule=data.invalid)
        return _Encoding(check, partial(encode, tokenizer=tokenizer, text_field=data.text_field, rule=data.invalid))
    reader = Reader(Chat(tokenizer), data.messages_field, data.train_on == "assistant", data.invalid)
    pack = partial(conversations.encode, reader=reader, seq_len=data.seq_len)
    # Works are packed one by one, so each has enough text for many sequences.
    return _Encoding(reader.check, pack, conversations.end(tokenizer), least=max(1 << 20, 256 * data.seq_len))


def _inputs(data: DataSpec, tokenizer: Tokenizer, train: list[SourceFile], validation: list[SourceFile]) -> dict[str, Any]:
    """Return all inputs that the packed data depends on."""

    split = data.validation.model_dump()
    if split["path"] is not None and STORED.search(split["path"]):
        split["path"] = None  # the file's hash is below

    def listed(file: SourceFile) -> list[Any]:
        if STORED.search(file.path):
            return [file.name]
        # A new installation of the same Python version changes the times of its library's files, but not their text.
        return [file.name, file.size] if file.kind == "stdlib" else [file.path, file.size, file.mtime_ns]

    return {
        "format": _PACKING,
        "source": data.source,
        "python": python_version() if data.source == "stdlib" else None,
        "text_field": data.text_field if data.source in ("jsonl", "parquet") else None,
        **({"messages_field": data.messages_field, "train_on": data.train_on} if data.masked else {}),
        # What other rules accept does not depend on the rule.
        **({"invalid": "skip"} if data.invalid == "skip" else {}),
        "tokenizer": tokenizer.fingerprint,
        "seq_len": data.seq_len,
        "split": split,
        "train": [listed(file) for file in train],
        "validation": [listed(file) for file in validation],
    }


def _write(
    folder: Path,
    data: DataSpec,
    tokenizer: Tokenizer,
    encoding: _Encoding,
    inputs: dict[str, Any],
    train: list[SourceFile],
    validation: list[SourceFile],
    progress: Progress | None,
) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    writers = [SplitWriter(folder, name, data.seq_len, dtype) for name in ("train", "validation")]
    works = [
        work
        for files, held_back in ((train, False), (validation, True))
        for work in deal(cut(files), validation=held_back, least=encoding.least)
    ]
    costs, tally = _Costs(), Tally()
    done, total = 0, len(train) + len(validation)
    with closing(encode_all(works, encoding.encode)) as pieces:
        for piece in pieces:
            with _writing(folder):
                writers[piece.validation].add(piece, costs.of(piece))
            tally.add(piece.unfit)
            done += piece.files
            if progress is not None:
                progress(done, total, "tokenizing")
    for name, writer in zip(("training", "validation"), writers, strict=True):
        if encoding.end is not None:
            writer.add(encoding.end)
        if not writer.sequences:
            rule = f"one sequence needs {data.seq_len + 1} tokens, but the {name} documents have {writer.tokens} in all"
            if data.masked:
                rule = f"no conversation for {name} has a token to train on among its first {data.seq_len}"
            raise UserError("data.seq_len", data.seq_len, rule)
    with _writing(folder):
        counts = [writer.finish(shuffled) for writer, shuffled in zip(writers, (False, True), strict=True)]
        _write_meta(folder, data, tokenizer, inputs, counts, {"rule": data.invalid, **tally.as_dict()})


class _Costs:
    """What validation text costs under the byte models of the training text, which comes first."""

    def __init__(self) -> None:
        self._counts, self._table = np.zeros(PAIRS, np.int64), np.empty(0)

    def of(self, piece: Encoded) -> np.ndarray | None:
        """Return the bits of each byte of a piece, float64 [2, T]; None for training text and for conversations."""
        if piece.pairs is None:
            return None
        if not piece.validation:
            self._counts += piece.pairs
            return None
        if not self._table.size:
            self._table = fit(self._counts)
        return self._table[:, piece.pairs]


def _write_meta(
    folder: Path,
    data: DataSpec,
    tokenizer: Tokenizer,
    inputs: dict[str, Any],
    counts: list[dict[str, Any]],
    unfit: dict[str, Any],
) -> None:
    (folder / "inputs.json").write_text(json.dumps(inputs, indent=1))
    train, validation = counts
    meta = {
        "format": FORMAT,
        "source": data.source,
        "tokenizer": data.tokenizer,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "seq_len": data.seq_len,
        "baseline_smoothing": SMOOTHING,
        "unfit": unfit,
        "train": {"files": len(inputs["train"]), **train},
        "validation": {"files": len(inputs["validation"]), **validation},
        "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


@contextmanager
def _draft(folder: Path, is_done: Callable[[], bool]) -> Iterator[Path]:
    """Make a new folder beside `folder`. It becomes `folder` at the end, or is deleted after an error.

    Args:
        is_done: whether `folder` is whole already.
    """
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    with _writing(folder):
        draft.mkdir(parents=True)
    try:
        yield draft
        with _writing(folder):
            _publish(draft, folder, is_done)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, folder: Path, is_done: Callable[[], bool]) -> None:
    if folder.exists() and not is_done():
        shutil.rmtree(folder)
    try:
        os.replace(draft, folder)
    except OSError:
        # Another driver has prepared the same data meanwhile. Its folder is as good as this one.
        if not is_done():
            raise


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError("data.cache", folder.parent, f"cannot be written ({error.strerror or error})") from None

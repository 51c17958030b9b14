"""Prepares data: documents become tokens, and tokens become packed sequences on disk. Equal inputs are prepared once."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray

from foldray.errors import UserError
from foldray.recipe import DataSpec, SourceSpec
from foldray.recipe.data import Invalid
from trainers.data import conversations, shards
from trainers.data.baselines import PAIRS, SMOOTHING, fit
from trainers.data.chat import Chat
from trainers.data.conversations import Reader
from trainers.data.drafts import check_seen, draft, writing
from trainers.data.encode import Work, deal, encode, run_all, token_dtype
from trainers.data.identity import digest
from trainers.data.mixture import FILE, Mixture, document, is_whole, opened
from trainers.data.packed import FORMAT, PackedData, is_intact
from trainers.data.places import suffix
from trainers.data.rows import check_field, cut
from trainers.data.shards import Index, Piece, Written
from trainers.data.sources import STORED, SourceFile, split_files
from trainers.data.tokenizers import Tokenizer, content_of, load_tokenizer
from trainers.data.unfit import Tally, Unfit, refused, unfit_summary

_PACKING = 2
"""Version of the rules by which documents become sequences. Files that both versions read alike have version 1, because another
version would change the data of runs that go on."""
_DIGITS = 16  # in the name of a folder
_Files = dict[str, list[SourceFile]]
Progress = Callable[[int, int, str], None]
"""A function that is called with the number of finished files, the number of all files, and the name of the work."""


def prepare(data: DataSpec, vocab: int, cache: str | Path, progress: Progress | None = None) -> PackedData | Mixture:
    """Tokenize and pack the recipe's documents into `<cache>/<digest>/`, unless this folder exists.

    Each source of a mixture has a folder of its own, so weights may change without new preparation. One more folder names
    the sources and their weights.

    The work runs on Ray, which the caller must have initialised. Tasks read, tokenize and write files; the driver gathers
    counts alone. Every node must see the files and the cache. The result does not depend on the number of tasks. The folder
    appears only when it is complete.

    Args:
        vocab: number of ids that the model knows.
    """
    if data.sources is None:
        return _prepare(data, vocab, cache, progress)
    parts = dict[str, PackedData]()
    for name, part in data.parts.items():
        with _named(name):
            parts[name] = _prepare(part, vocab, cache, progress)
    content = document(parts.values(), data.weights)
    folder = cache_folder(cache) / digest(content)[:_DIGITS]
    if not is_whole(folder, content):
        with draft(folder, lambda: is_whole(folder, content)) as hidden, writing(folder):
            (hidden / FILE).write_text(json.dumps(content, indent=1))
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


def _prepare(data: DataSpec, vocab: int, cache: str | Path, progress: Progress | None) -> PackedData:
    tokenizer = load_tokenizer(data.tokenizer)
    if vocab < tokenizer.vocab_size:
        rule = f"must be at least {tokenizer.vocab_size}, the ids of data.tokenizer={data.tokenizer}"
        raise UserError("model.vocab", vocab, rule)
    encoding = _encoding(data, tokenizer)
    files = dict(zip(("train", "validation"), split_files(data), strict=True))
    for content in files.values():
        encoding.check(content[0])
    inputs = _inputs(data, tokenizer, files)
    folder = cache_folder(cache) / digest(inputs)[:_DIGITS]
    if not is_intact(folder) and data.tokenizer != "byte":
        # An earlier version knew a tokenizer by all files in its folder.
        earlier = folder.with_name(digest({**inputs, "tokenizer": content_of(data.tokenizer)})[:_DIGITS])
        folder = earlier if is_intact(earlier) else folder
    if not is_intact(folder):
        if not ray.is_initialized():
            raise RuntimeError("prepare() needs an initialised Ray: call ray.init() first")
        with draft(folder, lambda: is_intact(folder)) as hidden:
            _write(hidden, data, tokenizer, encoding, inputs, files, progress)
    packed = PackedData.open(folder)
    if data.invalid == "refuse" and (unfit := packed.meta["unfit"]["first"]):  # prepared under another rule
        raise refused(unfit[0]["file"], unfit[0]["at"])
    return packed


def cache_folder(cache: str | Path) -> Path:
    """Return the absolute path of the folder of all packed data."""
    try:
        return Path(cache).expanduser().absolute()
    except RuntimeError:
        raise UserError("data.cache", cache, "names the home of an unknown user") from None


class _Encoding(NamedTuple):
    """How documents of one kind become tokens.

    Args:
        end: what follows the last token of a split, or nothing.
        least: bytes of text of the smallest work.
    """

    check: Callable[[SourceFile], None]
    encode: Callable[[Work, Unfit], Iterator[Piece]]
    end: Piece | None = None
    least: int = 1 << 20


def _encoding(data: DataSpec, tokenizer: Tokenizer) -> _Encoding:
    if data.source != "conversations":
        check = partial(check_field, text_field=data.text_field, rule=data.invalid)
        return _Encoding(check, partial(encode, tokenizer=tokenizer, text_field=data.text_field))
    reader = Reader(Chat(tokenizer), data.messages_field, data.train_on == "assistant", data.invalid)
    pack = partial(conversations.encode, reader=reader, seq_len=data.seq_len)
    # Works are packed one by one, so each has enough text for many sequences.
    return _Encoding(reader.check, pack, conversations.end(tokenizer), least=max(1 << 20, 256 * data.seq_len))


def _inputs(data: DataSpec, tokenizer: Tokenizer, files: _Files) -> dict[str, Any]:
    """Return all inputs that the packed data depends on."""
    split = data.validation.model_dump()
    if split["path"] is not None and STORED.search(split["path"]):
        split["path"] = None  # the file's hash is below

    def listed(file: SourceFile) -> list[Any]:
        if stored := STORED.search(file.path):
            return [stored[1]]
        # A new installation of the same Python version changes the times of its library's files, but not their text.
        return [file.name, file.size] if file.kind == "stdlib" else [file.path, file.size, file.mtime_ns]

    def is_new(file: SourceFile) -> bool:
        return suffix(file.path) in (".bz2", ".xz") or (data.masked and file.kind == "parquet")

    return {
        "format": _PACKING if any(map(is_new, chain(*files.values()))) else 1,
        "source": data.source,
        "python": platform.python_version() if data.source == "stdlib" else None,
        "text_field": data.text_field if data.source in ("jsonl", "parquet") else None,
        **({"messages_field": data.messages_field, "train_on": data.train_on} if data.masked else {}),
        # What other rules accept does not depend on the rule.
        **({"invalid": "skip"} if data.invalid == "skip" else {}),
        # A chat template and its tokens are in further files than those that make tokens of text.
        "tokenizer": content_of(data.tokenizer) if data.masked else tokenizer.fingerprint,
        "seq_len": data.seq_len,
        "split": split,
        # Stored documents may be in several files, which are one input.
        **{side: [document for document, _ in groupby(map(listed, content))] for side, content in files.items()},
    }


def _encode(call: tuple[Work, int], folder: Path, encode: Callable[[Work, Unfit], Iterator[Piece]], invalid: Invalid) -> Written:
    """Encode a work, and write its files. A task does this, and returns what the driver gathers."""
    (work, number), unfit = call, Unfit(invalid)
    try:
        return shards.write(folder, work.split, number, encode(work, unfit), unfit.found, work.mark)
    except OSError as error:  # those of reading are UserErrors
        rule = f"cannot be written on node {platform.node()} ({error.strerror or error}); every node must see it"
        raise UserError("data.cache", folder.parent, rule) from None


def _write(
    folder: Path,
    data: DataSpec,
    tokenizer: Tokenizer,
    encoding: _Encoding,
    inputs: dict[str, Any],
    files: _Files,
    progress: Progress | None,
) -> None:
    works = {split: deal(cut(content), split, least=encoding.least) for split, content in files.items()}
    indices, tally = {split: Index(data.seq_len) for split in works}, Tally()
    calls = [(work, number) for group in works.values() for number, work in enumerate(group)]
    done, total = 0, sum(map(len, files.values()))
    task = partial(_encode, folder=folder, encode=encoding.encode, invalid=data.invalid)
    with closing(_written(folder, calls, task)) as results:
        for (work, _), result in zip(calls, results, strict=True):
            indices[work.split].add(result)
            tally.add(result.unfit)
            done += work.files
            if progress is not None:
                progress(done, total, "tokenizing")
    unfit, masked = {"rule": data.invalid, **tally.as_dict()}, encoding.end is not None
    with writing(folder):
        for (split, index), name in zip(indices.items(), ("training", "validation"), strict=True):
            if encoding.end is not None:
                index.add(shards.write(folder, split, len(works[split]), [encoding.end], {}))
            if not index.sequences:
                raise _too_short(data, name, index.tokens, unfit_summary({"unfit": unfit}))
        if not masked:
            _add_costs(folder, len(works["train"]), indices["validation"])
        counts = {split: index.finish(folder, split, masked) for split, index in indices.items()}
        for path in shards.passing(folder):
            path.unlink()
        (folder / "inputs.json").write_text(json.dumps(inputs, indent=1))
        meta = {
            "format": FORMAT,
            "source": data.source,
            "tokenizer": data.tokenizer,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "separator": tokenizer.separator,
            "dtype": token_dtype(tokenizer.vocab_size).name,
            "seq_len": data.seq_len,
            "baseline_smoothing": SMOOTHING,
            "unfit": unfit,
            **{split: {"files": len(inputs[split]), **count} for split, count in counts.items()},
            "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.suffix in (".npy", ".json")},
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _written(
    folder: Path, calls: list[tuple[Work, int]], task: Callable[[tuple[Work, int]], Written]
) -> Generator[Written, None, None]:
    """Yield what the works have written, in order. What an earlier preparation has written stays."""
    earlier = [shards.written(folder, work.split, number, work.mark) for work, number in calls]
    missing = [call for call, result in zip(calls, earlier, strict=True) if result is None]
    new = run_all(missing, task) if missing else iter(())
    for (work, number), known in zip(calls, earlier, strict=True):
        result = next(new) if known is None else known
        check_seen(partial(shards.is_seen, folder, work.split, number, result), folder.parent, result.node)
        yield result


def _add_costs(folder: Path, train_works: int, index: Index) -> None:
    """Add what validation text costs under the byte models of the training text."""
    pairs = np.zeros(PAIRS, np.int64)
    for number in range(train_works):
        pairs += shards.read(shards.file_of(folder, "train", number, "counts"), pairs.dtype)
    calls, seq_len, table = list(enumerate(index.offsets)), index.seq_len, fit(pairs)
    index.add_costs(run_all(calls, lambda call: shards.costs(folder, call[0], call[1], seq_len, table)))


def _too_short(data: DataSpec, name: str, tokens: int, unfit: str | None) -> UserError:
    rule = f"one sequence needs {data.seq_len + 1} tokens, but the {name} documents have {tokens} in all"
    if data.masked:
        rule = f"no conversation for {name} has a token to train on among its first {data.seq_len}"
    return UserError("data.seq_len", data.seq_len, "; ".join(filter(None, (rule, unfit))))

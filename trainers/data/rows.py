"""Documents in files: files are cut into parts, and parts are read row by row."""

from __future__ import annotations

import json
import lzma
import platform
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from foldray.errors import UserError
from foldray.recipe.data import Invalid
from trainers.data.places import is_uri, open_plain, open_text, size_of, suffix
from trainers.data.sources import SourceFile
from trainers.data.unfit import Unfit, decode, halves_in, mended

_PART_BYTES = 8 << 20
_HEAD_BYTES = 8 << 10  # the beginning of a file that is checked for zero bytes
_MOST_DOCUMENT = 1 << 30  # bytes of a text that is decompressed
_LONGEST_LINE = 1 << 28  # bytes of a document in a jsonl file
_EXPANDS = 4  # a compressed file is taken to hold this many times its bytes of text
_MOST_ROWS, _BATCH_BYTES = 64, 8 << 20  # of a Parquet file that are decoded at once
_END = 2**63 - 1
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file that is read at once.

    A part is a whole text file, the lines that begin in bytes [start, stop) of a jsonl file, all lines of a compressed one, or
    the row group `start` of a parquet file.
    """

    file: SourceFile
    start: int
    stop: int
    size: int
    """Bytes of text, used to group parts into works."""
    last: bool
    """Whether this is the last part of its file."""


def cut(files: Iterable[SourceFile]) -> Iterator[Part]:
    """Yield the parts of files, in order. The parts do not depend on the number of workers."""
    for file in files:
        if file.kind == "parquet":
            with _reading(file), _open_parquet(file) as table:
                sizes = [table.metadata.row_group(group).total_byte_size for group in range(table.metadata.num_row_groups)]
            spans = [(group, group + 1, size) for group, size in enumerate(sizes)]
        elif suffix(file.path):
            spans = [(0, _END, _EXPANDS * file.size)]
        elif file.kind == "jsonl":
            starts = range(0, file.size, _PART_BYTES)
            spans = [(start, min(start + _PART_BYTES, file.size), _PART_BYTES) for start in starts]
        else:
            spans = [(0, file.size, file.size)]
        # A file without rows gets one empty part, so the file is counted as done.
        spans = spans or [(0, 0, 0)]
        for index, (start, stop, size) in enumerate(spans):
            yield Part(file, start, stop, size, last=index == len(spans) - 1)


def check_field(file: SourceFile, text_field: str, rule: Invalid) -> None:
    """Check the beginning of a file: the text field in the schema or the first line, or zero bytes in a text file."""
    if file.kind == "parquet":
        with _reading(file), _open_parquet(file) as table:
            _check_schema(file, table.schema_arrow, "data.text_field", text_field)
    elif file.kind == "jsonl":
        next(read_documents(Part(file, 0, _END, file.size, last=True), text_field, Unfit(rule)), None)
    else:
        with _reading(file), open_text(file.locate()) as content:
            if rule != "skip":
                _refuse_zeros(content.read(_HEAD_BYTES), file)


def read_documents(part: Part, text_field: str, unfit: Unfit) -> Iterator[str]:
    """Yield the documents of a part, in order."""
    if part.file.kind in ("jsonl", "parquet"):
        for row in read_rows(part, "data.text_field", text_field, unfit):
            if isinstance(row.value, str):
                yield row.value
            else:
                rule = f"is not text but {type(row.value).__name__} in {row.place(unfit)}"
                unfit.leaves(part.file.locate(), UserError("data.text_field", text_field, rule))
        return
    path, packed = part.file.locate(), suffix(part.file.path)
    with _reading(part.file), open_text(path) as file:
        content = file.read(_MOST_DOCUMENT + 1) if packed else file.read()
    if packed and len(content) > _MOST_DOCUMENT:
        rule = f"holds more than {_MOST_DOCUMENT} bytes of text, one document; use lines of JSON for many documents in a file"
        raise UserError("data.path", path, rule)
    if unfit.rule == "skip" and (zero := content.find(b"\0", 0, _HEAD_BYTES)) >= 0:
        unfit.keeps(path, len(content), f"byte {zero}")
        return
    _refuse_zeros(content, part.file)
    text, bad, first = decode(content)
    if not bad or unfit.keeps(path, bad, f"byte {first}"):
        yield text.removeprefix(_BOM)


class Row(NamedTuple):
    """One row of a jsonl or parquet file.

    Args:
        value: the value of the field that is read.
        at: for jsonl the offset of its line in bytes, for parquet its row group.
        number: for parquet its number in the row group.
    """

    value: Any
    file: SourceFile
    at: int
    number: int = 0

    def __str__(self) -> str:
        return f"{self.counted} of {self.file.locate()}"

    @property
    def counted(self) -> str:
        """Where the row is in its file, for people. This counts the lines before it."""
        return self.where if self.file.kind == "parquet" else f"line {_line_number(self.file, self.at)}"

    @property
    def where(self) -> str:
        """Where the row is in its file, without counting."""
        return f"row {self.number} of row group {self.at}" if self.file.kind == "parquet" else f"the line at byte {self.at}"

    def place(self, unfit: Unfit) -> object:
        """Return where the row is, for `unfit.leaves`. No lines are counted for rows that are skipped, which may be many."""
        return self.where if unfit.rule == "skip" else self


def read_rows(part: Part, field: str, key: str, unfit: Unfit) -> Iterator[Row]:
    """Yield the rows of a part of a jsonl or parquet file, in order.

    Args:
        field: name of the recipe key that says which field to read, for errors.
        key: its value: the field of every row that is read.
        unfit: takes the rows that are not UTF-8, and the lines that are no JSON objects.
    """
    with _reading(part.file):
        yield from (_parquet_rows if part.file.kind == "parquet" else _jsonl_rows)(part, field, key, unfit)


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    import pyarrow

    path, ending = file.locate(), suffix(file.path)
    try:
        if size_of(path) != file.size:
            rule = f"has another size on node {platform.node()} than on the driver, or it is being written"
            raise UserError("data.path", path, rule)
        if ending and not file.size:
            raise EOFError("it has no bytes")
        yield
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError("data.path", path, f"is a compressed file that is cut or damaged ({error})") from None
    except (OSError, pyarrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        if ending and not getattr(error, "errno", None):  # decompressors have no numbers for what they find
            raise UserError("data.path", path, f"is a compressed file that is cut or damaged ({reason})") from None
        see = "its store must be in reach of every node" if is_uri(path) else "every node must see the files"
        raise UserError("data.path", path, f"cannot be read on node {platform.node()} ({reason}); {see}") from None


def _refuse_zeros(content: bytes, file: SourceFile) -> None:
    if b"\0" in content[:_HEAD_BYTES]:
        rule = "is not UTF-8 text but binary, or in another encoding: it has zero bytes"
        raise UserError("data.path", file.locate(), rule)


def _jsonl_rows(part: Part, field: str, key: str, unfit: Unfit) -> Iterator[Row]:
    with open_text(part.file.locate()) as lines:
        offset = part.start
        if offset:
            # The line that holds the byte before this part belongs to the previous part.
            lines.seek(offset - 1)
            offset -= 1
            while line := lines.readline(_LONGEST_LINE):
                offset += len(line)
                if line.endswith(b"\n"):
                    break
        while offset < part.stop and (line := lines.readline(_LONGEST_LINE)):
            if len(line) == _LONGEST_LINE:
                rule = f"line {_line_number(part.file, offset)} has more than {_LONGEST_LINE >> 20} MiB"
                raise UserError("data.path", part.file.locate(), rule)
            if line.strip():
                yield from _row_of(line, part.file, offset, field, key, unfit)
            offset += len(line)


def _row_of(line: bytes, file: SourceFile, offset: int, field: str, key: str, unfit: Unfit) -> Iterator[Row]:
    row, (text, bad, first) = Row(None, file, offset), decode(line)
    where = f"byte {offset + first}"
    if bad and unfit.rule != "replace":
        unfit.keeps(file.locate(), bad, where)
        return
    try:
        fields = _object_of(text.removeprefix(_BOM))
    except ValueError as error:
        rule = f"{row.where if unfit.rule == 'skip' else row.counted} {error}"
        unfit.leaves(file.locate(), UserError("data.path", file.locate(), rule))
        return
    if key not in fields:
        raise UserError(field, key, f"is not a field of {row}", fields)
    value = fields[key]
    halves = halves_in(value) if b"\\ud" in line or b"\\uD" in line else 0
    if not bad + halves or unfit.keeps(file.locate(), bad + 3 * halves, where):
        yield row._replace(value=mended(value) if halves else value)


def _object_of(line: str) -> dict[str, Any]:
    """Return the object of a line of JSON, or raise a ValueError that says what the line is."""
    try:
        value = json.loads(line, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _integer(digits: str) -> int | Decimal:
    """Return a number of JSON. Python makes no integers of thousands of digits."""
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


def _line_number(file: SourceFile, offset: int) -> int:
    number = 1
    with open_text(file.locate()) as lines:
        while offset and (chunk := lines.read(min(offset, _PART_BYTES))):
            number, offset = number + chunk.count(b"\n"), offset - len(chunk)
    return number


def _parquet_rows(part: Part, field: str, key: str, unfit: Unfit) -> Iterator[Row]:
    with _open_parquet(part.file) as table:
        _check_schema(part.file, table.schema_arrow, field, key)
        groups = range(part.start, part.stop)
        rows = sum(table.metadata.row_group(group).num_rows for group in groups)
        size = min(_MOST_ROWS, _BATCH_BYTES * rows // max(part.size, 1)) or 1
        batches = table.iter_batches(batch_size=size, row_groups=[*groups], columns=[key]) if groups else ()
        for number, cell in enumerate(cell for batch in batches for cell in batch.column(0)):
            value, bad = _value_of(cell)
            row = Row(value, part.file, part.start, number)
            if not bad or unfit.keeps(part.file.locate(), bad, row.where):
                yield row


def _value_of(cell: Any) -> tuple[Any, int]:
    """Return the value of a cell of Arrow as JSON would have it, and how many bytes in it are not UTF-8, which are U+FFFD.

    A struct has the keys of all rows of its table. A row has none of those that are null in it. A map is an object.
    """
    import pyarrow

    if not cell.is_valid:
        return None, 0
    if isinstance(cell, pyarrow.StringScalar):  # also large ones
        return decode(cell.as_buffer().to_pybytes())[:2]
    if isinstance(cell, pyarrow.DictionaryScalar):
        return _value_of(cell.value)
    if isinstance(cell, pyarrow.StructScalar):
        fields = {field.name: _value_of(cell[index]) for index, field in enumerate(cell.type)}
        return {name: value for name, (value, _) in fields.items() if value is not None}, sum(bad for _, bad in fields.values())
    if isinstance(cell, pyarrow.MapScalar):
        pairs = [(_value_of(pair[0]), _value_of(pair[1])) for pair in cell.values]
        return {str(key): value for (key, _), (value, _) in pairs}, sum(key[1] + value[1] for key, value in pairs)
    if isinstance(cell, pyarrow.ListScalar):
        items = [_value_of(item) for item in cell.values]
        return [value for value, _ in items], sum(bad for _, bad in items)
    return cell.as_py(), 0


def _open_parquet(file: SourceFile) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        source = pyarrow.PythonFile(open_plain(file.locate()), "r") if is_uri(file.path) else file.path
        return pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
    except pyarrow.ArrowInvalid as error:
        raise UserError("data.path", file.locate(), f"is not Parquet ({error})") from None


def _check_schema(file: SourceFile, schema: Any, field: str, key: str) -> None:
    if key not in schema.names:
        raise UserError(field, key, f"is not a column of {file.locate()}", schema.names)
    if (count := schema.names.count(key)) > 1:
        raise UserError(field, key, f"is the name of {count} columns of {file.locate()}")

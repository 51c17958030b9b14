"""Documents that cannot be used as they are. `data.invalid` says what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from foldray.errors import UserError
from foldray.recipe.data import Invalid
from trainers.folders import printable

_MOST_FILES = 10  # that are named
Found = dict[str, tuple[int, int, str]]
"""By file, in the order of reading: documents, bytes that are not UTF-8, and the first document: its place, or what is wrong."""


@dataclass
class Unfit:
    """Documents that cannot be used as they are so far, and what becomes of them (`data.invalid`)."""

    rule: Invalid
    found: Found = field(default_factory=dict)

    def keeps(self, file: str, bad: int, where: str) -> bool:
        """Count a document with bad bytes, the first of which is `where`. They are not UTF-8.

        Return whether the document is kept, with U+FFFD in place of them. Raise a UserError if the recipe refuses it.
        """
        if self.rule == "refuse":
            raise refused(file, where)
        self._add(file, bad, where)
        return self.rule == "replace"

    def leaves(self, file: str, error: UserError) -> None:
        """Count a document that is left out, whatever its bytes are. Raise its error unless the recipe skips it."""
        if self.rule != "skip":
            raise error
        self._add(file, 0, printable(error.rule))

    def _add(self, file: str, bad: int, what: str) -> None:
        documents, bytes_, first = self.found.get(file, (0, 0, what))
        self.found[file] = documents + 1, bytes_ + bad, first


def refused(file: str, where: str) -> UserError:
    """Return the error for a document that is not UTF-8."""
    rule = f"{where} of {file} is not UTF-8; skip leaves such documents out, replace puts U+FFFD in place of their bad bytes"
    return UserError("data.invalid", "refuse", rule, ["refuse", "skip", "replace"])


def decode(content: bytes) -> tuple[str, int, int]:
    """Decode UTF-8 with U+FFFD in place of what is none.

    Return the text, the number of bytes that are not UTF-8, and the position of the first of them.
    """
    try:
        return content.decode(), 0, 0
    except UnicodeDecodeError as error:
        text = content.decode("utf-8", "replace")
        # U+FFFD itself is three bytes. Those bytes are never a part of anything else, so they can be counted.
        replaced = text.count("\ufffd") - content.count(b"\xef\xbf\xbd")
        return text, len(content) - (len(text.encode()) - 3 * replaced), error.start


class Tally:
    """Sums over parts of the data, in order. It has the names of the first few files alone."""

    def __init__(self) -> None:
        self._documents = self._bytes = self._files = 0
        self._last: str | None = None
        self._first: dict[str, dict[str, Any]] = {}

    def add(self, found: Found) -> None:
        """Add what is unfit in the next part. Parts of one file follow each other."""
        for file, (documents, bytes_, at) in found.items():
            self._documents, self._bytes = self._documents + documents, self._bytes + bytes_
            self._files += file != self._last
            self._last = file
            if file in self._first:
                self._first[file]["documents"] += documents
                self._first[file]["bytes"] += bytes_
            elif len(self._first) < _MOST_FILES:
                self._first[file] = {"file": file, "documents": documents, "bytes": bytes_, "at": at}

    def as_dict(self) -> dict[str, Any]:
        return {"documents": self._documents, "bytes": self._bytes, "files": self._files, "first": [*self._first.values()]}


def unfit_summary(meta: Mapping[str, Any]) -> str | None:
    """Return a line about unfit documents, by the content of `meta.json`; None if there are none."""
    unfit = meta["unfit"]
    if not unfit["documents"]:
        return None
    files = [f"{file['file']} ({file['documents']}, the first: {file['at']})" for file in unfit["first"][:3]]
    if unfit["files"] > 3:
        files.append(f"and {unfit['files'] - 3} more files")
    count, bytes_ = f"{unfit['documents']} documents in {unfit['files']} files", unfit["bytes"]
    if unfit["rule"] == "replace":
        line = f"{count} are not UTF-8, {bytes_} bytes of them; their bad bytes are U+FFFD"
    else:
        line = f"{count} cannot be used{f' ({bytes_} bytes are not UTF-8)' if bytes_ else ''}; they are left out"
    return f"{line}: {', '.join(files)}"


def as_utf8(text: str) -> str:
    """Return a text that UTF-8 can encode. JSON may hold half a surrogate pair, which becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def halves_in(value: Any) -> int:
    """Return the number of halves of surrogate pairs in the texts of a value of JSON. Escapes make them; UTF-8 has none."""
    try:
        return sum(map(_halves, _texts(value)))
    except RecursionError:  # whoever reads the value refuses it
        return 0


def _halves(text: str) -> int:
    try:
        text.encode()  # much faster than a search
        return 0
    except UnicodeEncodeError:
        return sum("\ud800" <= letter <= "\udfff" for letter in text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value if isinstance(value, list) else (*value, *value.values()):
            yield from _texts(item)


def mended(value: Any) -> Any:
    """Return a value of JSON with texts that UTF-8 can encode."""
    if isinstance(value, str):
        return as_utf8(value)
    if isinstance(value, list):
        return [mended(item) for item in value]
    return {mended(key): mended(item) for key, item in value.items()} if isinstance(value, dict) else value

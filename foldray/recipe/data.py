"""The section `data` of a recipe: where text comes from, how several sources are mixed, and how text becomes sequences."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foldray.blueprint import Strict
from foldray.errors import UserError
from foldray.recipe.bounds import Length, Name

MOST_PARTS = 2**20
"""Largest sum of the weights of a mixture as whole numbers. Training keeps a table of this length."""
Kind = Literal["stdlib", "text", "jsonl", "parquet", "conversations"]
Counted = Literal["assistant", "all"]
Invalid = Literal["refuse", "skip", "replace"]


class ValidationSplit(Strict):
    """Which text is held back from training, to measure the model on text that it has not seen."""

    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the files that is held back. A hash of a file's name decides; at least one file is
    held back."""
    path: str | None = None
    """File or glob of a validation set. Null holds back `fraction` of the training files
    instead."""


class SourceSpec(Strict):
    """One source of a mixture, by its name. Keys that are null are those of `data`."""

    weight: Annotated[float, Field(gt=0, le=1000000000000.0)] = 1.0
    """Share of the sequences that come from this source, over the sum of all weights."""
    source: Kind | None = None
    """Kind of text, as `data.source`."""
    path: str | None = None
    """File or glob to read, as `data.path`."""
    text_field: str | None = None
    """Key or column of the text, as `data.text_field`."""
    messages_field: str | None = None
    """Key or column of the messages, as `data.messages_field`."""
    train_on: Counted | None = None
    """Tokens of a conversation that count, as `data.train_on`."""
    validation: ValidationSplit | None = None


class DataSpec(Strict):
    """The text to train on, and how it is cut into sequences."""

    source: Kind = "stdlib"
    """Kind of text. `stdlib` is the source code of Python's standard library and needs no files;
    the other kinds read `path`. `conversations` are lists of messages in files of JSON lines, or of
    Parquet if their names end in `.parquet`; the chat template of `tokenizer` makes text of
    them."""
    path: str | None = None
    """File or glob to read, on a disk that every node sees, or in a store (`s3://`, `gs://`,
    `https://`). Names that end in `.gz`, `.zst`, `.xz` or `.bz2` are decompressed. Null is for
    `source: stdlib` and for `sources`."""
    text_field: str = "text"
    """Key (jsonl) or column (parquet) that holds the text of a document."""
    messages_field: str = "messages"
    """Key or column that holds the messages of a conversation, each with `role` and `content`."""
    train_on: Counted = "assistant"
    """Tokens of a conversation that count in the loss: those that the assistant writes, or all but
    its first one."""
    sources: Annotated[dict[Name, SourceSpec], Field(min_length=1, max_length=256)] | None = None
    """A mixture of sources, by name. Null is the one source that `source` and `path` name."""
    invalid: Invalid = "refuse"
    """What becomes of documents that cannot be used: those that are not UTF-8, rows without a text,
    broken lines of JSON, and conversations that the chat template cannot take. `refuse` ends the
    preparation at the first one, and names its place; `skip` leaves them out; `replace` puts U+FFFD
    in place of bytes that are not UTF-8, and refuses the others. The run says how many there
    are."""
    tokenizer: str = "byte"
    """`byte` makes one token of each byte. Or name a folder with a Hugging Face tokenizer, which
    makes fewer tokens."""
    seq_len: Length = 256
    """Tokens per sequence. Activation memory grows with it in proportion, attention's compute with
    its square."""
    mask_documents: bool = False
    """Attention stops at document boundaries. By default a token also attends to earlier documents
    of its sequence. The default is true if there are conversations."""
    validation: ValidationSplit = ValidationSplit()
    cache: str | None = None
    """Folder for tokenized and packed data, which later runs use again; every node must see it.
    Null is the folder `data` in the run storage."""

    @model_validator(mode="before")
    @classmethod
    def _conversations_stand_alone(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        sources = given.get("sources")
        parts = [part for part in sources.values() if isinstance(part, dict)] if isinstance(sources, dict) else [{}]
        if any((part.get("source") or given.get("source")) == "conversations" for part in parts):
            return {"mask_documents": True, **given}
        return given

    @property
    def parts(self) -> dict[str, DataSpec]:
        """The sources by name, each as a section `data` of its own. A section without a mixture is its own part, named ""."""
        if self.sources is None:
            return {"": self}
        parts = {}
        for name, part in self.sources.items():
            given = {key: value for key, value in part if value is not None and key != "weight"}
            parts[name] = self.model_copy(update={"sources": None, **given})
        return parts

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights of the sources as whole numbers without a common factor; 1 without a mixture."""
        return (1,) if self.sources is None else whole([part.weight for part in self.sources.values()])

    @property
    def masked(self) -> bool:
        """Whether some tokens do not count in the loss."""
        return any(part.source == "conversations" for part in self.parts.values())


def whole(weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers without a common factor in the ratio of decimal numbers, as these are written."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    unit = lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * unit) for fraction in fractions]
    return tuple(number // gcd(*numbers) for number in numbers)


def check_data(data: DataSpec) -> None:
    """Check the rules between the keys of the section."""
    if data.sources is None:
        _check_source("data", data)
        _check_chat("data", data)
    else:
        _check_mixture(data)


def _check_mixture(data: DataSpec) -> None:
    for field, value in (("data.path", data.path), ("data.validation.path", data.validation.path)):
        if value is not None:
            raise UserError(field, value, "has no meaning with data.sources, whose sources have paths of their own", ["null"])
    assert data.sources is not None
    for (name, given), part in zip(data.sources.items(), data.parts.values(), strict=True):
        _check_source(f"data.sources.{name}", part)
        # What a source inherits may be meant for others.
        _check_chat(f"data.sources.{name}", part, {key: getattr(given, key) for key in ("messages_field", "train_on")})
    if not data.masked:
        _check_chat("data", data.model_copy(update={"source": "text"}))
    if sum(data.weights) > MOST_PARTS:
        total = sum(part.weight for part in data.sources.values())
        near = ", ".join(str(max(round(10_000 * part.weight / total), 1)) for part in data.sources.values())
        weights = [part.weight for part in data.sources.values()]
        rule = f"have too many digits: as whole numbers, their sum may be at most {MOST_PARTS}; weights near them are {near}"
        raise UserError("data.sources.*.weight", weights, rule)


def _check_source(field: str, data: DataSpec) -> None:
    if data.source == "stdlib" and data.path is not None:
        kinds = ["text", "jsonl", "parquet", "conversations"]
        raise UserError(f"{field}.path", data.path, "has no meaning with source=stdlib; name the kind of file", kinds)
    if data.source != "stdlib" and data.path is None:
        raise UserError(f"{field}.path", "null", f"source={data.source} needs a file or a glob")
    if data.source == "conversations" and data.tokenizer == "byte":
        raise UserError("data.tokenizer", "byte", "has no chat template; name a folder with a tokenizer that has one")


def _check_chat(field: str, data: DataSpec, given: dict[str, Any] | None = None) -> None:
    """Refuse keys of conversations for other kinds of text. Their values are those of `data` if none are given."""
    for key in ("messages_field", "train_on") if data.source != "conversations" else ():
        default = type(data).model_fields[key].default
        value = getattr(data, key) if given is None else given[key]
        if value not in (None, default):
            rule = f"has no meaning with source={data.source}, only with conversations"
            raise UserError(f"{field}.{key}", value, rule, [default])

"""Types of recipe keys, and the largest values that they take."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer

from foldray.blueprint.sections import LARGEST
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.kinds import RECOMPUTABLE
from foldray.orders import AUTO, KINDS, order_kind, overlap_kind
from foldray.tables import IMPORTABLE, OWN, among
from foldray.urls import without_secrets

# These bounds are far above what anybody can train. A larger value would exhaust the machine before another check refuses it.
MOST_WORKERS = 2**17  # the tables of a fold with many more ranks take minutes and gigabytes
MOST_SEQUENCES = 2**20  # per step; the micro-batches of a step are ops of one list
MOST_PIECES = 2**8  # per sequence
MOST_BYTES = 2**40
MOST_STEPS = 10**9
MOST_TURNS = 10**6
LONGEST = 2**24  # sequence, in tokens
MOST_S = 10**9  # seconds
MOST_SETTINGS = 2**14  # of a tuner's table; each takes milliseconds to check, and more to predict

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}=[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _check_label(value: str) -> None:
    if not _LABEL.fullmatch(value):
        raise UserError("", value, "must be a node's label, of letters, digits, '.', '_' and '-'", ["KEY=VALUE"])


def _check_own(value: str) -> None:
    if not IMPORTABLE.fullmatch(value):
        raise UserError("", value, "must name an object in a module", [OWN])


def _check_family(value: str) -> None:
    if not (IMPORTABLE.fullmatch(value) or re.fullmatch("[a-z][a-z0-9_]*", value)):
        raise UserError("", value, "must be a family's name in config.json, or name an object in a module", ["MODEL_TYPE", OWN])


Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
WorkersOrNone = Annotated[int, Field(ge=0, le=MOST_WORKERS)]
SequenceCount = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
Degree = Annotated[int, Field(ge=1, le=MOST_PIECES)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
StepsOrZero = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Turns = Annotated[int, Field(ge=1, le=MOST_TURNS)]
Length = Annotated[int, Field(ge=1, le=LONGEST)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Cost = Annotated[float, Field(ge=0, le=1e30)]
Size = Annotated[int, Field(ge=1, le=MOST_BYTES)]
TokenId = Annotated[int, Field(ge=0, lt=LARGEST)]
Few = Field(min_length=1, max_length=16)  # training tries every value, and a tuner tries every combination
Sizes = Annotated[tuple[Size, ...], Few]
Operations = Annotated[tuple[Annotated[str, among(RECOMPUTABLE)], ...], Field(max_length=len(RECOMPUTABLE))]
OrderName = Annotated[str, among((*KINDS, OWN), order_kind)]
OverlapName = Annotated[str, among((AUTO.name, *KINDS, OWN), overlap_kind)]
AxisOrder = Annotated[str, among(("a permutation of tp-cp-dp-pp",), lambda order: Fold(1, order=order))]
MoeAxisOrder = Annotated[str, among(("a permutation of etp-ep-edp-pp",), lambda order: Fold(1, moe_order=order))]
OwnRow = Annotated[str, among((OWN,), _check_own)]
"""An object in a module of the user's."""
FamilyName = Annotated[str, among(("MODEL_TYPE", OWN), _check_family)]
OwnRows = Annotated[tuple[OwnRow, ...], Field(max_length=64)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
"""A name that is also a part of a path."""
Label = Annotated[str, among(("KEY=VALUE",), _check_label)]
"""A label of a node of Ray."""
Adapters = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=64)], ...],
    Field(min_length=1, max_length=64),
]
"""Names of network adapters."""
SamplerName = Literal["ratio", "gp", "tpe", "random", "planner"]
Url = Annotated[str, PlainSerializer(without_secrets, when_used="json")]
"""A URL whose secrets stay in this process. Files, logs and workers get the recipe as JSON, without the secrets."""

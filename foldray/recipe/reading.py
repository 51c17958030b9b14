"""Reads a recipe: YAML and overrides become values, and a mistake that pydantic finds becomes one clear line."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, PlainValidator, ValidationError
from pydantic.fields import FieldInfo

from foldray.errors import UserError, nearest
from foldray.files import one_line, read_yaml
from foldray.tables import IMPORTABLE, Among, Refused
from foldray.urls import holds_secret

# How keys begin that take rows of the user's own (`tables.OWN`).
_WITH_OWN = ("model.", "schedule.", "tune.", "tracking.metrics", "cluster.failures", "export.family")
_DEEPEST = 10  # levels of sections; no recipe has as many
NAME = "NAME"
"""What stands for the name of a section that the user names."""

_PLAIN = {
    "int": "is not a valid integer",
    "float": "is not a valid number",
    "bool": "is not a valid boolean",
    "string_type": "is not a text; quotes make it one",
    "dict_type": "is not a mapping from names",
    "tuple_type": "is not a list",
    "invalid-json-value": "is no value of JSON",
    "model_type": "is a section and needs a valid dictionary of its keys",
}
"""Plain words for pydantic's error types, or for the beginnings of their names."""


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield a row (key, legal values, default, description) for every recipe key."""
    for name, field in model.model_fields.items():
        section, is_named = _section(field.annotation)
        if section is None or is_named:
            legal = "sections by name|null" if is_named else _legal(field)
            choice = isinstance(field.default, str) and field.default in legal.split("|")  # as it stands there
            default = "required" if field.is_required() else field.default if choice else _as_yaml(field.default)
            yield f"{prefix}{name}", legal, default, " ".join((field.description or "").split())
        if section is not None:
            yield from describe(section, f"{prefix}{name}.{NAME}." if is_named else f"{prefix}{name}.")


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of every section of a recipe, in order."""
    for name, field in model.model_fields.items():
        section, is_named = _section(field.annotation)
        if section is not None:
            path = f"{prefix}{name}.{NAME}" if is_named else f"{prefix}{name}"
            yield path, inspect.cleandoc(section.__doc__ or "")
            yield from sections(section, f"{path}.")


def apply(given: dict[str, Any], override: str) -> None:
    """Set one key from `key.sub=value`; the value is YAML."""
    key, equals, text = override.partition("=")
    *parents, last = key.split(".")
    if not equals or not all((*parents, last)) or len(parents) > _DEEPEST:
        raise UserError("override", override, "must read key.sub=value")
    try:
        value = read_yaml(text)
    except Exception as error:
        raise UserError(key, text, f"is not a YAML value ({one_line(error)})") from None
    for parent in parents:
        given = given.setdefault(parent, {})
        if not isinstance(given, dict):
            raise UserError(key, value, f"{parent} is not a section")
    given[last] = value


def refuse_booleans(model: type[BaseModel], given: Any, prefix: str = "") -> None:
    """Refuse `true` (and `yes`, `on`) for a number; pydantic would read it as 1."""
    for key, value in given.items() if isinstance(given, dict) else ():
        field = model.model_fields.get(key)
        if field is None:
            continue
        section, is_named = _section(field.annotation)
        values = value if isinstance(value, list) else [value]
        if section is not None and is_named:
            for name, part in value.items() if isinstance(value, dict) else ():
                refuse_booleans(section, part, f"{prefix}{key}.{name}.")
        elif section is not None:
            refuse_booleans(section, value, f"{prefix}{key}.")
        elif any(isinstance(item, bool) for item in values) and _is_number(field.annotation):
            raise UserError(f"{prefix}{key}", str(value).lower(), "is not a valid number")


def refuse_own(given: Any, key: str = "") -> None:
    """Refuse values that name a row in a module (`module:NAME`), in keys that take such rows."""
    if isinstance(given, dict):
        for name, value in given.items():
            refuse_own(value, f"{key}.{name}" if key else name)
    elif isinstance(given, list):
        for number, value in enumerate(given):
            refuse_own(value, f"{key}.{number}")
    elif isinstance(given, str) and key.startswith(_WITH_OWN) and IMPORTABLE.fullmatch(given):
        rule = "names code, which a stored recipe runs only if you trust it: --trust, or trust=True in Python"
        raise UserError(key, given, rule)


def refuse_secrets(shown: Any, key: str = "") -> None:
    """Refuse secrets in what files show of a recipe. Addresses that may hold one are shown without it (`bounds.Url`)."""
    if isinstance(shown, dict):
        for name, value in shown.items():
            refuse_secrets(value, f"{key}.{name}" if key else name)
    elif isinstance(shown, str) and holds_secret(shown):
        raise UserError(key, shown, "holds a password, a key or a token, and foldray writes recipes to files")


def _is_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(_is_number(part) for part in get_args(annotation))


def first_mistake(model: type[BaseModel], error: ValidationError) -> UserError:
    """Return the first mistake that pydantic found, as an error of one line in plain words."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"] if part != "[key]"]  # of a mapping whose name is illegal
    field, kind = ".".join(path), first["type"]
    value = "null" if first["input"] is None else first["input"]
    section, key = _lookup(model, path)
    if kind in ("extra_forbidden", "invalid_key"):
        known = list(section.model_fields)
        return UserError(field, value, f"is not a known key{nearest(path[-1], known)}", known)
    if kind == "missing":
        return UserError(field, "nothing", "is required")
    if kind == "literal_error":
        return UserError(field, value, "is not a legal value", None if key is None else _words(key.annotation))
    if isinstance(refused := first.get("ctx", {}).get("error"), Refused):
        is_item = key is None or section.model_fields.get(path[-1]) is not key  # an item of a list, which must not be null
        more = ["null"] if key is not None and not is_item and type(None) in get_args(key.annotation) else []
        return UserError(field, value, refused.rule, [*refused.legal, *more])
    if kind == "string_pattern_mismatch":
        return UserError(field, value, "may hold letters, digits, '.', '_' and '-', and begins with a letter or digit")
    plain = _PLAIN.get(kind) or _PLAIN.get(kind.split("_")[0])
    rule = plain or f"must {first['msg'].split(' should ')[-1].replace(' after validation', '')}"
    return UserError(field, value, rule, section.model_fields if kind == "model_type" else None)


def _lookup(model: type[BaseModel], path: list[str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """Return the section and the key that a path names. After the key, a path may continue with indices of its list."""
    named: type[BaseModel] | None = None
    for part in path:
        if named is not None:  # the part is the name of a section
            model, named = named, None
            continue
        field = model.model_fields.get(part)
        section, is_named = _section(field.annotation) if field else (None, False)
        if section is None:
            return model, field
        if is_named:
            named = section
        else:
            model = section
    return model, None


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section that a type is, or that a mapping has by name, and whether it is such a mapping.

    Null may stand for both.
    """
    if get_origin(annotation) in (types.UnionType, Union):
        kinds = [part for part in get_args(annotation) if part is not type(None)]
        return _section(kinds[0]) if len(kinds) == 1 else (None, False)
    if get_origin(annotation) is Annotated:
        return _section(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        section, _ = _section(get_args(annotation)[1])
        return section, section is not None
    return (annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None), False


def _words(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    words = [word for part in get_args(annotation) for word in _words(part)]
    return [*words, "null"] if type(None) in get_args(annotation) and words else words


def _legal(field: FieldInfo) -> str:
    """Return the legal values of a key with `|` between them, or the name of its type for a number or a text."""
    return "|".join(_listed(field.metadata) or _names(field.annotation))


def _names(annotation: Any) -> list[str]:
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (types.UnionType, Union):
        return [name for part in arguments for name in _names(part)]
    if origin is Annotated:
        return _listed(arguments[1:]) or _names(arguments[0])
    if origin is Literal:
        return [str(value) for value in arguments]
    if origin is tuple:
        words = ", ".join(_names(arguments[0]))
        return [f"{'list' if ... in arguments else 'pair'} of {words.replace('list of', 'lists of')}"]
    return {type(None): ["null"], bool: ["true", "false"], dict: ["mapping"]}.get(origin) or [annotation.__name__]


def _listed(marks: Iterable[Any]) -> list[str]:
    """Return the words that a type is restricted to; an empty list for an unrestricted type."""
    checks = (mark.func for mark in marks if isinstance(mark, PlainValidator))
    return [word for check in checks if isinstance(check, Among) for word in check.words]


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True).split("\n")[0]

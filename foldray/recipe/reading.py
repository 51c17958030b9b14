"""From YAML and overrides to values, and from pydantic's mistakes to one clear line."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from foldray.errors import UserError, nearest

_PLAIN = {
    "int": "is not a valid integer",
    "float": "is not a valid number",
    "bool": "is not a valid boolean",
    "string_type": "is not a text; quotes make it one",
    "tuple_type": "is not a list",
    "model_type": "is a section and needs a valid dictionary of its keys",
}
"""Plain words for pydantic's error types, or for what they begin with."""


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Rows (key, legal values, default, meaning) of every recipe key, for help texts."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield from describe(section, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else _as_yaml(field.default)
            yield f"{prefix}{name}", _legal(field), default, field.description or ""


def apply(given: dict[str, Any], override: str) -> None:
    """Set one key from `key.sub=value`; the value is YAML.

    Raises:
        UserError: it does not read so.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError("override", override, "must read key.sub=value")
    try:
        value = read_yaml(text)
    except Exception:  # PyYAML promises no type
        raise UserError(key, text, "is not a YAML value") from None
    *parents, last = key.split(".")
    for parent in parents:
        given = given.setdefault(parent, {})
        if not isinstance(given, dict):
            raise UserError(key, value, f"{parent} is not a section")
    given[last] = value


class _Loader(yaml.SafeLoader):
    """YAML whose keys stand once each: PyYAML would take the last of several, and drop the others in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ValueError(f"the key {key.value!r} stands twice, the second time in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if "\0" in str(node.value):
            raise ValueError(f"a zero byte in line {node.start_mark.line + 1}, which no name or path may hold")
        return super().construct_scalar(node)


def read_yaml(text: str) -> Any:
    """The values of a YAML text in which no key stands twice; PyYAML promises no type for what it raises."""
    return yaml.load(text, _Loader)


def refuse_booleans(model: type[BaseModel], given: Any, prefix: str = "") -> None:
    """Keep `true` (and `yes`, `on`) from passing for the number 1."""
    for key, value in given.items() if isinstance(given, dict) else ():
        field = model.model_fields.get(key)
        if field is None:
            continue
        section = _section(field.annotation)
        if section is not None:
            refuse_booleans(section, value, f"{prefix}{key}.")
        elif isinstance(value, bool) and {int, float} & {field.annotation, *get_args(field.annotation)}:
            raise UserError(f"{prefix}{key}", str(value).lower(), "is not a valid number")


def one_line(error: Exception) -> str:
    """What an error says, without its line breaks."""
    return " ".join(str(error).replace('"<unicode string>", ', "").split())


def first_mistake(model: type[BaseModel], error: ValidationError) -> UserError:
    """The first of pydantic's findings as one line in plain words."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    field, kind = ".".join(path), first["type"]
    value = "null" if first["input"] is None else first["input"]
    if kind in ("extra_forbidden", "invalid_key"):
        known = list(_lookup(model, path[:-1]))
        return UserError(field, value, f"is no known key{nearest(path[-1], known)}", known)
    if kind == "missing":
        return UserError(field, "nothing", "is required")
    if kind == "literal_error":
        return UserError(field, value, "is none of the legal values", _choices(_lookup(model, path[:-1])[path[-1]]))
    if kind == "string_pattern_mismatch":
        return UserError(field, value, "may hold letters, digits, '.', '_' and '-', a letter or digit first")
    return UserError(field, value, _rule(kind, first["msg"]), _lookup(model, path) if kind == "model_type" else None)


def _rule(kind: str, message: str) -> str:
    """What pydantic says, in plain words."""
    plain = _PLAIN.get(kind) or _PLAIN.get(kind.split("_")[0])
    return plain or f"must {message.split(' should ')[-1].replace(' after validation', '')}"


def _lookup(model: type[BaseModel], path: list[str]) -> dict[str, FieldInfo]:
    for part in path:
        model = _section(model.model_fields[part].annotation) or model
    return model.model_fields


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _choices(field: FieldInfo) -> list[Any]:
    return list(get_args(field.annotation))


def _legal(field: FieldInfo) -> str:
    annotation = field.annotation
    parts = get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)
    plain = {type(None): "null", tuple: "list"}
    names: list[str] = []
    for part in parts:
        origin = get_origin(part) or part
        if origin is Annotated:
            part = get_args(part)[0]
            origin = get_origin(part) or part
        one = plain.get(origin) or str(getattr(part, "__name__", part))
        names += map(str, get_args(part)) if origin is Literal else [one]
    return "|".join(names)


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True).split("\n")[0]

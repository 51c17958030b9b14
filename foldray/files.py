"""Files that a user names: only regular ones of a bounded size, and only YAML without duplicate keys, are read; pictures are
written."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from foldray.errors import MissingPackage, UserError

_MOST_BYTES = 2**18
_LONGEST = 2**13  # characters of a value; a longer number would take minutes to read
_MOST_NODES = 10_000  # values, keys, lists and mappings, counted again for every alias that repeats them
_DEEPEST = 40  # levels of nesting


def read_text(field: str, path: str | Path, most: int = _MOST_BYTES) -> str:
    """Return the text of a file of at most `most` bytes.

    Raises:
        UserError: the file cannot be read, is too large, is not UTF-8 text, or is not a regular file (reading a device or a
            pipe might never end).
    """
    try:
        with open(Path(path), "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(field, str(path), "cannot be read (it is not a regular file)")
            content = file.read(most + 1)
        if len(content) > most:
            raise UserError(field, str(path), f"cannot be read (it is larger than {most >> 10} KiB)")
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(field, str(path), f"is not UTF-8 text ({error})") from None
    except (OSError, ValueError) as error:
        raise UserError(field, str(path), f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def load_yaml(field: str, path: str | Path) -> Any:
    """Return the values of a YAML file."""
    return parse_yaml(field, str(path), read_text(field, path))


def parse_yaml(field: str, value: str, text: str) -> Any:
    """Return the values of a YAML text. A mistake names what the text is called (the field), and where it is from."""
    try:
        return read_yaml(text)
    except Exception as error:
        raise UserError(field, value, f"is not YAML ({one_line(error)})") from None


def read_yaml(text: str) -> Any:
    """Return the values of a YAML text.

    Raises:
        Exception: the text is not YAML, repeats a key, holds control characters, or exceeds the bounds of this module.
            PyYAML documents no common type for its errors. A wrong date raises ValueError, a wrong tag raises KeyError.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} characters")
    return yaml.load(text, _Loader)


def one_line(error: Exception) -> str:
    """Return the message of an error without its line breaks."""
    return " ".join(str(error).replace('"<unicode string>", ', "").split())[:200]


class _Loader(yaml.SafeLoader):
    """A loader for YAML of a bounded size. It refuses duplicate keys; PyYAML would silently take the last one."""

    def __init__(self, text: str):
        super().__init__(text)
        self._nodes, self._depth = 0, 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count the nodes with all aliases followed: merges follow aliases, and so does the code that reads the values."""
        line, before, alias = self.peek_event().start_mark.line + 1, self._nodes, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"nested deeper than {_DEEPEST} levels in line {line}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        # An alias inside its own anchor repeats without end, so it counts as too many nodes.
        self._nodes += self._sizes.get(id(node), _MOST_NODES) if alias else 1
        if self._nodes > _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES} values, with all aliases followed, up to line {line}")
        self._sizes[id(node)] = self._nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ValueError(f"the key {key.value!r} appears twice, the second time in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if len(node.value) > _LONGEST:
            raise ValueError(f"a value of more than {_LONGEST} characters in line {node.start_mark.line + 1}")
        control = next((char for char in node.value if unicodedata.category(char) in ("Cc", "Cs") and char not in "\t\n"), None)
        if control is not None:
            what = "a zero byte" if control == "\0" else f"the control character {control!r}"
            raise ValueError(f"{what} in line {node.start_mark.line + 1}, which names and paths must not hold")
        return node


def check_folder(field: str, path: Path) -> None:
    """Check that the folder of a file to write exists."""
    if not path.parent.is_dir():
        raise UserError(field, path, f"cannot be written (the folder {path.parent} does not exist)")


@contextmanager
def writing(field: str, path: str | Path) -> Iterator[None]:
    """Turn errors of the disk into a UserError about what is written. `field` is what the user calls it."""
    try:
        yield
    except OSError as error:
        raise UserError(field, path, f"cannot be written ({error.strerror or error})") from None


def check_picture(path: Path) -> None:
    """Check the name of a picture before work begins that it will show."""
    if path.suffix.lower() != ".png":
        raise UserError("picture", path, "is written as PNG: the name must end in .png")
    check_folder("picture", path)


def write_picture(path: str | Path, draw: Callable[[Path], None]) -> None:
    """Write a PNG with `draw`."""
    check_picture(Path(path))
    try:
        with writing("picture", path):
            draw(Path(path))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise MissingPackage("picture", path, "matplotlib", "pip install matplotlib") from None

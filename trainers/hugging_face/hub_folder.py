"""A folder that transformers or PEFT has written, or that a hub holds: its JSON and its tensors, read without trust."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from foldray.errors import MissingPackage, UserError
from trainers.folders import DamagedFile, Folder, read_json

INSTALL = "pip install 'foldray[hf]'"
_OBJECT = TypeAdapter(dict[str, Any])
_MOST_JSON = 1 << 26  # bytes of an index; that of a model with a hundred thousand tensors has 10 MB


@dataclass(frozen=True)
class HubFolder:
    """A folder of a model or of an adapter.

    Args:
        field: what a user calls the folder.
    """

    folder: Path
    field: str

    def refused(self, rule: str, legal: Any = None) -> UserError:
        return UserError(self.field, str(self.folder), rule, legal)

    @contextmanager
    def opened(self, path: Path) -> Iterator[Any]:
        """Open a file of tensors."""
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError:
            raise MissingPackage(self.field, self.folder, "safetensors", INSTALL) from None
        try:
            Folder(str(self.folder)).size(path.name)  # refuses a pipe, which nobody might ever write to
            with safe_open(path, framework="pt") as file:
                yield file
        except DamagedFile as error:
            raise self.refused(f"its {path.name} cannot be read (it {error.what})") from None
        except (SafetensorError, OSError) as error:
            raise self.refused(f"its {path.name} cannot be read ({' '.join(str(error).split())[:160]})") from None

    def json(self, name: str) -> dict[str, Any]:
        """Read a file of JSON."""
        if not (self.folder / name).exists():
            raise self.refused(f"has no {name}")
        try:
            return read_json(Folder(str(self.folder)), name, _OBJECT, _MOST_JSON)
        except DamagedFile as error:
            raise self.refused(f"its {error}") from None
        except OSError as error:
            raise self.refused(f"its {name} cannot be read ({error.strerror or error})") from None

"""The recipes that come with foldray, by name: those of the checkout, or those that the wheel has installed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

from foldray.errors import UserError, nearest

_SHARED = "share/foldray/recipes"  # where the wheel puts them, as pyproject.toml says
_QUICKSTART = "quickstart.yaml"


class Shipped(NamedTuple):
    """A recipe of foldray's: its file, and what it is, in a few sentences."""

    path: Path
    about: str


def shipped() -> Mapping[str, Shipped]:
    """Return all recipes of foldray's by name; none if they were not installed."""
    folder = _folder()
    found = sorted(folder.glob("*.yaml")) if folder else ()
    return {path.stem: Shipped(path, _about(path.read_text())) for path in found}


def find(recipe: str | Path) -> Path:
    """Return the file of a recipe: a file's path, or the name of one of foldray's recipes."""
    path, name = Path(recipe), str(recipe)
    if os.path.exists(path) or not re.fullmatch(r"[a-z_]{1,40}", name):
        return path
    known = shipped()
    if name not in known:
        raise UserError("recipe", name, f"is neither a file nor a recipe of foldray's{nearest(name, known)}", known)
    return known[name].path


def copy(to: Path) -> list[Path]:
    """Copy all recipes of foldray's, with the small texts that they read, to `to/recipes`. Return the recipes' new paths."""
    source, target = _folder(), to / "recipes"
    if source is None:
        raise UserError("copy", to, "cannot be filled: foldray was installed without its recipes")
    try:
        target.mkdir(parents=True)
        for file in sorted(each for each in source.rglob("*") if each.suffix in (".yaml", ".jsonl", ".json", ".jinja")):
            (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / file.relative_to(source))
    except FileExistsError:
        raise UserError("copy", to, f"has {target} already, and foldray overwrites nothing") from None
    except OSError as error:
        raise UserError("copy", to, f"cannot be written ({error.strerror or error})") from None
    return sorted(target.glob("*.yaml"))


def _folder() -> Path | None:
    checkout = Path(__file__).parents[2] / "recipes"
    if (checkout / _QUICKSTART).exists():
        return checkout
    try:
        installed = files("foldray") or ()
    except PackageNotFoundError:
        return None
    return next((Path(each.locate()).resolve().parent for each in installed if each.match(f"{_SHARED}/{_QUICKSTART}")), None)


def _about(text: str) -> str:
    """Return the first paragraph of the comment at the top of a recipe."""
    lines = []
    for line in text.splitlines():
        if not (comment := line.removeprefix("#").strip()) or not line.startswith("#"):
            break
        lines.append(comment)
    return " ".join(lines)

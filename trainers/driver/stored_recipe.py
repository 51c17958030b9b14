"""The recipe in the folder of a run, read without trust."""

from __future__ import annotations

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.folders import DamagedFile, Folder

RECIPE, MOST_RECIPE = "recipe.yaml", 1 << 20


def recipe_of(run: Folder, field: str, value: str, trust: bool = False) -> Recipe:
    """Return the recipe in the folder of a run.

    Args:
        field, value: what the user calls the run.
        trust: whether to import the modules that the recipe names (`Recipe.stored`).
    """
    try:
        text = run.read(RECIPE, MOST_RECIPE).decode()
    except DamagedFile as error:
        raise UserError(field, value, f"its {error}; it says how the model is made") from None
    except UnicodeDecodeError:
        raise UserError(field, value, f"its {RECIPE} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(field, value, f"its {RECIPE} cannot be read ({error.strerror or error})") from None
    try:
        return Recipe.stored(f"{run.name}/{RECIPE}", text, trust)
    except UserError as error:
        raise UserError(field, value, f"its {RECIPE} is refused ({error})") from None

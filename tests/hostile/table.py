"""All rows of hostile inputs."""

from __future__ import annotations

from tests.hostile import addresses, models, recipes, runs

ROWS = [*recipes.ROWS, *runs.ROWS, *models.ROWS, *addresses.ROWS]

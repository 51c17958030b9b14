"""`python -m foldray`, from an installation or from a checkout."""

from foldray.cli import run

raise SystemExit(run())

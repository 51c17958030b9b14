"""The pages: links between them lead somewhere, what the code knows is up to date, and the site is made without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.error_lines import ROWS, Row, answer
from tests.pool import repository

ROOT = repository()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        where = (page.parent / path).resolve() if path else page
        assert where.exists(), target
        if anchor and where.suffix == ".md":
            assert anchor in anchors(where), target


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command)
def test_troubleshooting_has_the_lines_of_today(row: Row) -> None:
    again = "python -m tests.error_lines > docs/troubleshooting.md"
    assert f"$ foldray {row.command}\n{answer(row)}\n" in (ROOT / "docs" / "troubleshooting.md").read_text(), f"run {again}"


@pytest.mark.nightly("needs Sphinx, and takes a while")
def test_the_site_is_made_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "index.html").exists()

"""How Sphinx makes a site of these pages: `make docs`."""

import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from foldray import __version__  # noqa: E402

project, author, release = "foldray", "the authors of foldray", __version__
copyright = "the authors of foldray; Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring, napoleon_numpy_docstring = True, False

html_theme = "pydata_sphinx_theme"
html_title = "foldray"
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def _reached(url: str) -> bool:
    """Whether another project's index of names is there. Without a network, the pages have no links to it."""
    try:
        with urlopen(f"{url}objects.inv", timeout=3):
            return True
    except (URLError, OSError):
        return False


_OTHERS = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "ray": "https://docs.ray.io/en/latest/",
    "mlflow": "https://mlflow.org/docs/latest/api_reference/",
}
intersphinx_mapping = {name: (url, None) for name, url in _OTHERS.items() if _reached(url)}

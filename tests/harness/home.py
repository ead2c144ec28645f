"""Where Flashproof is: a checkout with four packages, or the installed package ``flashproof`` that contains them."""

import os
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder with ``kernels``, ``strategies``, ``reference``, ``tests`` and conftest.py."""

IS_INSTALLED = __name__.partition(".")[0] != "tests"
"""Whether this is the installed package, which is imported from anywhere."""

OWN_FOLDERS = () if IS_INSTALLED else (str(ROOT),)
"""What a new process needs on its path to import our packages."""


def own_version() -> str:
    """Return Flashproof's version: that of the installed package, or the one that the checkout declares."""
    if IS_INSTALLED:
        return version("flashproof")
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def python_path() -> str:
    """Return PYTHONPATH for a new process that imports our packages, and modules of the current folder.

    Such a process is started with ``-P``: in a checkout, a folder ``tests`` of the user's must not hide ours.
    """
    return os.pathsep.join([*OWN_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())])

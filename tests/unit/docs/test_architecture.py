"""The tree in ``docs/architecture.md`` is what ``tests.unit.architecture`` makes of docstrings."""

from pathlib import Path

import pytest

from tests.harness.files import ROOT
from tests.unit.architecture import FOLDERS, PAGE, tree, with_tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with the outermost packages, each with a docstring of its own."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(f'"""All {folder}. More of them."""\n')
    return tmp_path


def test_the_tree_is_current() -> None:
    assert PAGE.read_text() == with_tree(PAGE.read_text(), tree(ROOT)), "python -m tests.unit.architecture"


def test_packages_and_the_modules_of_some_have_lines(root: Path) -> None:
    (root / "kernels/adapters").mkdir()
    (root / "kernels/adapters/__init__.py").write_text('"""Public kernels\n\nOne file each."""\n')
    (root / "kernels/adapters/fla.py").write_text('"""Not told."""\n')
    long = "word " * 20 + "end"
    (root / "kernels/tiles.py").write_text(
        f'"""``Steps``: {long} (Dao et al. 2022). `x` is no part of it."""\n'
    )
    (root / "kernels/notes").mkdir()
    assert tree(root).splitlines() == [
        "strategies/                     All strategies",
        "kernels/                        All kernels",
        "  adapters/                     Public kernels",
        "  tiles.py                      `Steps`: " + ("word " * 16).strip(),
        " " * 32 + "word " * 4 + "end (Dao et al. 2022)",
        "reference/                      All reference",
        "tests/                          All tests",
    ]


def test_a_package_without_a_docstring_is_refused(root: Path) -> None:
    (root / "tests/__init__.py").write_text("")
    with pytest.raises(ValueError, match=r"tests/__init__\.py: expected a docstring"):
        tree(root)


def test_a_tree_replaces_the_block_of_text() -> None:
    page = "# Title\n\n```text\nold\n```\n\n```console\nkept\n```\n"
    assert with_tree(page, "new\\n\n") == page.replace("old", "new\\n")

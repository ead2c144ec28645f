"""The source of a kernel is found without importing it."""

from pathlib import Path

import pytest

from tests.harness.programs.source import source_of

TEXT = """raise RuntimeError("imported")


def scaled(q):
    pass


attend = scaled
named: object = scaled


class Model:
    def attend(self):
        pass
"""


@pytest.mark.parametrize(
    ("spec", "file", "line"),
    [
        ("mine.py:scaled", "mine.py", 4),
        ("mine.py:attend", "mine.py", 8),
        ("mine.py:named", "mine.py", 9),
        ("mine.py:Model.attend", "mine.py", 12),
        ("mine.py:absent", "mine.py", None),
        ("package.mine:scaled", "package/mine.py", 4),
        ("package.absent:scaled", None, None),
        ("absent.py:scaled", None, None),
        ("wrong.py:scaled", None, None),
        ("nonsense", None, None),
    ],
)
def test_the_file_and_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, file: str | None, line: int | None
) -> None:
    (tmp_path / "package").mkdir()
    for name in ("mine.py", "package/mine.py"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "package/__init__.py").write_text("raise RuntimeError")
    (tmp_path / "wrong.py").write_text("def scaled(:")
    monkeypatch.chdir(tmp_path)
    assert source_of(spec) == (file, line)


def test_that_of_a_registered_kernel() -> None:
    file, line = source_of("flash_v2")
    assert file is not None
    assert line is not None
    assert Path(file).read_text().splitlines()[line - 1].startswith("KERNEL")

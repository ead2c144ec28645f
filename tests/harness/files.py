"""Where things are on disk, and how files are written: whole, or line by line by several processes."""

import errno
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

JOURNALS = ".journal"
"""The folder of the journals, within the report directory."""

SUMMARY = "summary.json"
"""The file of a run's results, within the report directory."""

VERDICT = "verdict.json"
"""The file of what programs are told of a run, within the report directory."""

ROOT = Path(__file__).parents[2]
"""The folder with ``kernels``, ``strategies``, ``reference``, ``tests`` and conftest.py."""

IS_INSTALLED = __name__.partition(".")[0] != "tests"
"""Whether this is the installed package, which is imported from anywhere."""

OWN_FOLDERS = () if IS_INSTALLED else (str(ROOT),)
"""What a new process needs on its path to import our packages."""


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never half."""
    with whole(path) as partial:
        partial.write_text(text)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to ``path`` on success, and delete it on error."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    """Whether a process of this id runs on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def append_line(path: Path, record: Mapping[str, Any], before: str = "") -> None:
    """Add a record to a file of JSON lines, after the text ``before``. Raises OSError if that is not possible.

    A single write to a file opened for appending does not mix with those of other processes.
    """
    line = (before + json.dumps(record, separators=(",", ":")) + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


class Lines:
    """One process's view of a file of JSON lines. If it can't be written, nothing is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line, which names this process."""
        with suppress(OSError):
            append_line(self.path, {"process": os.getpid(), **record})

    def added(self) -> Iterator[dict[str, Any]]:
        """Yield the records added since the last call, including those of this process."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):
                yield json.loads(line)


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

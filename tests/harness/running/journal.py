"""What each process is doing, written before every launch, so that no crash and no power cut loses a case."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

UNFINISHED = "unfinished"
"""The beginning of the names of files with cases that did not come to their end."""


class Journal:
    """The file of one process: the number of cases launched, and the running case in the form that ``--replay`` takes.

    ``examples`` are those of the cases that the search has drawn, not those tried to find out more of a failure.
    Raises OSError if the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.done = 0
        self.examples = 0
        self.size = 0
        self.folder = path.parent
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def note(self, record: dict[str, Any]) -> None:
        """Write down a case before it is launched. It survives the process, and after ``sync`` a power cut as well."""
        self.done += 1
        self._write(record)

    def sync(self) -> None:
        """Wait until the case is on disk. On a busy disk that takes milliseconds, so do it while the case is built."""
        os.fdatasync(self.file)

    def keep(self, record: dict[str, Any]) -> None:
        """Write down a case that has failed, until ``drop`` says that the failure is counted or reported."""
        with suppress(OSError):
            (self.folder / name_of(record)).write_text(json.dumps(record))

    def drop(self, record: dict[str, Any]) -> None:
        """Remove what ``keep`` has written."""
        with suppress(OSError):
            (self.folder / name_of(record)).unlink()

    def close(self) -> None:
        """Write that the last case has come to its end, and close the file."""
        self._write({})
        os.close(self.file)

    def _write(self, record: dict[str, Any]) -> None:
        text = json.dumps({"done": self.done, "examples": self.examples, **record}).encode()
        # The file is overwritten and padded with spaces to its old length, because then it is quick to sync.
        self.size = max(self.size, len(text))
        os.pwrite(self.file, text.ljust(self.size), 0)


def name_of(record: dict[str, Any]) -> str:
    """Return the name of the file for a record of a run: the same for the same run."""
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:12]
    return f"{UNFINISHED}-{digest}.json"


def read_all(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every journal in ``folder`` that can be read, unlike one that is just being written."""
    for path in folder.glob("*.json"):
        try:
            yield path, json.loads(path.read_text())
        except (OSError, ValueError):
            continue


def examples_done(folder: Path) -> int:
    """Return the number of examples launched so far by all processes that keep a journal in ``folder``."""
    return sum(record.get("examples", 0) for _, record in read_all(folder))


def set_aside_unfinished(folder: Path) -> None:
    """Clear away the journals of the previous run; those that end in a case are moved up a folder."""
    for path, record in list(read_all(folder)):
        if "case" in record:
            run = {key: value for key, value in record.items() if key not in ("done", "examples")}
            path.rename(folder.parent / name_of(run))
        else:
            path.unlink()


def unfinished_in(report_dir: Path) -> list[Path]:
    """Return the files of cases that did not come to their end in the runs before."""
    return sorted(report_dir.glob(f"{UNFINISHED}-*.json"))

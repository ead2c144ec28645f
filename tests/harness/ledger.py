"""What the processes of a run tell each other about the bugs they found: a file to which each appends JSON lines."""

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LEDGER = "bugs.jsonl"
"""The file, beside the journals."""

BEGUN, WITHDRAWN = "begun", "withdrawn"
"""Keys of records: of a failure that is about to be investigated, and of a report folder that is none of a bug."""

PATIENCE = 150.0
"""Seconds after which an investigation that another process has begun counts as dead."""


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


class Ledger:
    """One process's view of the file of all bugs. If it can't be written, the process knows only its own bugs."""

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self.open: dict[tuple[str, str, int], float] = {}
        self.unread: list[dict[str, Any]] = []

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        self.lines.append(record)

    def news(self) -> list[dict[str, Any]]:
        """Return the records added since the last call, including those of this process."""
        self._read()
        told, self.unread = self.unread, []
        return told

    def is_busy(self, kernel: str, part: str | None = None) -> bool:
        """Whether another process investigates a failure of a kernel, or has found a bug of it that is not read yet.

        With ``part`` it is one of this part of the kernel: see ``Finding.part``.
        """
        self._read()
        now, mine = time.time(), os.getpid()
        found = any(record.get("kernel") == kernel and record["process"] != mine for record in self.unread)
        for (name, about, process), since in self.open.items():  # in the order in which they have begun
            if name != kernel or part not in (None, about):
                continue
            if process == mine:
                break
            if now - since < PATIENCE and is_alive(process):
                return True
        return found

    @contextmanager
    def investigating(self, kernel: str, part: str) -> Iterator[None]:
        """Tell others that a failure of a part is investigated. Of two that begin at once the first goes on."""
        self.append({"begins": kernel, "part": part, "time": time.time()})
        try:
            yield
        finally:
            self.append({"ends": kernel, "part": part})
            self._read()

    def _read(self) -> None:
        """Read what was added to the file, and keep track of who investigates."""
        for record in self.lines.added():
            self.unread.append(record)
            if "begins" in record:
                self.open[record["begins"], record["part"], record["process"]] = record["time"]
            elif "ends" in record:
                self.open.pop((record["ends"], record["part"], record["process"]), None)

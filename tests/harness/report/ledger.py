"""What the processes of a run tell each other about the bugs they found: a file to which each appends JSON lines."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.files import Lines, is_alive

LEDGER = "bugs.jsonl"
"""The file, beside the journals."""

BEGUN, WITHDRAWN = "begun", "withdrawn"
"""Keys of records: of a failure that is about to be investigated, and of a report folder that is none of a bug."""

PATIENCE = 150.0
"""Seconds after which an investigation that another process has begun counts as dead."""


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

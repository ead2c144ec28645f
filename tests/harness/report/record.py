"""What a run writes down line by line as it goes, so that it can be merged with others even if it is killed."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.files import JOURNALS, append_line, own_version
from tests.harness.report.conclusion import DistinctBug, merged, together
from tests.harness.report.ledger import LEDGER, Ledger
from tests.harness.report.results import Results
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.shard import Shard, shard_of

RECORD = "results.jsonl"
"""The file, beside the journals: a line about the run, one of what it is to try, one for each item, one of its end."""
FORMAT = 1
"""The version of the file's format."""


class Recorder:
    """Writes the file of a run. A line that can't be written is kept, and written with the next one."""

    def __init__(self, path: Path, first: Mapping[str, Any]) -> None:
        self.path, self.unwritten = path, list[Mapping[str, Any]]()
        with suppress(OSError):
            path.unlink(missing_ok=True)
        self.add(first)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line to the file."""
        # If a line was written in part, the next one must not continue it.
        before = "\n" * bool(self.unwritten)
        self.unwritten.append(line)
        with suppress(OSError):
            while self.unwritten:
                append_line(self.path, self.unwritten[0], before)
                self.unwritten.pop(0)


def first_line(
    run: Mapping[str, Any],
    *,
    shard: Shard | None,
    report_dir: Path,
    environment: Mapping[str, str],
    kernels: Iterable[KernelInfo],
    not_run: Sequence[str],
) -> dict[str, Any]:
    """Return the line about the run: what must agree in runs that are merged, and what they have in common.

    ``run`` is what summary.json tells of the run as such, ``not_run`` the kernels that can't be run.
    """
    return {
        "flashproof": FORMAT,
        "version": own_version(),
        "shard": str(shard) if shard else None,
        "report_dir": str(report_dir),
        "run": run,
        "environment": environment,
        "kernels": [info.to_dict() for info in kernels],
        "not_run": not_run,
    }


def last_line(status: int, seconds: float, concluded: Sequence[DistinctBug]) -> dict[str, Any]:
    """Return the line of the end of a run: pytest's exit status, how long it took, which of its finds are one bug."""
    bugs = [{"folders": [one.bug.key, *one.twins], "offers": one.offers} for one in concluded]
    return {"status": status, "seconds": seconds, "bugs": bugs}


@dataclass(frozen=True)
class Recorded:
    """A run as its files tell it.

    Attributes:
        folder: its report directory.
        about: the first line of the file.
        results: what its items have counted and found.
        bugs: each distinct bug once, as the run has told them apart, or else as their records do.
        failed: the texts of items that failed, by the ids of the items.
        status: pytest's exit status, or None if the run was killed.
        seconds: how long it took; 0 if it was killed.
    """

    folder: Path
    about: Mapping[str, Any]
    results: Results
    bugs: tuple[DistinctBug, ...]
    failed: Mapping[str, str]
    status: int | None
    seconds: float

    @property
    def shard(self) -> Shard | None:
        """Return which of several runs it is, or None if it is one by itself."""
        return shard_of(self.about["shard"]) if self.about["shard"] else None

    @property
    def name(self) -> str:
        """Return what the run is called in messages: its shard, or else its folder."""
        return str(self.shard or self.folder)

    @property
    def is_whole(self) -> bool:
        """Whether the run came to its end, and was neither killed nor interrupted."""
        return self.status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def read_run(folder: Path) -> Recorded | None:
    """Read what a run has written into its report directory; None if it was killed before it wrote anything.

    Raises ValueError, in one line, if the folder is no report directory, or is one of another version's.
    """
    if not (folder / JOURNALS).is_dir():
        raise ValueError(f"got {str(folder)!r}, expected a report directory with the folder {JOURNALS}")
    path = folder / JOURNALS / RECORD
    try:
        about, *lines = _lines(path) or [None]
        if about is None:
            return None
        if about["flashproof"] != FORMAT:
            raise ValueError(f"got format {about['flashproof']!r:.80}, expected {FORMAT}")
        return _recorded(folder, about, lines)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}: can't be read ({type(e).__name__}: {e})") from e


def _lines(path: Path) -> list[Any]:
    """Return the records of a file of JSON lines, without a line that was written only in part."""

    def records() -> Iterator[Any]:
        with path.open() as file:
            for line in file:
                with suppress(json.JSONDecodeError):
                    yield json.loads(line)

    return list(records()) if path.exists() else []


def _recorded(folder: Path, about: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Recorded:
    results = Results([KernelInfo.from_dict(fields) for fields in about["kernels"]])
    for line in lines:
        if "selected" in line:
            results.selected.update(map(tuple, line["selected"]))
        if "item" in line:
            results.add(line["item"])
    failed = {line["failed"]: line["told"] for line in lines if "failed" in line}
    end = next((line for line in lines if "status" in line), None)
    if end is None:
        results.add_unreported(Ledger(folder / JOURNALS / LEDGER), is_over=True)
        bugs = tuple(merged(results.bugs, results.seen))
        return Recorded(folder, about, results, bugs, failed, status=None, seconds=0.0)
    bugs = tuple(_concluded(results, **one) for one in end["bugs"])
    return Recorded(folder, about, results, bugs, failed, end["status"], end["seconds"])


def _concluded(results: Results, folders: Sequence[str], offers: Sequence[str]) -> DistinctBug:
    one = together([results.bugs[key] for key in folders], results.seen)
    return replace(one, offers=tuple(offers))

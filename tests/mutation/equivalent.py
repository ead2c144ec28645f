"""The reasons, read from ``equivalent.toml``, why the suite does not tell some mutants from the original."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Argument:
    """The reason why some mutants survive: see ``equivalent.toml``, also for ``verdict`` and ``device``.

    Each of ``changes`` is the ``change`` of a ``tests.mutation.targets.Target``.
    """

    verdict: str
    reason: str
    changes: tuple[str, ...]
    device: str = ""


def _changes(text: str) -> Iterator[str]:
    """Yield each mutant that is written down in a text."""
    for lines in (block.splitlines() for block in text.strip("\n").split("\n\n")):
        for new in (line for line in lines if line[0] == "+"):
            yield "\n".join(line for line in lines if line[0] != "+" or line == new)


ARGUMENTS = tuple(
    Argument(**{**entry, "verdict": verdict, "changes": tuple(_changes(entry["changes"]))})
    for verdict, entries in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
    for entry in entries
)

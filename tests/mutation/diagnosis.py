"""Compare the causes that a report names with the cause that was written down for a planted bug."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kernels.contract import OUTPUTS
from tests.harness.bugs.failure import Explanation

CAUSES: Mapping[str, Sequence[str]] = tomllib.loads(Path(__file__).with_name("causes.toml").read_text())
"""For each planted bug, the words that a report of it may name as its cause."""

TENSORS = re.compile(r"^([a-z, ]+) (?:is|are) wrong; ")
PLACE = re.compile(r": only the (last [a-z ]+), ")
FACTOR = re.compile(r" times what it should be \((.+)\)$")

FACTS = (
    *OUTPUTS,
    *(f"last {place}" for place in ("query", "key", "column", "batch element", "query head", "key head")),
)
"""Words that say where a bug shows. They are true even if they are not the cause, so they never count as wrong."""


def named(explanation: Explanation) -> set[str]:
    """Return the words that a report names as a cause, in the vocabulary of ``causes.toml``."""
    words = set(explanation.causes)
    for sentence in explanation.sentences:
        if found := TENSORS.search(sentence):
            words.update(found[1].split(" and "))
        words.update(found[1] for pattern in (PLACE, FACTOR) if (found := pattern.search(sentence)))
    return words


def judged(words: Iterable[str], cause: Iterable[str]) -> str:
    """Return ``right`` if a cause is named, ``wrong`` if anything else but a fact is, ``none`` if nothing is."""
    words, cause = set(words), set(cause)
    if words - cause - set(FACTS):
        return "wrong"
    return "right" if words & cause else "none"

"""Whether a report names the cause of a planted bug: what it says, against what the catalogue said beforehand."""

import re
from collections.abc import Iterable

from kernels.contract import OUTPUTS
from tests.harness.explain import Explanation

TENSORS = re.compile(r"^([a-z, ]+) (?:is|are) wrong; ")
PLACE = re.compile(r": only the (last [a-z ]+), ")
FACTOR = re.compile(r" times what it should be \((.+)\)$")

FACTS = (
    *OUTPUTS,
    *(f"last {place}" for place in ("query", "key", "column", "batch element", "query head", "key head")),
)
"""Where it shows. That may be the cause; where it is not, nothing wrong has been said."""


def named(explanation: Explanation) -> set[str]:
    """The words of the catalogue's causes that a report uses."""
    words = set(explanation.causes)
    for sentence in explanation.sentences:
        if found := TENSORS.search(sentence):
            words.update(found[1].split(" and "))
        words.update(found[1] for pattern in (PLACE, FACTOR) if (found := pattern.search(sentence)))
    return words


def judged(words: Iterable[str], cause: Iterable[str]) -> str:
    """``right`` where a cause is named, ``wrong`` where something else is, ``none`` where nothing is told."""
    words, cause = set(words), set(cause)
    if words - cause - set(FACTS):
        return "wrong"
    return "right" if words & cause else "none"

"""A failure as it is reported: a run in which a law was broken, with what explains it."""

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernels.contract.tuners import CONFIG, is_tuner
from strategies.case import DECLARED, Case
from strategies.features import UNEQUAL
from tests.harness.law import law_named
from tests.harness.run import Run
from tests.harness.verdict import AFTER_OTHERS, INTERMITTENT, LEAK, LEAVES, SANITIZER, STATE, Finding

COMES_AND_GOES = "the same case does not fail on every run"

EVER_OTHER = "the same case fails by other numbers on every run"

HOLDS_ALONE = (
    "in a new process the case holds: what else is in memory makes the difference; hence no repro.py"
)

OF_MEMORY = "it depends on uninitialised memory: right if that is full of zeros"
"""What is said of a wrong tensor that is right with other numbers in memory that nobody has written."""

HOLDS_IN_TURN = (
    "if the programs of each launch run one after the other, the case holds: they spoil what others write; hence no "
    "repro.py"
)

FEATURES = {
    **{name: declared["called"] for name, declared in DECLARED.items()},
    "no_queries": "no queries",
    "query_tail": "a last tile of queries that is not full",
    "query_tiles": "the number of tiles of queries",
    "no_keys": "no keys",
    "key_tail": "a last tile of keys that is not full",
    "key_tiles": "the number of tiles of keys",
    "head_dim": "head_dim",
    "odd_head_dim": "a head_dim that is no power of two",
    UNEQUAL: "unequal lengths",
}
"""The words of a report for each feature that can be a cause. A launch setting is called by its own name."""


@dataclass(frozen=True)
class Field:
    """A field with its value, and the other values with which the case still fails (``fails``) or holds (``holds``).

    ``held`` are the cases that hold. ``claim`` is the ``--claims`` value for a kernel that is not meant to take the
    field's value; "" if there is none.
    """

    name: str
    value: str
    fails: tuple[str, ...]
    holds: tuple[str, ...]
    held: tuple[Case, ...] = ()
    claim: str = ""

    @property
    def matters(self) -> bool:
        """Whether another value makes the failure go away."""
        return bool(self.holds)


@dataclass(frozen=True)
class Explanation:
    """What is known of a failure beyond its numbers.

    Attributes:
        sentences: what follows from the wrong elements of the case, or of a larger one that fails alike.
        fields: the fields of the case that were varied.
        causes: the features of the case that the failure points to.
        pictures: error over bound of each wrong tensor, as made by ``pattern.picture``.
        larger: a larger case with other numbers that fails alike, if one is known.
    """

    sentences: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    causes: tuple[str, ...] = ()
    pictures: tuple[dict[str, Any], ...] = ()
    larger: Case | None = None

    def with_sentence(self, sentence: str) -> "Explanation":
        """Return the explanation with one more sentence, unless it has that already."""
        return replace(self, sentences=tuple(dict.fromkeys((*self.sentences, sentence))))

    @property
    def points_to(self) -> str:
        """Return the causes, in words, that a report names as "points to"."""
        return ", ".join(FEATURES.get(cause, _of_setting(cause)) for cause in self.causes)

    def lines(self) -> list[str]:
        """Return lines of text: causes, what is seen, fields that matter, fields that do not, and narrower claims."""
        matter = [field for field in self.fields if field.matters]
        without = [field.name for field in self.fields if not field.matters]
        told = [f"points to: {self.points_to}"] if self.causes else []
        told += self.sentences
        for field in matter:
            fails = ", ".join((field.value, *field.fails))
            told.append(f"{field.name}: fails with {fails}; holds with {', '.join(field.holds)}")
        if without:
            told.append(f"fails all the same with other values of {', '.join(without)}")
        told += [
            f"{field.name} {field.value} was never meant? --claims {field.claim}"
            for field in matter
            if field.claim
        ]
        return told


def _of_setting(name: str) -> str:
    """Return the words for a launch setting: its name, or the tuner that follows it."""
    return f"a configuration of {name.removesuffix(CONFIG)}'s tuner" if is_tuner(name) else name


UNEXPLAINED = Explanation()


@dataclass(frozen=True, kw_only=True)
class Failure(Run):
    """A run in which the law was broken; ``kernel`` is the name of the kernel."""

    kernel: str
    finding: Finding
    environment: dict[str, str]
    explanation: Explanation = UNEXPLAINED
    number: int = 0
    """How many bugs with the same law, dtype, tensor and kind were known before. It makes the folder's name unique."""

    @property
    def digest(self) -> str:
        """Return a hash of the bug, not of the case, so that a smaller case replaces the report of a larger one."""
        bug = (*self.kin, self.number) if self.number else self.kin
        return hashlib.sha256(repr(bug).encode()).hexdigest()[:10]

    @property
    def kin(self) -> tuple[Any, ...]:
        """Return the properties that the bug may share with other bugs of the kernel: see ``number``."""
        f = self.finding
        reported = (f.claim,) if self.sanitizer else ()
        return (self.spec, self.claims, self.law, self.case.dtype, f.tensor, f.kind, *reported)

    @property
    def folder(self) -> Path:
        """Return the folder of its report, relative to the report directory."""
        return Path(re.sub(r"[^\w.-]", "_", self.kernel).strip(".")) / f"{self.law}-{self.digest}"


def headline(failure: Failure) -> str:
    """Return one line that names kernel, law, what it computes instead or what is wrong, and dtype."""
    return f"{failure.kernel}: law `{failure.law}` is broken, {in_short(failure)} ({failure.case.dtype})"


def in_short(failure: Failure) -> str:
    """Return what the kernel computes instead of attention, or else what is wrong."""
    return failure.finding.certificate if failure.finding.tells_instead else symptom(failure)


def symptom(failure: Failure) -> str:
    """Return what is wrong, such as ``out is wrong`` or ``exception``."""
    f = failure.finding
    if f.kind == INTERMITTENT:
        return f"{f.tensor} is wrong now and then" if f.tensor else "it fails now and then"
    if f.kind == LEAK:
        return "memory leaks"
    if f.kind == SANITIZER:
        return f"{failure.sanitizer} reports an error"
    if f.kind == STATE:
        return f"a call leaves {f.claim.removeprefix(LEAVES)}"
    if f.kind == AFTER_OTHERS or (failure.case.earlier and law_named(failure.law).has_earlier_calls):
        return f"{f.tensor} keeps state" if f.tensor else "it fails after other calls"
    if f.kind == "nonfinite":
        return f"{f.tensor} hides NaN" if f.of_nan == ("lost",) else f"{f.tensor} is not finite"
    return f"{f.tensor} is wrong" if f.tensor else f.kind

"""What comes back from running one case: small, plain records that travel as JSON."""

import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from sysconfig import get_path
from typing import Any

from kernels.contract.tuners import is_tuner
from reference.records import ONLY, SIZES
from strategies.case import TENSORS, Case, changed
from tests.harness.files import ROOT

NUMBERS = ("error", "nonfinite")
"""The kinds of findings in which numbers were compared."""
INTERMITTENT = "intermittent"
"""The kind of a finding that comes and goes: the same case sometimes holds."""
AFTER_OTHERS = "after others"
"""The kind of a finding that a case shows after other calls of its process, and never in the first call of one."""
MEMORY = "memory"
"""The kind of a finding that memory was touched which a call has to leave alone."""
RAISED = ", but the kernel raised "
"""What stands in the claim about an exception between what was claimed and the words of the exception."""
LEAK = "leak"
"""The kind of a finding that memory stays behind at each call."""
STATE = "state"
"""The kind of a finding that a call leaves something behind in its process."""
LEAVES = "a call leaves nothing behind, but it leaves "
"""How the claim of such a finding begins; what follows says what is left."""
RETURNED_BEFORE = "{} in the memory that an earlier call returned"
"""How it is told that a call leaves a tensor in the memory of what an earlier call has returned.

``device.left_behind``, of which a stand-alone script has a copy, tells it in these words and some more.
"""
STAYS = "{} of an earlier call stays as that call returned it"
"""The claim that is broken if a call writes over a tensor that an earlier call has returned."""
SANITIZER = "sanitizer"
"""The kind of a finding that a tool such as memcheck reports of a call."""
UNCLEAR = "unclear"
"""The kind of a finding that says neither that a case shows a bug nor that it holds."""
ENDS = ("fault", "died", "hung")
"""The kinds after which nothing more can be asked of the process in which they were found."""
DIGITS = 3
"""Factors that were fitted to different calls are the same if they agree in so many digits."""
FRAME = 'File "'
"""How a line of a traceback begins that says where a frame is."""
CAUSED = "The above exception was the direct cause of the following exception:"
"""What stands between the tracebacks of an exception and of the one that it caused."""
PACKAGES = ("/site-packages/", "/dist-packages/")
"""Parts of the paths of installed packages."""
NOT_OF_KERNELS = (
    *(str(ROOT / x) for x in ("tests/harness/", "kernels/registry.py")),
    get_path("stdlib"),
    "<",
)
"""How the paths of files begin that no kernel is in."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One law broken at one element.

    Attributes:
        claim: the sentence that is false.
        kind: "error" (beyond its bound), "nonfinite" (NaN or infinity where a number belongs), "exception",
            "fault" (one after which the device answers no more: an illegal or misaligned address), "contract"
            (shape, dtype), "memory", "accepted" (should have been refused), "leak" (of memory), "died", "hung",
            "state" (something is left behind in the process), "sanitizer" (a tool such as memcheck reports an error),
            "intermittent": any of these that the same case does not show on every run, as after a race, or "after
            others": any of these that it shows only after other calls, of which nobody knows which ones it needs.
        tensor: which output (or input) is wrong; "" if none is. Of several wrong ones it is the one with the largest
            ratio, and ``tensors`` are all that were wrong in the same comparison.
        index: the worst element; expected, actual, allowed: its value, the kernel's, the largest error a
            correct kernel can have there; ratio: error over allowed.
        wrong, total, nan, posinf, neginf: how many elements are out of bounds, of how many; how many of the
            kernel's are not finite.
        of_nan: "made" if NaN or infinity stands where a finite number belongs, "lost" if a number stands where NaN
            belongs; both if either is somewhere in the tensor, or if it is not known which of two calls is wrong.
        ulps: the error at the worst element, in units in the last place that the output's dtype has at the expected
            value; relative: the norm of the error over the norm of the expected tensor.
        call: which of the trial's kernel calls produced ``actual``; expression: how it is computed from the
            tensors of that call, unless it is one of them as it is.
        other, other_expression: the same for ``expected``, if two calls are compared.
        detail: a traceback, the end of a crashed process's stderr.
        rate: of an intermittent finding, how many repeats of the case have failed, and how many were made.
        explained_by: claims that would each make this no error, by way of a design that is less precise than
            FlashAttention-2; the one with the smallest errors comes first.
        likely: those of them that no other one explains much better.
        certificate: what the kernel does in place of what is right, in words; "" if that is not known.
        alternatives: the same as records of ``reference.alternatives`` in JSON, as far as it is one of these.
        of_some: whether it is known only of calls that have what the bug needs.
        outside: where memory lies around the inputs that is read, so that NaN there makes the tensor NaN, such as
            "behind k".
    """

    claim: str
    kind: str
    tensor: str = ""
    tensors: tuple[str, ...] = ()
    index: tuple[int, ...] = ()
    expected: float | str | None = None
    actual: float | str | None = None
    allowed: float | str | None = None
    ratio: float | str | None = None
    ulps: float | str | None = None
    relative: float | str | None = None
    wrong: int = 0
    total: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    of_nan: tuple[str, ...] = ()
    call: int = 0
    other: int | None = None
    expression: str = ""
    other_expression: str = ""
    detail: str = ""
    rate: tuple[int, ...] = ()
    explained_by: tuple[str, ...] = ()
    likely: tuple[str, ...] = ()
    certificate: str = ""
    alternatives: tuple[str, ...] = ()
    of_some: bool = False
    outside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # JSON turns tuples into lists.
        for name in (
            "index",
            "tensors",
            "of_nan",
            "rate",
            "explained_by",
            "likely",
            "alternatives",
            "outside",
        ):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def ends_process(self) -> bool:
        """Whether nothing more can be asked of the process in which it was found."""
        return self.kind in ENDS

    @property
    def origin(self) -> str:
        """Return what tells a bug from others by words alone; "" if nothing does.

        It is what a sanitizer reports, or what is left behind, or how the contract is broken, whatever the numbers and
        dtypes in these words, or an exception with its place in the source, whatever the numbers in its words and
        however the kernel was called, or the line of an access to memory with the operand.
        """
        if self.kind in (SANITIZER, STATE):
            return self.claim
        if self.kind == "contract":
            return re.sub(r"torch\.\w+|\d+", "0", self.claim)
        if self.kind == MEMORY:
            return self.claim.partition(", but ")[2] if self.place else ""
        before, raised, what = self.claim.partition(RAISED)
        words = re.sub(r"\d+", "0", what if raised else before)
        return f"{words} {self.place}" if self.kind == "exception" and self.place else ""

    @property
    def place(self) -> str:
        """Return the last line of a traceback that is of a kernel, not of what it calls; "" without a traceback.

        Of an exception that another one caused, it is the line of the cause. If no line is outside of packages,
        Python's library and Flashproof, it is the last line of all.
        """
        parts = [
            [line.strip() for line in part.splitlines() if line.strip().startswith(FRAME)]
            for part in self.detail.split(CAUSED)
        ]
        of_kernel = (line for part in parts for line in reversed(part) if _is_of_kernel(line))
        return next(of_kernel, next((part[-1] for part in reversed(parts) if part), ""))

    @property
    def part(self) -> str:
        """Return what of a kernel it is about: wrong numbers of its forward or of its gradients, or its kind.

        A bug of one part hardly ever explains a failure of another. Gradients are judged at the kernel's own out and
        lse, whatever these are.
        """
        if self.kind not in NUMBERS:
            return self.signature[0]
        return "gradients" if {"out", "lse"}.isdisjoint((self.tensor, *self.tensors)) else "forward"

    @property
    def hides_numbers(self) -> bool:
        """Whether no numbers came back that could be judged, right or wrong: after a write to an input, none can."""
        writes_input = self.kind == "memory" and self.tensor in TENSORS
        return writes_input or self.ends_process or self.kind in ("exception", "contract", UNCLEAR)

    @property
    def is_all_nan(self) -> bool:
        """Whether all of out is NaN, so that no gradient that follows from it can be judged."""
        return self.tensor == "out" and 0 < self.nan == self.total

    @property
    def has_lse_of_no_keys(self) -> bool:
        """Whether all that is not finite is -inf in lse, which is right for a row that sees no key."""
        return self.tensor == "lse" and self.neginf > 0 == self.nan == self.posinf

    @property
    def signature(self) -> tuple[str, ...]:
        """Return what findings of one bug have in common: their kind, with the type of an exception or the tensor."""
        if self.kind in NUMBERS:
            return ("numbers",)
        if self.kind == INTERMITTENT:  # a race makes any tensor wrong
            return (self.kind, "ends" if self.actual is None else "numbers")
        if self.kind in (SANITIZER, STATE):
            return (self.kind, self.claim)
        if self.ends_process:
            return ("ends",)
        if self.kind == "exception":
            return (self.kind, self.claim.partition(":")[0])
        return (self.kind, self.tensor)

    @property
    def symptom(self) -> tuple[Any, ...]:
        """Return what failures that may be one bug hardly ever differ in: tensor, kind, and what is done to NaN."""
        return self.tensor, self.signature, self.of_nan

    def is_akin(self, other: "Finding") -> bool:
        """Whether one bug may have caused both, by what they have in common.

        What only makes NaN is no bug that only hides it. A bug that moves NaN from one row to another does both, and
        one of which only an lse of -inf is known may do either.
        """
        known = not (self.has_lse_of_no_keys or other.has_lse_of_no_keys)
        apart = known and self.of_nan and other.of_nan and {*self.of_nan}.isdisjoint(other.of_nan)
        return self.signature == other.signature and not apart

    @property
    def has_fitted_numbers(self) -> bool:
        """Whether an alternative has a number that is fitted to calls: it is known as far as their bounds allow."""
        values = (x for _, _, told in map(json.loads, self.alternatives) for x in told.values())
        return any(isinstance(x, float) for x in values)

    @property
    def instead(self) -> set[tuple[Any, ...]]:
        """Return what the kernel does instead, in parts that are compared with those of other findings.

        These are each alternative with each tensor that it concerns, and each place outside of a tensor that is read.

        Sizes of tiles and restrictions to some calls are left out, as they may follow head_dim, and fitted numbers are
        rounded.
        """
        found: set[tuple[Any, ...]] = {("outside", place) for place in self.outside}
        for name, tensors, values in map(json.loads, self.alternatives):
            told = {key: f"{x:.{DIGITS}g}" if isinstance(x, float) else x for key, x in values.items()}
            told = {key: x for key, x in told.items() if key not in (*SIZES, ONLY)}
            found |= {(name, tensor, *sorted(told.items())) for tensor in tensors}
        return found

    def is_told_as(self, other: "Finding") -> bool:
        """Whether two findings are of one bug by words alone: those of their origin, or of what is computed instead."""
        return bool(self.origin and self.origin == other.origin) or not self.instead.isdisjoint(other.instead)

    def overwrites_as(self, other: "Finding") -> bool:
        """Whether a call returns a tensor in memory that an earlier call returned, and ``other`` is what it changes."""
        name = other.tensor
        return (
            self.kind == STATE
            and RETURNED_BEFORE.format(name) in self.claim
            and other.claim == STAYS.format(name)
        )

    @property
    def tells_instead(self) -> bool:
        """Whether it is known what the kernel does instead, so that a report begins with it."""
        is_written = self.kind == "memory" and bool(self.certificate)
        return is_written or bool(self.alternatives or self.outside)

    def told_instead_as(self, other: "Finding") -> "Finding":
        """Return the finding with what another of the same bug says that the kernel does instead."""
        return replace(
            self,
            certificate=other.certificate,
            alternatives=other.alternatives,
            of_some=other.of_some,
            outside=other.outside,
        )

    def with_nan_of(self, other: "Finding") -> "Finding":
        """Return the finding with what another of the same bug did to NaN added."""
        return replace(self, of_nan=tuple(sorted({*self.of_nan, *other.of_nan})))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one case under one law.

    ``status`` is "held", "broken", "refused" (NotImplementedError) or "skipped" (the case could not be run
    here; ``reason`` says why). ``worst`` has the largest error over bound for each tensor; ``seconds`` the
    time spent in "kernel" (launches), "check" (references, bounds, comparisons) and "tensors". ``beside`` are tensors
    that are wrong too, but were not judged because they are known to be wrong in every case.
    ``designs`` are the members of a family that explained what was judged, in words. ``idle`` says, for each tensor
    that was judged, whether the case tests nothing of it because an answer of 0 would hold. ``notes`` are those of
    ``Trial.note``, with whether the case shows them. ``sizes`` are those of the calls of a law that is broken: see
    ``Trial.sizes``. ``launched`` has the configurations that were run, by the launch setting of each tuner that was
    called.
    """

    status: str
    worst: dict[str, float] = field(default_factory=dict)
    finding: Finding | None = None
    reason: str = ""
    beside: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    designs: list[str] = field(default_factory=list)
    idle: dict[str, bool] = field(default_factory=dict)
    notes: dict[str, bool] = field(default_factory=dict)
    sizes: list[dict[str, Any]] = field(default_factory=list)
    launched: dict[str, list[str]] = field(default_factory=dict)

    def case_of(self, case: Case) -> Case:
        """Return the case with the configurations that were run, where pruning or the device excluded its own."""
        taken = ((name, value, self.launched.get(name, [value])) for name, value in case.launch)
        launch = tuple((name, value if value in own else own[0]) for name, value, own in taken)
        return changed(case, launch=launch) if launch != case.launch else case

    def counted(self, case: Case) -> Case:
        """Return the case that was tried: one without the settings of tuners that were not called in it."""
        launch = tuple(x for x in self.case_of(case).launch if x[0] in self.launched or not is_tuner(x[0]))
        return changed(case, launch=launch) if launch != case.launch else case

    @property
    def tells_answers(self) -> bool:
        """Whether the kernel was called and something of what it did was judged, unlike where a law asks nothing."""
        return bool(self.worst) or self.status == "broken"

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON."""
        return {**vars(self), "finding": self.finding and asdict(self.finding)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Verdict":
        """Make a verdict from what ``to_dict`` returned, also after JSON."""
        finding = fields.pop("finding")
        fields["beside"] = tuple(fields.get("beside", ()))
        return cls(finding=Finding(**finding) if finding else None, **fields)


def as_number(value: float) -> float | str:
    """Return a float as JSON can hold it: NaN and infinities become "nan", "inf" and "-inf"."""
    return value if value - value == 0.0 else str(float(value))


def _is_of_kernel(frame: str) -> bool:
    """Whether a frame of a traceback is outside of packages, Python's library and Flashproof."""
    path = frame.removeprefix(FRAME)
    return not path.startswith(NOT_OF_KERNELS) and not any(folder in path for folder in PACKAGES)


def in_ulps(ulps: float) -> str:
    """Say how large an error is: in ulps, unless it is infinitely many, as where a number should be 0."""
    if not math.isfinite(ulps):
        return "off where it should be 0"
    return f"{ulps:.3g} ulp{'s' * (f'{ulps:.3g}' != '1')} off"


PAST_THE_END = "nothing is read or written past the end of a tensor"
"""The claim that is broken if a process ends at a fence, which is memory that nobody may touch behind a tensor.

Of kernels whose accesses are known before they are made, it is told without a fence.
"""


BEFORE_THE_BEGINNING = "nothing is read or written before the beginning of a tensor"
"""The same of memory before a tensor."""

"""The bugs of a kernel that a process knows, the failures counted for them, and the text of an item about them."""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strategies.case import Case
from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.bug import Bug, Occurrences, in_parts, with_tensors
from tests.harness.bugs.failure import Failure
from tests.harness.bugs.imprecise import Imprecise, ImpreciseCall
from tests.harness.files import JOURNALS
from tests.harness.law import law_named
from tests.harness.report import folder as report
from tests.harness.report.database import Finds
from tests.harness.report.ledger import BEGUN, LEDGER, WITHDRAWN, Ledger
from tests.harness.report.wording import told
from tests.harness.running.exits import SCRIPT
from tests.harness.verdict import NUMBERS, SANITIZER, Finding

MOST_BLAMED = 5
"""After this many failures of one bug, drawn cases are changed so that they do not trigger it."""

MOST_BLAMED_IN_DOUBT = 40
"""The same for a bug that some ordinary case does not show although it meets all known conditions.

The conditions are too wide then, and another bug may show only in cases that meet them, which would never be run.
"""

MOST_ENDED = 3
"""After a bug without conditions has ended the process this often, no further case is run."""

MOST_NEEDS = 2
"""The most conditions by which a bug of which only the drawn case is known is distinguished from known bugs."""


@dataclass
class KnownBugs:
    """The bugs of one kernel at one dtype, found by this process or read from the ledger of the run.

    Attributes:
        kernel: the kernel's name.
        dtype: the dtype of this process's cases.
        report_dir: where reports are written.
        verbose: whether the text of an item has all that is known of a new bug. Else it has one line a bug, since the
            summary has the rest.
        finds: the database of failing cases, which outlasts the run.
        bugs: the bugs, by ``Bug.key``.
        failures: the failures that this process has reported, by ``Bug.key``.
        blamed: how many failing examples of this process were counted for a bug, by bug and law.
        blamed_elsewhere: the same for other processes, by bug.
        precision: all calls of the run that are less precise than claimed.
        hangs: whether a case of the kernel has hung, in any dtype.
        seen: the failing examples of the present item, by bug.
        imprecise: the less precise calls of the present item.
    """

    kernel: str
    dtype: str
    report_dir: Path
    verbose: bool
    finds: Finds = field(default_factory=Finds)
    bugs: dict[str, Bug] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    blamed: Counter[tuple[str, str]] = field(default_factory=Counter)
    blamed_elsewhere: Counter[str] = field(default_factory=Counter)
    precision: Imprecise = field(default_factory=Imprecise)
    hangs: bool = False

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.report_dir / JOURNALS / LEDGER)
        self.begin()

    def begin(self) -> None:
        """Start a new item."""
        self.seen: dict[str, Occurrences] = {}
        self.imprecise = Imprecise()
        self.unread: list[str] = []

    def messages(self) -> list[str]:
        """Return the messages for the user since the last call."""
        lines, self.unread = self.unread, []
        return lines

    def tell(self, line: str) -> None:
        """Add a line to the messages, unless it is there already."""
        if line not in self.unread:
            self.unread.append(line)

    def write(self, failure: Failure, script: str | None) -> None:
        """Write a report, and keep its case for later runs. If the report can't be written, a message says so."""
        try:
            report.write(failure, self.report_dir, script)
        except OSError as e:
            self.tell(f"report not written: {self.report_dir / failure.folder}: {e.strerror}")
        self.finds.keep(Bug(failure))

    def write_first(self, failure: Failure) -> None:
        """Write the first report of a failure and announce its bug, in case this process is killed soon after."""
        self.write(failure, None)
        self.announce(Bug(failure))

    def withdraw(self, failure: Failure) -> None:
        """Remove the report and the records of a failure that turned out to be a false alarm or a duplicate."""
        shutil.rmtree(self.report_dir / failure.folder, ignore_errors=True)
        self.finds.withdraw(str(failure.folder))
        self.ledger.append({WITHDRAWN: str(failure.folder)})

    def announce(self, bug: Bug) -> None:
        """Announce a bug under investigation, so that other processes avoid its trigger."""
        self.ledger.append({BEGUN: bug.to_dict()})

    def learn(self) -> None:
        """Read what other processes have found."""
        for record in self.ledger.news():
            begun = record.get(BEGUN, {})
            if begun.get("kernel") == self.kernel and begun["needs"]:
                bug = Bug.from_dict(begun)
                self.bugs[bug.key] = bug
            elif record.get("kernel") == self.kernel:
                bug = Bug.from_dict(record)
                self.bugs[bug.key] = with_tensors(bug, self.bugs.get(bug.key, bug).tensors)
            elif WITHDRAWN in record:
                self.bugs.pop(record[WITHDRAWN], None)
            elif record.get("hangs") == self.kernel:
                self.hangs = True
            elif record.get("blamed") in self.bugs and record["dtype"] == self.dtype:
                self.blamed_elsewhere[record["blamed"]] += record["process"] != os.getpid()
            elif record.get("imprecise") == self.kernel:
                self.precision.merge(Imprecise.from_dict(record))

    def add(self, bug: Bug) -> None:
        """Add a bug, or replace its record by a fuller one, for this process, other processes and later runs.

        If it has a certificate now that it had not, its report is written again, with the script that it has.
        """
        known = self.bugs.get(bug.key, bug)
        if bug.failure.finding.certificate != known.failure.finding.certificate:
            script = self.report_dir / bug.failure.folder / SCRIPT
            self.write(bug.failure, script.read_text() if script.exists() else None)
        self.bugs[bug.key] = bug
        if bug.key in self.failures:
            self.finds.keep(bug)
        self.ledger.append(bug.to_dict())

    def note_hang(self) -> None:
        """Note that a case of the kernel has hung, for other processes too, before the failure is investigated."""
        self.hangs = True
        self.ledger.append({"hangs": self.kernel})

    def forget(self, bug: Bug) -> None:
        """Stop attributing failures to this bug; it is still reported."""
        self.learn()  # records of the bug that are still unread would add it again
        self.bugs.pop(bug.key, None)

    def keeping(self, finding: Finding) -> Bug | None:
        """Return the bug that keeps something from call to call and may have made these numbers wrong, or None.

        One of which it is known what calls it needs comes first.
        """
        found = [bug for bug in self.bugs.values() if bug.may_spoil_later(finding)]
        return min(found, key=lambda bug: not bug.needs_earlier_calls, default=None)

    def blame_keeping(self, broken: FailingExample) -> bool:
        """Count a failure for the bug that ``keeping`` returns, and say whether there is one."""
        keeping = self.keeping(broken.finding)
        if keeping is not None:
            self.count(keeping, broken.law, broken.case, broken.finding.tensor)
        return keeping is not None

    def ignored(self, law: str, case: Case) -> frozenset[str]:
        """Return the tensors that an unconditional bug makes wrong. If they are not judged, other errors show.

        A basic law judges them against what the kernel computes instead, if that is certified.
        """
        always = (bug for bug in self._hiding(law) if bug.is_everywhere and bug.is_met(case))
        return frozenset(x for bug in always if bug.failure.finding.kind in NUMBERS for x in bug.tensors)

    def closed(self, law: str) -> tuple[Bug, ...]:
        """Return the bugs whose triggers are avoided in the cases of a law."""
        bugs = filter(self._is_closed, self._hiding(law))
        return tuple(bugs if law_named(law).is_never_restated else map(in_parts, bugs))

    def _hiding(self, law: str) -> list[Bug]:
        """Return the bugs that may hide others in a law: a basic one is judged against what a certified bug gives."""
        is_basic = law_named(law).is_basic
        return [bug for bug in self.bugs.values() if not (bug.is_certified_exactly and is_basic)]

    def _is_closed(self, bug: Bug) -> bool:
        """Whether a bug's trigger is avoided.

        1. A bug that ends the process: as soon as it has a condition, or else after ``MOST_ENDED`` failures.
        2. A sanitizer's report: never, since the laws hold in its cases.
        3. Any other bug: after enough failures, if it has a condition besides lengths and numbers. Without one, no
           other case could stand for the cases that meet it.
        """
        own = sum(count for (key, _), count in self.blamed.items() if key == bug.key)
        blamed = own + self.blamed_elsewhere[bug.key]
        if bug.failure.finding.ends_process:
            return bool(bug.needs) or blamed >= MOST_ENDED
        if bug.failure.finding.kind == SANITIZER:
            return False
        most = MOST_BLAMED_IN_DOUBT if bug.severity.missed else MOST_BLAMED
        return blamed >= most and any(not need.is_numeric for need in bug.needs)

    def tells_apart(self, bug: Bug) -> bool:
        """Whether a bug's conditions distinguish it from all known bugs that make the same tensors wrong.

        They do if they are few, and on no field that is in a known bug's conditions. Example: this bug has a condition
        on causal, the known bug on group. This is asked at the end of a run, when only the drawn case is known.
        """
        rivals = [x for x in self.bugs.values() if x.could_break(bug.failure.finding)]
        own = bug.fields_needed
        few = 0 < len(bug.needs) <= MOST_NEEDS
        return not rivals or (few and all(own.isdisjoint(x.fields_needed) for x in rivals))

    def count(self, bug: Bug, law: str, case: Case, tensor: str) -> None:
        """Count one failing example for a bug. When a law first shows the bug, a message says so."""
        if not self.blamed[bug.key, law]:
            self.unread.append(self._told(bug, law))
        self.blamed[bug.key, law] += 1
        self.ledger.append({"blamed": bug.key, "dtype": self.dtype})
        self.seen.setdefault(bug.key, Occurrences()).add(law, case, tensor)

    def blame_beside(self, law: str, case: Case, beside: Sequence[str]) -> None:
        """Count a case for the unconditional bugs that make some of the tensors ``beside`` wrong."""
        for bug in list(self.bugs.values()):
            shared = [tensor for tensor in beside if tensor in bug.tensors]
            if shared and bug.needs_no_more_than_dtype and bug.may_show_under(law) and bug.is_met(case):
                self.count(bug, law, case, shared[0])

    def _told(self, bug: Bug, law: str) -> str:
        """Return the message about a bug: one line or, with ``verbose`` and for a new bug, all that is known."""
        path = self.report_dir / bug.failure.folder / "report.md"
        if bug.key not in self.failures or any(key == bug.key for key, _ in self.blamed):
            what = f"{self.kernel}: law `{law}` is broken ({self.dtype}) by a bug that is reported already"
            return f"{what}: {path}"
        if not self.verbose:
            return f"{report.headline(bug.failure)}: {path}"
        more = (f"    {line}" for _, line in told(bug, Occurrences()))
        return "\n".join([report.message(bug.failure, self.report_dir), *more])

    def is_less_precise(self, broken: FailingExample) -> bool:
        """Whether some claim explains a less precise call and all earlier ones. If so, the call is counted as such."""
        call = ImpreciseCall.of(broken.law, broken.case, broken.finding)
        if not (call.explained_by and self.precision.explains_also(call)):
            return False
        before = self.precision.claims.get(self.dtype)
        self.precision.add(call)
        if not self.imprecise.total:
            self.unread.append(
                f"{self.kernel}: law `{broken.law}`: {call.tensor} is less precise than FlashAttention-2 "
                f"({self.dtype}), as {' or '.join(call.likely)} would have it; the summary tells of all calls"
            )
        self.imprecise.add(call)
        if self.precision.claims[self.dtype] != before:
            self.ledger.append({"imprecise": self.kernel, **Imprecise.told_by(call).to_dict()})
        return True

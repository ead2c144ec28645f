"""The results of a run: counts for each kernel, law and dtype, the bugs found, and the content of summary.json."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pytest

from kernels.contract import DTYPES, GRADIENTS
from strategies.case import Case
from strategies.coverage import Tried
from tests.harness.bugs.bug import Bug, Occurrences, with_tensors
from tests.harness.bugs.imprecise import Imprecise, sentence
from tests.harness.law import MATTERS_MOST, by_place, law_named
from tests.harness.report.changes import told_gone
from tests.harness.report.conclusion import DistinctBug, merged
from tests.harness.report.ledger import BEGUN, WITHDRAWN, Ledger
from tests.harness.report.wording import row as row_of
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.refusals import (
    NO_ADVICE,
    Advice,
    Item,
    Seen,
    asked_about,
    complaint,
    drawn_within,
    is_mostly_refused,
)
from tests.harness.running.refusals import merged as merged_tallies
from tests.harness.running.tally import CASES, Tally, by_field, claimed, is_judged

FORMAT = 1
"""The version of the format of summary.json."""

Key = tuple[str, str, str]
"""The names of a kernel, a law and a dtype."""
Tell = Callable[[str, Mapping[Item, Tally], Advice], str | None]
"""Makes one line about a kernel, or None, from its name, its counts and the advice on it."""


class Results:
    """All that the items of a run have counted and found, in all processes.

    Attributes:
        infos: the kernels, by name.
        selected: the kernels, laws and dtypes that the run is to try: all that the user has not excluded.
        tallies: the counts of each kernel, law and dtype.
        bugs: the bugs, by report folder.
        seen: the failing examples of each bug, by report folder. A bug in ``unreported`` has one.
        begun: bugs whose investigation is not over.
        unreported: folders of bugs that are in the ledger, but in no item's results yet.
        broken: the folders of the bugs that break a law at a dtype.
        imprecise: calls of each kernel that are less precise than claimed.
        less_precise: the kernels, laws and dtypes of these calls.
        concluded: each distinct bug once; empty until the run is over.
        gone: bugs of earlier runs whose cases pass.
        notices: what a user must know of the whole run.
        advice: claims for kernels that refuse much, once they are tried.
    """

    def __init__(self, kernels: Sequence[KernelInfo]) -> None:
        self.infos = {info.name: info for info in kernels}
        self.selected: set[Key] = set()
        self.tallies: dict[Key, Tally] = {}
        self.bugs: dict[str, Bug] = {}
        self.seen: dict[str, Occurrences] = {}
        self.begun: dict[str, Bug] = {}
        self.unreported: set[str] = set()
        self.broken: dict[Key, set[str]] = {}
        self.imprecise: dict[str, Imprecise] = {}
        self.less_precise: set[Key] = set()
        self.concluded: list[DistinctBug] = []
        self.gone: list[Bug] = []
        self.notices: list[str] = []
        self.advice: dict[str, Advice] = {}

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add what one item has counted and found: ``counts`` is the attribute ``flashproof`` of its pytest report."""
        key = (counts["kernel"], counts["law"], counts["dtype"])
        self.tallies.setdefault(key, Tally()).merge(Tally.from_dict(counts["tally"]))
        for bug in map(Bug.from_dict, counts["bugs"]):
            known = self.bugs.get(bug.key, bug)
            self.bugs[bug.key] = with_tensors(bug, known.tensors)
        for folder, seen in counts["seen"].items():
            sightings = Occurrences.from_dict(seen)
            if folder in self.unreported:
                self.unreported.remove(folder)
                del self.seen[folder]
            self.seen.setdefault(folder, Occurrences()).merge(sightings)
            # A failure that waited for its investigation may be of the law and dtype of an earlier item.
            for law, dtype, _ in sightings.counts:
                self.broken.setdefault((key[0], law, dtype), set()).add(folder)
        self.gone += map(Bug.from_dict, counts.get("gone", ()))
        self.notice(counts.get("notices", ()))
        imprecise = Imprecise.from_dict(counts["imprecise"])
        if imprecise.total:
            self.imprecise.setdefault(counts["kernel"], Imprecise()).merge(imprecise)
            self.less_precise.add(key)

    def add_unreported(self, ledger: Ledger, *, is_over: bool) -> None:
        """Add the bugs in a run's ledger that are in no item's results, each with one failing example until they are.

        If the run ``is_over``, this includes a bug whose process ended during the investigation, as far as it is known.
        """
        for record in ledger.news():
            self.begun.pop(record.get(WITHDRAWN, ""), None)
            told = record.get(BEGUN, record)
            if "finding" not in told or told["kernel"] not in self.infos:
                continue
            bug = Bug.from_dict(told)
            if told is not record:
                self.begun[bug.key] = bug
                continue
            self.bugs[bug.key] = with_tensors(bug, self.bugs.get(bug.key, bug).tensors)
        if is_over:
            self.bugs = self.begun | self.bugs
        for key, bug in self.bugs.items():
            if key not in self.seen:
                f = bug.failure
                self.unreported.add(key)
                self.seen[key] = Occurrences()
                self.seen[key].add(f.law, f.case, f.finding.tensor)
                self.broken.setdefault((f.kernel, f.law, f.case.dtype), set()).add(key)

    def absorb(self, other: "Results", folders: Mapping[str, str]) -> None:
        """Add what another run has counted, but not its bugs, which ``conclude`` adds.

        ``folders`` has the names here of the other run's report folders.
        """
        self.selected |= other.selected
        for key, tally in other.tallies.items():
            self.tallies.setdefault(key, Tally()).merge(tally)
        for key, reports in other.broken.items():
            self.broken.setdefault(key, set()).update(folders.get(x, x) for x in reports)
        for kernel, calls in other.imprecise.items():
            self.imprecise.setdefault(kernel, Imprecise()).merge(calls)
        self.less_precise |= other.less_precise
        self.gone += other.gone
        self.notice(other.notices)

    def notice(self, lines: Iterable[str]) -> None:
        """Add lines that a user must know of the whole run, each once."""
        self.notices = list(dict.fromkeys([*self.notices, *lines]))

    def conclude(self, concluded: Sequence[DistinctBug]) -> None:
        """Keep the distinct bugs of the whole run.

        Less precise calls of a kernel count for its bugs if these explain all of them.
        """
        self.concluded = list(concluded)
        for kernel, calls in list(self.imprecise.items()):
            bugs = [one.bug for one in concluded if one.bug.failure.kernel == kernel]
            if not calls.are_of(bugs):
                continue
            del self.imprecise[kernel]
            of_kernel = {key for key in self.less_precise if key[0] == kernel}
            self.less_precise -= of_kernel
            for key in of_kernel:
                self.broken.setdefault(key, set()).update(bug.key for bug in bugs if calls.shows(bug))

    @property
    def told(self) -> list[str]:
        """Return lines that a user must know about the run, about each kernel, and about bugs that are gone."""
        found = [one.bug for one in self.concluded] or self.bugs.values()
        return [*self.notices, *self._notes(), *told_gone(self.gone, found)]

    def _notes(self) -> Iterator[str]:
        """Yield each note on a kernel once, with the number of examples that show it: see ``Trial.note``."""
        for kernel, total in self._of_kernels().items():
            for text, count in total.shown.items():
                if count:
                    examples = f"{count} of {total.noted[text]} such examples"
                    yield f"{kernel}: {text.replace('{}', examples)}"

    @property
    def keys(self) -> set[Key]:
        """Return each kernel, law and dtype that is to be tried, or was run, or showed a bug."""
        return {*self.selected, *self.tallies, *self.broken}

    @property
    def kernels(self) -> list[str]:
        """Return the names of the kernels among the keys, in the order of the command line."""
        found = {kernel for kernel, _, _ in self.keys}
        return [name for name in self.infos if name in found]

    @property
    def laws(self) -> list[str]:
        """Return the names of the laws among the keys, in the order in which they are run."""
        return sorted({law for _, law, _ in self.keys}, key=by_place)

    @property
    def dtypes(self) -> list[str]:
        """Return the names of the dtypes among the keys."""
        found = {dtype for _, _, dtype in self.keys}
        return [dtype for dtype in DTYPES if dtype in found]

    def verdict(self, key: Key) -> str:
        """Return the verdict for summary.json: "broken", "less precise", "held", "known" or "not tried".

        Calls that are less precise are "broken" if no one design explains all of those of the kernel in a dtype.
        It is "known" if every drawn case meets a known failure of the kernel, so that none was run.
        """
        tally = self.tallies.get(key, Tally())
        if key in self.broken:
            return "broken"
        if key in self.less_precise:
            return "less precise" if self.imprecise[key[0]].may_be_meant else "broken"
        if tally.examples:
            return "held"
        return "known" if tally.known else "not tried"

    def mark(self, kernel: str, law: str, dtype: str) -> str:
        """Return the verdict for the matrix on the screen: a key of ``MARKS``.

        It may also be "refused" or "not claimed", and "known" if only some of the drawn cases meet a known failure.
        """
        key = (kernel, law, dtype)
        tally, verdict = self.tallies.get(key, Tally()), self.verdict(key)
        if verdict not in ("held", "not tried"):
            return verdict
        capabilities = self.infos[kernel].capabilities
        if dtype not in capabilities.dtypes or not law_named(law).applies_to(capabilities, dtype):
            return "not claimed"
        if law_named(law).needs == "backward" and self._lacks_gradients(kernel):
            return "not claimed"
        if is_mostly_refused(tally):
            return "refused"
        return "known" if tally.known else verdict

    def untried(self) -> dict[str, str]:
        """Return for each kernel its claimed laws of which no example was completed, in one line.

        Dtypes are named if a law was tried at others. Example: "forward, backward (float16)".
        """
        return {kernel: line for kernel in self.kernels if (line := ", ".join(self._untried_of(kernel)))}

    def _untried_of(self, kernel: str) -> Iterator[str]:
        for law in self.laws:
            marks = {x: self.mark(kernel, law, x) for x in self.dtypes if (kernel, law, x) in self.keys}
            untried = [dtype for dtype, mark in marks.items() if mark == "not tried"]
            if untried:
                is_all = {*marks.values()} <= {"not tried", "not claimed"}
                yield law if is_all else f"{law} ({', '.join(untried)})"

    def unjudged(self) -> list[str]:
        """Return one line for each kernel of which the run can't be said to have judged anything that matters.

        That is the law ``MATTERS_MOST``, or any law where the user has left that one out. A kernel that there is a
        complaint of has its line already.
        """
        return [
            line
            for name in self.kernels
            if (line := self._unjudged(name)) and not self._line(complaint, name)
        ]

    @property
    def exit_status(self) -> pytest.ExitCode:
        """Return the exit status of a run without a failure, by what it has tried.

        One that has not judged what matters ends like a run of pytest that has collected no test.
        """
        if self.complaints():
            return pytest.ExitCode.TESTS_FAILED
        return pytest.ExitCode.NO_TESTS_COLLECTED if self.unjudged() else pytest.ExitCode.OK

    def _unjudged(self, kernel: str) -> str:
        keys = [key for key in self.keys if key[0] == kernel]
        forward = [key for key in keys if key[1] == MATTERS_MOST]
        if {self.mark(*key) for key in forward or keys} - {"not claimed"} != {"not tried"}:
            return ""
        told = f"law `{MATTERS_MOST}`" if forward else "any law"
        return f"{kernel}: no example of {told} was judged, so the run does not say that it holds"

    def _lacks_gradients(self, kernel: str) -> bool:
        """Whether laws judged other tensors of a kernel where gradients were asked for, but never a gradient."""
        tallies = (
            tally
            for key, tally in self.tallies.items()
            if key[0] == kernel and law_named(key[1]).judges_gradients
        )
        judged = {tensor for tally in tallies for tensor in tally.judged}
        return bool(judged) and judged.isdisjoint(GRADIENTS)

    def counts(self, name: str) -> dict[str, int]:
        """Return for each kernel the sum of the field ``name`` of its tallies, where that is not 0."""
        sums: Counter[str] = Counter()
        for (kernel, _, _), tally in self.tallies.items():
            sums[kernel] += getattr(tally, name)
        return {kernel: sums[kernel] for kernel in self.kernels if sums[kernel]}

    def answered(self, kernel: str) -> list[Case]:
        """Return some of the cases that a kernel has answered rather than refused, of all laws and dtypes."""
        return list(merged_tallies(x for key, x in self.tallies.items() if key[0] == kernel).answered_cases)

    def complaints(self) -> list[str]:
        """Return one line for each kernel that refuses or cannot run too much of what it claims."""
        return [line for line in self._of_each(complaint) if line is not None]

    def drawn_within(self) -> list[str]:
        """Return one line for each kernel that refuses so much that cases were drawn from narrower claims."""
        return [line for line in self._of_each(drawn_within) if line is not None]

    def _of_each(self, tell: Tell) -> Iterator[str | None]:
        """Call a function for each kernel with its name, its counts and the advice on it, and yield the lines."""
        return (self._line(tell, name) for name in self.infos)

    def _line(self, tell: Tell, kernel: str) -> str | None:
        return tell(kernel, self._tallies(kernel), self.advice.get(kernel, NO_ADVICE))

    def to_be_advised(self) -> dict[str, dict[str, Seen]]:
        """Return the kernels that refuse much, each with the laws under which it does, and some of their cases."""
        found = {name: asked_about(self._tallies(name)) for name in self.infos}
        return {name: seen for name, seen in found.items() if seen}

    def _tallies(self, kernel: str) -> dict[Item, Tally]:
        """Return the counts of a kernel by law and dtype."""
        return {key[1:]: tally for key, tally in self.tallies.items() if key[0] == kernel}

    def less_precise_told(self) -> dict[str, str]:
        """Return one line for each kernel that is less precise than claimed, by its name."""
        return {kernel: self._sentence(kernel) for kernel in sorted(self.imprecise)}

    def _sentence(self, kernel: str) -> str:
        dtypes = {key[2] for key, tally in self.tallies.items() if key[0] == kernel and tally.examples}
        return sentence(self.imprecise[kernel], dtypes)

    def slow(self) -> dict[str, Tally]:
        """Return the counts of each kernel that took long for some cases, by its name."""
        return {kernel: total for kernel, total in self._of_kernels().items() if total.slow}

    def _of_kernels(self) -> dict[str, Tally]:
        """Return for each kernel the counts of all its laws and dtypes together."""
        totals: dict[str, Tally] = {}
        for (kernel, _, _), tally in self.tallies.items():
            totals.setdefault(kernel, Tally()).merge(tally)
        return totals

    def counters(self, name: str) -> dict[str, Counter[str]]:
        """Return for each kernel the sum of the counter ``name`` of its tallies, where that is not empty."""
        found: dict[str, Counter[str]] = {}
        for (kernel, _, _), tally in self.tallies.items():
            found.setdefault(kernel, Counter()).update(getattr(tally, name))
        return {kernel: counts for kernel, counts in found.items() if counts}

    def not_run(self) -> dict[str, str]:
        """Return for each kernel the most frequent reason why cases could not be run on this machine."""
        found: dict[str, Counter[str]] = {}
        for (kernel, _, _), tally in self.tallies.items():
            found.setdefault(kernel, Counter()).update(tally.skip_reasons)
        return {kernel: reasons.most_common(1)[0][0] for kernel, reasons in found.items() if reasons}

    def designs(self) -> dict[str, str]:
        """Return for each kernel the designs that explain its results, the most frequent first.

        Only kernels that declare no arithmetic have such designs: see ``reference.family``.
        """
        return {
            kernel: "; ".join(f"{name} ({count} examples)" for name, count in designs.most_common())
            for kernel, designs in self.counters("designs").items()
        }

    def coverage(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the number of examples by kernel, field and claimed value of the field.

        An example counts only under laws that judge what the field is about.
        """
        examples: dict[str, Counter[str]] = {kernel: Counter() for kernel in self.kernels}
        for (kernel, law, _), tally in self.tallies.items():
            examples[kernel].update({x: count for x, count in tally.cells.items() if is_judged(law, x)})
        return {
            kernel: by_field(claimed(self.infos[kernel].capabilities), found)
            for kernel, found in examples.items()
        }

    def tried(self) -> dict[str, Tried]:
        """Return by kernel how many levels of the fields of cases, pairs and triples of levels were tried."""
        return {
            kernel: self.infos[kernel].coverage.tried(tuple(map(int, levels.split())) for levels in counts)
            for kernel, counts in self.counters("levels").items()
        }

    def distribution(self) -> list[dict[str, Any]]:
        """Return a row for each kernel, dtype and tensor: the distribution of an example's largest error over bound.

        Only the basic laws count. "histogram" has the number of examples in each of ``BARS`` equal parts of the range
        from 0 to 1. "tests_nothing" is the share of examples in which a tensor of zeros would pass.
        """
        merged: dict[tuple[str, str], Tally] = {}
        for (kernel, law, dtype), tally in self.tallies.items():
            if law_named(law).is_basic:
                merged.setdefault((kernel, dtype), Tally()).merge(tally)
        return [
            {
                "kernel": kernel,
                "dtype": dtype,
                "tensor": tensor,
                "examples": sum(tally.histogram[tensor].values()),
                "median": tally.quantile(tensor, 0.5),
                "p99.9": tally.quantile(tensor, 0.999),
                "maximum": tally.largest[tensor],
                "histogram": tally.bars(tensor),
                "tests_nothing": tally.idle[tensor] / max(1, tally.judged[tensor]),
            }
            for (kernel, dtype), tally in sorted(merged.items())
            for tensor in sorted(tally.histogram)
        ]

    def to_dict(self, environment: Mapping[str, str], not_run: Sequence[str]) -> dict[str, Any]:
        """Return the content of summary.json."""
        return {
            "flashproof": FORMAT,
            "environment": environment,
            "kernels": {
                name: {
                    "spec": info.spec,
                    "claims": info.printed,
                    "known_failures": list(map(str, info.known_failures)),
                }
                for name, info in self.infos.items()
            },
            "not_run": not_run,
            "results": [self._row(key) for key in sorted(self.keys)],
            "not_tried": self.untried(),
            "bugs": [
                {
                    **row_of(one.bug, one.seen),
                    "offers": one.offers,
                    "facts": dict(one.facts()),
                    "record": one.bug.to_dict(),
                }
                for one in self.concluded or merged(self.bugs, self.seen)
            ],
            "complaints": self.complaints(),
            "unjudged": self.unjudged(),
            "notices": self.told,
            "consistent_with": self.designs(),
            "less_precise": self.less_precise_told(),
            "error_over_bound": self.distribution(),
            "coverage": self.coverage(),
            "tried": {kernel: asdict(tried) for kernel, tried in self.tried().items()},
        }

    def _row(self, key: Key) -> dict[str, Any]:
        kernel, law, dtype = key
        tally = self.tallies.get(key, Tally())
        counts = {
            f.name: getattr(tally, f.name)
            for f in fields(tally)
            if f.name not in ("histogram", "cells", "levels", *CASES)
        }
        twins = {twin: one.bug.key for one in self.concluded for twin in one.twins}
        reports = sorted({twins.get(folder, folder) for folder in self.broken.get(key, ())})
        names = {"kernel": kernel, "property": law, "dtype": dtype}
        verdicts = {"verdict": self.verdict(key), "mark": self.mark(*key)}
        return {**names, **verdicts, "reports": reports, **counts}

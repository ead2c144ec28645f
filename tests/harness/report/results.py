"""The results of a run: counts for each kernel, law and dtype, the bugs found, and the content of summary.json."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kernels.contract import DTYPES, GRADIENTS
from strategies.case import Case
from tests.harness.bugs.bug import Bug, Occurrences, with_tensors
from tests.harness.bugs.imprecise import Imprecise, sentence
from tests.harness.law import by_place, law_named
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
"""Makes one line about a kernel of its name, its counts and the advice on it; or None."""


class Results:
    """All that the items of a run have counted and found, in all processes.

    ``selected`` are the laws at the dtypes that the run is to try: all but those that a user leaves out. ``bugs`` and
    ``seen`` have the name of a report folder as their key; for those in ``unreported``, of which no item has told yet,
    ``seen`` has one example. ``broken`` has the folders of the bugs that break a law at a dtype, and ``gone`` the bugs
    of earlier runs whose cases hold. ``concluded`` is empty until the run is over: then it has each distinct bug once.
    ``advice`` has claims for kernels that refuse much, once they are tried.
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
        """Add what one item has counted and found: ``counts`` is its report's ``flashproof``."""
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
            # A failure may have waited for its investigation, so it may be of a law or dtype of an earlier item.
            for law, dtype, _ in sightings.counts:
                self.broken.setdefault((key[0], law, dtype), set()).add(folder)
        self.gone += map(Bug.from_dict, counts.get("gone", ()))
        self.notice(counts.get("notices", ()))
        imprecise = Imprecise.from_dict(counts["imprecise"])
        if imprecise.total:
            self.imprecise.setdefault(counts["kernel"], Imprecise()).merge(imprecise)
            self.less_precise.add(key)

    def add_unreported(self, ledger: Ledger, *, is_over: bool) -> None:
        """Add the bugs that are new in a run's ledger and of which no item has told.

        Each counts for one failing example until an item tells of it. If the run ``is_over``, a failure whose process
        ended as it looked into it is a bug of which no more is known.
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
        """Add what another run has counted; ``folders`` says what its report folders are called here.

        Its bugs are left out: see ``conclude``.
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
        """Remember what a user must know of the whole run, each line once."""
        self.notices = list(dict.fromkeys([*self.notices, *lines]))

    def conclude(self, concluded: Sequence[DistinctBug]) -> None:
        """Keep the distinct bugs of the whole run.

        If they explain all less precise calls of a kernel, these count for the bugs.
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
        """Return what a user must know of the whole run and of each kernel, and which bugs of earlier runs are gone."""
        found = [one.bug for one in self.concluded] or self.bugs.values()
        return [*self.notices, *self._notes(), *told_gone(self.gone, found)]

    def _notes(self) -> Iterator[str]:
        """Yield the notes that cases of a kernel show, each once with the number of these: see ``Trial.note``."""
        for kernel, total in self._of_kernels().items():
            for text, count in total.shown.items():
                if count:
                    examples = f"{count} of {total.noted[text]} such examples"
                    yield f"{kernel}: {text.replace('{}', examples)}"

    @property
    def keys(self) -> set[Key]:
        """Return each kernel, law and dtype that is to be tried, for which an item was run, or a bug was seen."""
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
        """Return the verdict as summary.json has it: broken, less precise, held, known or not tried.

        It is "known" if every case that was drawn meets a known failure, so that none was run.
        """
        tally = self.tallies.get(key, Tally())
        if key in self.broken:
            return "broken"
        if key in self.less_precise:
            return "less precise"
        if tally.examples:
            return "held"
        return "known" if tally.known else "not tried"

    def mark(self, kernel: str, law: str, dtype: str) -> str:
        """Return the verdict as the matrix shows it: a key of ``MARKS``.

        The matrix also has marks for refusals, for some known failures and for what is not claimed. In summary.json
        these are fields of their own.
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
        """Return by kernel in one line which of its claimed laws were not tried: no example of them came to its end.

        Dtypes are named where a law was tried at others.
        """
        return {kernel: line for kernel in self.kernels if (line := ", ".join(self._untried_of(kernel)))}

    def _untried_of(self, kernel: str) -> Iterator[str]:
        for law in self.laws:
            marks = {x: self.mark(kernel, law, x) for x in self.dtypes if (kernel, law, x) in self.keys}
            untried = [dtype for dtype, mark in marks.items() if mark == "not tried"]
            if untried:
                is_all = {*marks.values()} <= {"not tried", "not claimed"}
                yield law if is_all else f"{law} ({', '.join(untried)})"

    def _lacks_gradients(self, kernel: str) -> bool:
        """Whether gradients of a kernel were asked for and the kernel never returned one to judge."""
        tallies = (
            tally
            for key, tally in self.tallies.items()
            if key[0] == kernel and law_named(key[1]).judges_gradients
        )
        judged = {tensor for tally in tallies for tensor in tally.judged}
        return bool(judged) and judged.isdisjoint(GRADIENTS)

    def counts(self, name: str) -> dict[str, int]:
        """Return the sum of the field ``name`` of all tallies of a kernel, for each kernel where it is not 0."""
        sums: Counter[str] = Counter()
        for (kernel, _, _), tally in self.tallies.items():
            sums[kernel] += getattr(tally, name)
        return {kernel: sums[kernel] for kernel in self.kernels if sums[kernel]}

    def answered(self, kernel: str) -> list[Case]:
        """Return some of the cases that a kernel has answered, of all laws and dtypes."""
        return list(merged_tallies(x for key, x in self.tallies.items() if key[0] == kernel).answered_cases)

    def complaints(self) -> list[str]:
        """Return one line for each kernel that refuses or cannot run too much of what it claims."""
        return [line for line in self._of_each(complaint) if line is not None]

    def drawn_within(self) -> list[str]:
        """Return one line for each kernel that refuses so much that cases were drawn from less than it claims."""
        return [line for line in self._of_each(drawn_within) if line is not None]

    def _of_each(self, tell: Tell) -> Iterator[str | None]:
        """Yield what a function tells of each kernel from its name, its counts and the advice on it."""
        return (tell(name, self._tallies(name), self.advice.get(name, NO_ADVICE)) for name in self.infos)

    def to_be_advised(self) -> dict[str, dict[str, Seen]]:
        """Return the kernels that refuse much, each with some cases of the laws under which they do."""
        found = {name: asked_about(self._tallies(name)) for name in self.infos}
        return {name: seen for name, seen in found.items() if seen}

    def _tallies(self, kernel: str) -> dict[Item, Tally]:
        """Return the counts of a kernel by law and dtype."""
        return {key[1:]: tally for key, tally in self.tallies.items() if key[0] == kernel}

    def less_precise_told(self) -> dict[str, str]:
        """Return one line for each kernel that is less precise than claimed, by the name of the kernel."""
        return {kernel: self._sentence(kernel) for kernel in sorted(self.imprecise)}

    def _sentence(self, kernel: str) -> str:
        dtypes = {key[2] for key, tally in self.tallies.items() if key[0] == kernel and tally.examples}
        return sentence(self.imprecise[kernel], dtypes)

    def slow(self) -> dict[str, Tally]:
        """Return the counts of each kernel that took long for some cases, by the name of the kernel."""
        return {kernel: total for kernel, total in self._of_kernels().items() if total.slow}

    def _of_kernels(self) -> dict[str, Tally]:
        """Return the counts of all laws and dtypes of a kernel together, by the name of the kernel."""
        totals: dict[str, Tally] = {}
        for (kernel, _, _), tally in self.tallies.items():
            totals.setdefault(kernel, Tally()).merge(tally)
        return totals

    def counters(self, name: str) -> dict[str, Counter[str]]:
        """Return the sum of the counter ``name`` of all tallies of a kernel, for each kernel where it has counted."""
        found: dict[str, Counter[str]] = {}
        for (kernel, _, _), tally in self.tallies.items():
            found.setdefault(kernel, Counter()).update(getattr(tally, name))
        return {kernel: counts for kernel, counts in found.items() if counts}

    def not_run(self) -> dict[str, str]:
        """Return the reason for which most cases of a kernel could not be run here, by the name of the kernel."""
        found: dict[str, Counter[str]] = {}
        for (kernel, _, _), tally in self.tallies.items():
            found.setdefault(kernel, Counter()).update(tally.skip_reasons)
        return {kernel: reasons.most_common(1)[0][0] for kernel, reasons in found.items() if reasons}

    def designs(self) -> dict[str, str]:
        """Return which designs explain the results of a kernel, the most frequent first, by the name of the kernel.

        Only kernels that declare no arithmetic have such designs: see ``reference.family``.
        """
        return {
            kernel: "; ".join(f"{name} ({count} examples)" for name, count in designs.most_common())
            for kernel, designs in self.counters("designs").items()
        }

    def coverage(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the examples of each value of a field that a kernel claims: by kernel, field and value.

        An example counts only under laws that judge what the field says.
        """
        examples: dict[str, Counter[str]] = {kernel: Counter() for kernel in self.kernels}
        for (kernel, law, _), tally in self.tallies.items():
            examples[kernel].update({x: count for x, count in tally.cells.items() if is_judged(law, x)})
        return {
            kernel: by_field(claimed(self.infos[kernel].capabilities), found)
            for kernel, found in examples.items()
        }

    def distribution(self) -> list[dict[str, Any]]:
        """Return a row for each kernel, dtype and tensor: how the largest error over bound varies over examples.

        Only the basic laws count. "histogram" has the number of examples in each of ``BARS``
        equal parts of the range from 0 to 1. "tests_nothing" is the share of examples in which an answer of 0 would
        hold.
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
        changes = self.counters("changes")
        return {
            "flashproof": FORMAT,
            "environment": environment,
            "kernels": {
                name: {
                    "spec": info.spec,
                    "claims": info.printed,
                    "known_failures": list(map(str, info.known_failures)),
                    "changes": changes.get(name, {}),
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
            "notices": self.told,
            "consistent_with": self.designs(),
            "less_precise": self.less_precise_told(),
            "error_over_bound": self.distribution(),
            "coverage": self.coverage(),
        }

    def _row(self, key: Key) -> dict[str, Any]:
        kernel, law, dtype = key
        tally = self.tallies.get(key, Tally())
        counts = {
            f.name: getattr(tally, f.name)
            for f in fields(tally)
            if f.name not in ("histogram", "cells", *CASES)
        }
        twins = {twin: one.bug.key for one in self.concluded for twin in one.twins}
        reports = sorted({twins.get(folder, folder) for folder in self.broken.get(key, ())})
        names = {"kernel": kernel, "property": law, "dtype": dtype}
        verdicts = {"verdict": self.verdict(key), "mark": self.mark(*key)}
        return {**names, **verdicts, "reports": reports, **counts}

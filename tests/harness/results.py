"""What a run has found, counted: by kernel, law and dtype, and as the content of ``summary.json``."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from kernels.contract import DTYPES
from tests.harness.bugs import Bug, Sightings, with_tensors
from tests.harness.bugs import row as row_of
from tests.harness.conclude import Concluded, merged
from tests.harness.imprecise import Imprecise, sentence
from tests.harness.kernel_info import KernelInfo
from tests.harness.law import law_named
from tests.harness.refusals import complaint, is_mostly_refused
from tests.harness.tally import CASES, Tally
from tests.harness.turns import rank

FORMAT = 1
"""The version of summary.json."""

Key = tuple[str, str, str]
"""A kernel, a law and a dtype, by their names."""


class Results:
    """The counts, bugs and findings of all items and processes of a run."""

    def __init__(self, kernels: Sequence[KernelInfo]) -> None:
        self.infos = {info.name: info for info in kernels}
        self.tallies: dict[Key, Tally] = {}
        self.bugs: dict[str, Bug] = {}
        self.seen: dict[str, Sightings] = {}
        self.broken: dict[Key, set[str]] = {}
        self.imprecise: dict[str, Imprecise] = {}
        self.less_precise: set[Key] = set()
        self.concluded: list[Concluded] = []

    def add(self, counts: Mapping[str, Any]) -> None:
        """Take in what an item has counted and found."""
        key = (counts["kernel"], counts["law"], counts["dtype"])
        self.tallies.setdefault(key, Tally()).merge(Tally.from_dict(counts["tally"]))
        for bug in map(Bug.from_dict, counts["bugs"]):
            known = self.bugs.get(bug.key, bug)
            self.bugs[bug.key] = with_tensors(bug, known.tensors)
        for folder, seen in counts["seen"].items():
            sightings = Sightings.from_dict(seen)
            self.seen.setdefault(folder, Sightings()).merge(sightings)
            for law, dtype, _ in sightings.counts:  # of an item before, if it had to wait
                self.broken.setdefault((key[0], law, dtype), set()).add(folder)
        imprecise = Imprecise.from_dict(counts["imprecise"])
        if imprecise.total:
            self.imprecise.setdefault(counts["kernel"], Imprecise()).merge(imprecise)
            self.less_precise.add(key)

    def conclude(self, concluded: Sequence[Concluded]) -> None:
        """Take the bugs of the whole run; calls that one of them explains are not told as less precise."""
        self.concluded = list(concluded)
        self.imprecise = {
            kernel: calls
            for kernel, calls in self.imprecise.items()
            if not calls.are_of([one.bug for one in concluded if one.bug.failure.kernel == kernel])
        }

    @property
    def keys(self) -> set[Key]:
        """All of which an item was run, or a bug was seen."""
        return {*self.tallies, *self.broken}

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels that were tried, in the order in which they were given."""
        tried = {kernel for kernel, _, _ in self.keys}
        return [name for name in self.infos if name in tried]

    @property
    def laws(self) -> list[str]:
        """The names of the laws that were tried, in the order in which they are run."""
        return sorted({law for _, law, _ in self.keys}, key=rank)

    @property
    def dtypes(self) -> list[str]:
        """The names of the dtypes that were tried."""
        tried = {dtype for _, _, dtype in self.keys}
        return [dtype for dtype in DTYPES if dtype in tried]

    def verdict(self, key: Key) -> str:
        """Broken, less precise than claimed, held, known (a known failure meets all that was drawn), or not tried."""
        tally = self.tallies.get(key, Tally())
        if key in self.broken:
            return "broken"
        if key in self.less_precise:
            return "less precise"
        if tally.examples:
            return "held"
        return "known" if tally.known else "not tried"

    def mark(self, kernel: str, law: str, dtype: str) -> str:
        """The verdict as the matrix shows it, a key of ``MARKS``.

        It tells refusals, known failures and what is not claimed as well, which summary.json has in other fields.
        """
        key = (kernel, law, dtype)
        tally, verdict = self.tallies.get(key, Tally()), self.verdict(key)
        if verdict not in ("held", "not tried"):
            return verdict
        capabilities = self.infos[kernel].capabilities
        if dtype not in capabilities.dtypes or not law_named(law).applies_to(capabilities):
            return "not claimed"
        if is_mostly_refused(tally):
            return "refused"
        return "known" if tally.known else verdict

    def counts(self, name: str) -> dict[str, int]:
        """The sum of a field of all tallies of each kernel, of those where it is not 0."""
        sums = dict.fromkeys(self.kernels, 0)
        for (kernel, _, _), tally in self.tallies.items():
            sums[kernel] += getattr(tally, name)
        return {kernel: count for kernel, count in sums.items() if count}

    def complaints(self) -> list[str]:
        """One line for each kernel that answers too little of what it claims."""
        told = []
        for name, info in self.infos.items():
            tallies = {key[1:]: tally for key, tally in self.tallies.items() if key[0] == name}
            told.append(complaint(name, tallies, info.capabilities))
        return [line for line in told if line is not None]

    def less_precise_told(self) -> dict[str, str]:
        """For each kernel that is less precise than claimed, the finding in one line."""
        return {kernel: self._sentence(kernel) for kernel in sorted(self.imprecise)}

    def _sentence(self, kernel: str) -> str:
        dtypes = {key[2] for key, tally in self.tallies.items() if key[0] == kernel and tally.examples}
        return sentence(self.imprecise[kernel], dtypes)

    def designs(self) -> dict[str, str]:
        """For each kernel that declares no arithmetic, the designs that explain it, the most frequent first."""
        counts: dict[str, Tally] = {}
        for (kernel, _, _), tally in self.tallies.items():
            counts.setdefault(kernel, Tally()).merge(Tally(designs=tally.designs))
        ordered = {
            kernel: sorted(x.designs, key=x.designs.__getitem__, reverse=True) for kernel, x in counts.items()
        }
        return {
            kernel: "; ".join(f"{name} ({counts[kernel].designs[name]} examples)" for name in names)
            for kernel, names in ordered.items()
            if names
        }

    def distribution(self) -> list[dict[str, Any]]:
        """Largest error over bound of an example: its median, 99.9th percentile and maximum, by tensor."""
        by_tensor: dict[Key, Tally] = {}
        for (kernel, law, dtype), tally in self.tallies.items():
            for tensor, bins in tally.histogram.items():
                if law in ("forward", "backward"):
                    part = Tally(histogram={tensor: bins}, largest={tensor: tally.largest[tensor]})
                    part.judged = {tensor: tally.judged.get(tensor, 0)}
                    part.idle = {tensor: tally.idle.get(tensor, 0)}
                    by_tensor.setdefault((kernel, dtype, tensor), Tally()).merge(part)
        return [
            {
                "kernel": kernel,
                "dtype": dtype,
                "tensor": tensor,
                "examples": sum(tally.histogram[tensor].values()),
                "median": tally.quantile(tensor, 0.5),
                "p99.9": tally.quantile(tensor, 0.999),
                "maximum": tally.largest[tensor],
                "tests_nothing": tally.idle[tensor] / max(1, tally.judged[tensor]),
            }
            for (kernel, dtype, tensor), tally in sorted(by_tensor.items())
        ]

    def to_dict(self, environment: Mapping[str, str], not_run: Sequence[str]) -> dict[str, Any]:
        """The content of summary.json."""
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
            "results": [self._row(key) for key in sorted(self.tallies)],
            "bugs": [
                {**row_of(one.bug, one.seen), "offers": one.offers}
                for one in self.concluded or merged(self.bugs, self.seen)
            ],
            "complaints": self.complaints(),
            "consistent_with": self.designs(),
            "less_precise": self.less_precise_told(),
            "error_over_bound": self.distribution(),
        }

    def _row(self, key: Key) -> dict[str, Any]:
        kernel, law, dtype = key
        tally = self.tallies[key]
        counts = {
            f.name: getattr(tally, f.name) for f in fields(tally) if f.name not in ("histogram", *CASES)
        }
        twins = {twin: one.bug.key for one in self.concluded for twin in one.twins}
        reports = sorted({twins.get(folder, folder) for folder in self.broken.get(key, ())})
        names = {"kernel": kernel, "property": law, "dtype": dtype}
        return {**names, "verdict": self.verdict(key), "reports": reports, **counts}

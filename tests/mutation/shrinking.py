"""Measure how long a failure takes to shrink, and check its report, with the law's own item as users run it."""

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kernels.registry import REGISTERED
from strategies.case import TENSORS, Case
from strategies.tensors import tensors
from tests.harness.clock import SECONDS, ShrinkBudget
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.triage import Triage
from tests.harness.law import Law, law_named
from tests.harness.run import read
from tests.harness.running.exits import SCRIPT, exit_status
from tests.harness.running.journal import Journal
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.learned_claims import AnsweredLaws
from tests.harness.running.runs import Runs
from tests.harness.session.subject import Stream, Subject, TimeUp
from tests.mutation.campaign import Campaign
from tests.mutation.diagnosis import named

SCRIPT_SECONDS = 300.0


@dataclass(frozen=True)
class Shrunk:
    """What was measured of a bug's report.

    Attributes:
        seconds: the time until it was written, the search for the first failure included.
        entries: the number of entries of its case that are not 0.
        named: the causes that it points to, as ``tests.mutation.diagnosis`` finds them.
    """

    seconds: float
    entries: int
    named: tuple[str, ...] = ()


class OneBug(Subject):
    """A subject whose search ends at the first bug."""

    def check(self, law: Law, case: Case) -> None:
        """Raise TimeUp once a bug is known."""
        super().check(law, case)
        if self.known.failures:
            raise TimeUp


def shrink(campaign: Campaign, spec: str, law: str, dtype: str, seed: int, limit: int) -> Shrunk:
    """Find, shrink and report a bug of ``campaign``'s kernel.

    Raises AssertionError if the law's test does not find the failure by itself, in ``limit`` examples, or if a
    report does not hold what it promises.
    """
    campaign.child.close()  # its memory may have been spoiled as the bug was looked for
    with tempfile.TemporaryDirectory() as folder:
        info = KernelInfo.ask(campaign.child, spec, ())
        known = KnownBugs(info.name, dtype, Path(folder), verbose=False)
        runs = Runs(info, campaign.child, Journal(Path(folder) / "journal.json"), known.bugs)
        environment = campaign.child.environment()
        triage = Triage(runs, known, environment, ShrinkBudget(SECONDS))
        subject = OneBug(triage, AnsweredLaws(info.capabilities))
        start = time.perf_counter()
        with suppress(TimeUp):
            of_law = law_named(law)
            for case in Stream(subject.cases(**of_law.draws), Random(seed), limit):
                subject.check(of_law, case)
        seconds = time.perf_counter() - start
        subject.runs.journal.close()
        assert subject.known.failures, f"{law} on {dtype} does not find {spec} by itself"
        failures = list(subject.known.failures.values())
        folders = [Path(folder) / failure.folder for failure in failures]
        # If a bug spoils several tensors, what is wrong with one may depend on other memory: it gets no script.
        scripted = [path for path in folders if (path / SCRIPT).exists()]
        assert scripted, f"no script of {spec}: {[failure.case for failure in failures]}"
        for path in scripted:
            check_report(campaign, path)
    words = {word for failure in failures for word in named(failure.explanation)}
    return Shrunk(seconds, max(entries(failure.case) for failure in failures), tuple(sorted(words)))


def entries(case: Case) -> int:
    """Return how many numbers of all tensors are not 0."""
    made = tensors(case, "cpu")
    return sum(int(getattr(made, tensor).tensor.count_nonzero()) for tensor in TENSORS)


def check_report(campaign: Campaign, folder: Path) -> None:
    """Check that the case fails again, and that the script exits 1 with the mutant and 0 with the sound kernel."""
    known = read(folder / "case.json")
    assert campaign.run(known.spec, known.law, known.case).finding, f"{known.case} does not fail again"
    mutant, sound = (
        "importlib.import_module({!r}).{}".format(*spec.split(":"))
        for spec in (known.spec, REGISTERED[campaign.info.spec])
    )
    text = (folder / SCRIPT).read_text()
    assert mutant in text
    device = campaign.child.device
    status = exit_status(text, SCRIPT_SECONDS, device)
    assert status == 1, f"repro.py ends with {status} on {known.spec}: {known.case}"
    status = exit_status(text.replace(mutant, sound), SCRIPT_SECONDS, device)
    assert status == 0, f"repro.py ends with {status} on {campaign.info.spec}: {known.case}"

"""How many bugs are told by what the kernel computes instead: ``python -m tests.bench.certificates [--every N]``.

Each planted bug, or each kernel of ``--kernel``, is tried on drawn cases until a basic law is broken in its numbers.
Then a certificate is asked for as a run does, but for the conditions of the bug, which are not looked for. A line for
each bug says what was told. Bugs that only show otherwise, as exceptions or races do, are listed and not counted.
"""

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path

from kernels.mutants import CATALOGUE
from strategies.case import Case
from tests.harness.bugs.failure import Failure
from tests.harness.certificates.certified import CERTIFICATE_SECONDS, certified
from tests.harness.law import law_named
from tests.harness.run import ONE_DESIGN, Run
from tests.harness.running.child import Child, ChildDied
from tests.harness.running.journal import Journal
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.runs import Runs
from tests.harness.verdict import NUMBERS, Finding
from tests.mutation.schedule import Schedule

EXAMPLES = 150
"""How many drawn cases a bug may take to show."""
BASIC = ("forward", "backward")
"""The laws that a failure of another one is restated by, as in a run."""
TOLD, NOTHING, OTHER, UNSEEN = "told", "nothing told", "not of numbers", "not found"


def finding_of(runs: Runs, law: str, case: Case) -> Finding | None:
    """Return what a law finds in a case of a kernel."""
    run = Run(runs.info.spec, runs.info.claims, law, case, designs=ONE_DESIGN)
    return runs.info.finding(runs.child.run(run, lambda: None))


def told_of(runs: Runs, schedule: Schedule, seed: int, seconds: float) -> tuple[str, str]:
    """Return what comes of a bug, one of ``TOLD`` to ``UNSEEN``, with the certificate or else the failure in words."""
    first = ""
    for law, case in schedule.examples(seed, EXAMPLES):
        finding = finding_of(runs, law, case)
        if finding is None:
            continue
        first = first or f"{law}: {finding.kind}, {finding.claim:.150}"
        names = (law,) if law in (*BASIC, "ragged") else BASIC if law_named(law).shares_cases else ()
        for basic in names:
            found = finding if basic == law else finding_of(runs, basic, case)
            if found is not None and found.kind in NUMBERS:
                spec = runs.info.spec
                failure = Failure(
                    spec, runs.info.claims, basic, case, kernel=spec, finding=found, environment={}
                )
                told = certified(failure, runs, (), seconds).finding
                if told.alternatives:
                    return TOLD, told.certificate
                return NOTHING, "; ".join(
                    (f"{basic}: {found.tensor} is wrong", *found.explained_by, str(case))
                )
    return (OTHER, first) if first else (UNSEEN, "")


def main() -> None:
    """Print a line for each bug as soon as it is known, and the share of the certificates at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", nargs="+", default=[], metavar="SPEC")
    parser.add_argument("--claims", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th bug")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=CERTIFICATE_SECONDS, help="for each certificate")
    asked = parser.parse_args()
    planted = (m for m in CATALOGUE.values() if m.device in ("", asked.device.partition(":")[0]))
    specs = (asked.kernel or [f"kernels.mutants:{mutant.name}" for mutant in planted])[:: asked.every]
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    child, counts, schedules = Child(asked.device), Counter[str](), dict[str, Schedule]()
    with tempfile.TemporaryDirectory() as folder:
        for spec in specs:
            try:
                info = KernelInfo.ask(child, spec, tuple(asked.claims))
                runs = Runs(info, child, Journal(Path(folder) / "journal.json"))
                schedule = Schedule(
                    info.capabilities, info.device_type
                )  # kernels of the same claims share one
                schedule = schedules.setdefault(str(info.capabilities), schedule)
                outcome, words = told_of(runs, schedule, asked.seed, asked.seconds)
            except (ChildDied, ValueError) as e:
                outcome, words = OTHER, str(e)
            counts[outcome] += 1
            print(f"| {spec.rpartition(':')[2]} | {outcome} | {words} |", flush=True)
    child.close()
    of_numbers = counts[TOLD] + counts[NOTHING]
    print(f"{counts[TOLD]} of {of_numbers} bugs of numbers are told; {dict(counts)}")


if __name__ == "__main__":
    main()

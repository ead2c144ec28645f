"""Cases run again: how often one fails, whether it leaks or fails in a process of its own, and under a sanitizer."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from strategies.case import Case
from strategies.earlier import sequences_of
from strategies.features import HUGE, LENGTHS, value_of, with_normal_numbers, with_value
from strategies.ways import WAYS
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.avoidance import Avoided
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.failure import Explanation, Failure
from tests.harness.bugs.restatement import restate_by_basic_law
from tests.harness.clock import BudgetSpent
from tests.harness.diagnosis.shrink import RUNS, smallest
from tests.harness.law import law_named, law_of_sequences
from tests.harness.run import ALL_DESIGNS, Run
from tests.harness.running.child import ChildDied, HarnessError, OutOfTime, environment_of, seen_by_child
from tests.harness.running.exits import Tail
from tests.harness.running.runs import Runs
from tests.harness.running.sanitizers import Report, command, environment, failure, reports
from tests.harness.symptoms import FEWEST_KEYS
from tests.harness.verdict import AFTER_OTHERS, LEAK, NUMBERS, Finding

AGAIN = 2
"""A failure that shows in this many further runs is taken to show on every run."""
REPEATS = 100
"""How often a case is repeated to find the rate of an intermittent failure."""
REPEAT_SECONDS = 20.0
"""The most seconds for these repeats."""
RIGHT_ALONE = "is right as the first call of a process, and wrong after other calls"
"""What is told of a failure for which no sequence of earlier calls is found that it needs."""
TRIED_AGAIN = 12
"""How many failing cases of an investigation are run once more, each in a process of its own."""
SECONDS_FOR_AGAIN = 3.0
"""Seconds for these runs. If they are used up, the remaining cases are not run."""
SEQUENCE_SECONDS, SLOW_SEQUENCE_SECONDS = 20.0, 60.0
"""Seconds to find the earlier calls after which a case fails: where processes are copies, and where they are not."""
FIRST_CALL = "the case fails in the first call of a new process, and holds when it is repeated there"

GROWN_BYTES = 2**29
"""By how much a process must grow before a case is repeated to look for a leak. Doubled each time none is found."""
LEAK_SECONDS = 4.0
"""Seconds for the repeats of one case."""
SMALLER_LEAK_SECONDS = 40.0
"""Seconds to find a smaller case that leaks."""

SAMPLE = 8
"""How many passing cases are run under each sanitizer, for each law and dtype."""
SECONDS = 60.0
"""Seconds after which a watched process (one that runs under a sanitizer) begins no further case. Its start takes
eight seconds, and compilation more.
"""
LEAST_SECONDS = 12.0
"""A watched process is not started if it would have fewer seconds."""
PATIENCE = 2.0
"""A watched process is killed after this many times its seconds."""
SANITIZED_SECONDS = 120.0
"""Seconds to find a smaller case on which a sanitizer reports an error."""

LOG, DONE = "log", "done"
"""The files of a watched process: the sanitizer writes LOG, and the process writes DONE."""
TOGETHER = "it is reported in a process that runs several cases, and of none of them alone"


def fails_again(broken: FailingExample, runs: Runs) -> bool:
    """Whether a failure shows again each time that its case is repeated; True for a hang, or if there is no time.

    A hang is not repeated, because that takes minutes.
    """
    with suppress(BudgetSpent):
        return broken.finding.kind == "hung" or all(_fails(broken, runs) is not False for _ in range(AGAIN))
    return True


def intermittent(failure: Failure, runs: Runs) -> Failure:
    """Return an intermittent failure with the rate at which its case fails.

    If no repeat fails but the first call of a new process does, a sentence says so.
    """
    failed, made = rate(lambda: _fails(failure, runs), runs.clock.meter(REPEAT_SECONDS))
    known_of_it: tuple[str, ...] = ()
    with suppress(BudgetSpent):
        if not failed and fails_anew(failure, runs):
            known_of_it = (FIRST_CALL,)
    finding = replace(failure.finding, rate=(failed, made))
    return replace(failure, finding=finding, explanation=Explanation(known_of_it))


def rate(fails: Callable[[], bool | None], spend: Callable[[], None]) -> tuple[int, int]:
    """Return how many repeats failed, and how many were made until ``spend`` raised BudgetSpent.

    A repeat for which ``fails`` returns None could not be run here, and is not counted.
    """
    outcomes: list[bool | None] = []
    with suppress(BudgetSpent):
        while len(outcomes) < REPEATS:
            spend()
            outcomes.append(fails())
    return outcomes.count(True), len(outcomes) - outcomes.count(None)


def is_of_every_run(failure: Failure) -> bool:
    """Whether a failure showed in every repeat, so that it is not intermittent."""
    failed, made = failure.finding.rate
    return 0 < failed == made


def fails_anew(broken: FailingExample | Failure, runs: Runs) -> bool:
    """Whether the case fails in the first call of a new process. Raises BudgetSpent if there is no time for it."""
    runs.child.close()
    return _fails(broken, runs) is not False


def makes_several_calls(broken: FailingExample) -> bool:
    """Whether a law calls a kernel more than once, so that a call may be spoilt by one before it in any process."""
    law, way = law_named(broken.law), WAYS.get(broken.case.way)
    return bool(law.compares) or (law.has_own_calls and way is not None and way.calls_again)


def without_earlier_calls(broken: FailingExample) -> FailingExample:
    """Return a failure on its case without earlier calls of its own."""
    return replace(broken, case=replace(broken.case, earlier=(), rounds=1))


def right_alone(finding: Finding) -> Finding:
    """Return the finding of a case that fails after other calls alone, of which it is not known which ones it needs."""
    return replace(finding, kind=AFTER_OTHERS, certificate=finding.certificate or RIGHT_ALONE)


def as_sequence(broken: FailingExample, runs: Runs) -> FailingExample | None:
    """Return a failure on the same case after earlier calls of its own, if it holds as the first call of a process.

    A case that has the earlier calls which it needs stays as it is. Each sequence of calls is made in a process of its
    own, and has to fail in several: a race must not be taken for state that is kept. Later cases run in processes of
    their own if such a sequence is found. Where they do so already, one is only looked for if the law of the failure
    makes several calls of its own.
    """
    law, claims = law_of_sequences(), runs.info.capabilities
    own = law_named(broken.law)
    is_plain = not (own.adds_arguments or own.draws.get("nonfinite") or own.expects_refusal)
    is_asked = is_plain and broken.finding.kind in NUMBERS and law.applies_to(claims, broken.case.dtype)
    was_apart = runs.in_copies
    if not is_asked or (was_apart and (own is law or not own.compares)):
        return None
    spend = runs.clock.meter(SEQUENCE_SECONDS if runs.has_quick_copies else SLOW_SEQUENCE_SECONDS)

    def found(case: Case) -> Finding | None:
        spend()
        runs.forget()
        return runs.judged(law.name, case, broken.ignored)

    runs.go_on_in_copies()
    with suppress(BudgetSpent):
        alone = replace(broken.case, earlier=(), rounds=1)
        others = sequences_of(claims, alone, of_gradients=broken.finding.part == "gradients")
        tried = (*([broken.case] if broken.law == law.name and broken.case.earlier else []), *others)
        for case in () if found(alone) else tried:
            finding = found(case) if claims.admits(case) else None
            if finding and finding.kind in NUMBERS and all(found(case) for _ in range(AGAIN)):
                return FailingExample(law.name, case, finding, broken.ignored)
    if was_apart:
        return None
    runs.stop_copies()
    with suppress(BudgetSpent):
        for _ in range(1 + AGAIN):  # the process that repeats the case has met it as often as the one before
            _fails(broken, runs)
    return None


def with_all_designs(broken: FailingExample, runs: Runs) -> FailingExample:
    """Return the failure with all less precise designs that explain it, where the search stopped at the first."""
    if broken.finding.explained_by:
        with suppress(OutOfTime):
            asked = broken.law, broken.case, broken.ignored
            finding = runs.judged(*asked, explained=True, designs=ALL_DESIGNS)
            return broken if finding is None else replace(broken, finding=finding)
    return broken


def with_ordinary_numbers(broken: FailingExample, runs: Runs) -> FailingExample | None:
    """Return the failure that a case shows with normal numbers, the default scale and lengths of several keys.

    With large scores a less precise design allows a gradient any error, so that it seems to explain a wrong one as
    well. The law that failed is asked, as its calls may be the only wrong ones, and then a basic law. Raises OutOfTime.
    """
    info, case = runs.info, with_value(with_normal_numbers(broken.case), "sm_scale", None)
    for name in LENGTHS:
        case = with_value(case, name, max(getattr(case, name), FEWEST_KEYS))
    if not info.capabilities.admits(case) or Avoided(info.known_failures).is_met(case):
        return None
    basic = "forward" if broken.finding.tensor in ("out", "lse") else "backward"
    own = law_named(broken.law)
    for law in (broken.law,) if own.is_basic else (basic,) if "numbers" in own.sets else (broken.law, basic):
        finding = runs.judged(law, case, broken.ignored)
        if finding is not None and finding.kind in NUMBERS:
            return FailingExample(law, case, finding, broken.ignored)
    return None


def without_design_of_strides(broken: FailingExample, runs: Runs) -> FailingExample:
    """Return the failure without the designs that explain it, if it has huge strides and passes without them.

    No less precise design depends on strides.
    """
    if broken.finding.explained_by and value_of(broken.case, HUGE):
        with suppress(OutOfTime):
            near = with_value(broken.case, HUGE, False)
            if runs.judged(broken.law, near, broken.ignored, explained=True) is None:
                return replace(broken, finding=replace(broken.finding, explained_by=(), likely=()))
    return broken


def blamed_for_smallest(f: Failure, bugs: Sequence[Bug], runs: Runs) -> Bug | None:
    """Return the known bug that explains a call which a comparing law makes for its smallest case, or None."""
    if not bugs or law_named(f.law).is_never_restated:
        return None
    verdict = runs.in_time(f.law, f.case)
    if verdict.finding is None:
        return None
    run, capabilities = runs.judged, runs.info.capabilities
    told = restate_by_basic_law(
        FailingExample(f.law, f.case, verdict.finding, sizes=tuple(verdict.sizes)), run, capabilities
    )
    if told.law == f.law:
        return None
    outcome = explain_by_known_bugs(told, bugs, run, capabilities)
    return outcome.blamed[0] if outcome.rest is None and outcome.blamed else None


def is_misled(smallest: Failure, answers: Mapping[tuple[str, Case], Finding | None], runs: Runs) -> bool:
    """Whether earlier calls misled a search for a smaller case: a failing case of it passes in a process of its own.

    ``answers`` are the findings of the search by law and case. For each field the failing case nearest to the smallest
    one is tried, from which it was concluded that the field does not matter. If one passes, all later cases run in
    processes of their own.
    """
    failing = [ran for ran, found in answers.items() if found and not found.ends_process]
    if not failing or runs.clock.left <= 0:
        return False
    failing.sort(key=lambda ran: len(_differences(ran[1], smallest.case)))
    nearest = {name: ran for ran in reversed(failing) for name in _differences(ran[1], smallest.case)}
    telling = dict.fromkeys([*failing[:1], *nearest.values()])
    spend = runs.clock.meter(SECONDS_FOR_AGAIN, TRIED_AGAIN)

    def fails(ran: tuple[str, Case]) -> bool:
        spend()
        return runs.judged_raw(*ran, smallest.ignored) is not None

    runs.go_on_in_copies()
    with suppress(BudgetSpent):
        if not all(map(fails, telling)):
            return True
    runs.stop_copies()
    return False


def _differences(case: Case, other: Case) -> list[str]:
    """Return the fields in which two cases differ."""
    return [name for name, value in vars(case).items() if value != getattr(other, name)]


def _fails(broken: FailingExample | Failure, runs: Runs) -> bool | None:
    """Whether a case fails in any way when it is run once more; None if it can't be run here."""
    verdict = runs.in_time(broken.law, broken.case, ignored=broken.ignored)
    return None if verdict.status == "skipped" else runs.info.finding(verdict) is not None


def left_behind(law: str, case: Case, runs: Runs) -> float:
    """Return how many bytes the kernel leaks at each repeat of a case. The child process is closed afterwards."""
    request = Run(runs.info.spec, runs.info.claims, law, case).request("leak", seconds=LEAK_SECONDS)
    try:
        left: float = runs.child.ask(request, runs.child.run_seconds)["left"]
    except (ChildDied, HarnessError):
        return 0.0
    finally:
        runs.child.close()
    return left


def smaller_leak(law: str, case: Case, runs: Runs) -> tuple[Case, tuple[Condition, ...]]:
    """Return a smaller case that leaks too, with the conditions of the leak that few runs find."""

    def fails(smaller: Case) -> bool:
        # Memory that is freed meanwhile may hide a leak once.
        return any(left_behind(law, smaller, runs) > 0.0 for _ in range(2))

    return smallest(case, fails, runs.info.capabilities, runs.clock.meter(SMALLER_LEAK_SECONDS, RUNS))


def leak_finding(left: float) -> Finding:
    """Return the finding about a leak of ``left`` bytes at each repeat of a case."""
    size = f"{left / 2**20:.3g} MiB stay behind each time"
    return Finding(
        claim=f"memory is given back after a call, but when its case is repeated, {size}", kind=LEAK
    )


def sample(held: Sequence[tuple[str, Case]], law: str) -> list[Case]:
    """Return the first passing cases of a law, without huge strides, for which a device may lack memory."""
    cases = dict.fromkeys(case for name, case in held if name == law)
    return [case for case in cases if "huge" not in case.layouts][:SAMPLE]


@dataclass
class Watch:
    """Runs cases of a kernel under one sanitizer.

    ``told`` has a line if the sanitizer itself failed, after which it is not started again. ``done`` is how many cases
    the last watched process has finished.
    """

    sanitizer: str
    runs: Runs
    told: list[str] = field(default_factory=list)
    done: int = 0

    def reported(self, law: str, cases: Sequence[Case]) -> list[Report]:
        """Run cases in one watched process, and return the sanitizer's reports."""
        info, seconds, self.done = self.runs.info, self.runs.clock.share(SECONDS), 0
        if seconds < LEAST_SECONDS or self.told:
            return []
        runs = [Run(info.spec, info.claims, law, case) for case in cases]
        with TemporaryDirectory() as folder:
            printed = watched(self.sanitizer, runs, self.runs.child.device, seconds, Path(folder))
            log, done = (_text(Path(folder) / name) for name in (LOG, DONE))
        self.done = len(done)
        found = reports(self.sanitizer, log, printed)
        failed = None if found else failure(self.sanitizer, log)
        self.told += filter(None, [failed])
        return found

    def first(self, law: str, cases: Sequence[Case]) -> tuple[Case, Report, bool] | None:
        """Return a case with its report, and whether the case is reported if it runs alone; None without any report.

        If no case is reported alone, the last case is returned with the report of all together.
        """
        found = self.reported(law, cases) if cases else []
        self.runs.tally.watched[self.sanitizer] += self.done if cases else 0
        if not found:
            return None
        last = self.done  # memcheck ends the process in the case that it reports, so that case is tried first
        for case in [*cases[last:], *cases[:last]] if len(cases) > 1 else ():
            for report in self.reported(law, [case])[:1]:
                return case, report, True
        return cases[-1], found[0], len(cases) == 1

    def reduced(self, law: str, case: Case, report: Report) -> tuple[Case, tuple[Condition, ...]]:
        """Return a smaller case with the same report, and the conditions of it that few runs find."""

        def fails(smaller: Case) -> bool:
            return report.what in {each.what for each in self.reported(law, [smaller])}

        spend = self.runs.clock.meter(SANITIZED_SECONDS, RUNS)
        return smallest(case, fails, self.runs.info.capabilities, spend)


def watched(sanitizer: str, runs: Sequence[Run], device: str, seconds: float, folder: Path) -> str:
    """Run cases in a process under a sanitizer, and return the end of its stderr.

    The files LOG and DONE are written to the folder. A process that takes too long is killed, and the last line of LOG
    says so.
    """
    program = [sys.executable, "-P", "-m", "tests.harness.worker.sanitized", seen_by_child(device)]
    records = [run.to_dict() for run in runs]
    asked = json.dumps({"seconds": seconds, "done": str(folder / DONE), "runs": records})
    process = subprocess.Popen(
        [*command(sanitizer, folder / LOG), *program],
        env={**environment_of(device), **environment(sanitizer)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    printed = Tail(process.stderr)
    with suppress(BrokenPipeError):
        process.stdin.write(asked.encode())
        process.stdin.close()
    try:
        process.wait(PATIENCE * seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        with (folder / LOG).open("a") as log:
            log.write(f"it was still running after {PATIENCE * seconds:.0f} s")
    return printed.text()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""

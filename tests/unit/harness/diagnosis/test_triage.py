"""One bug is told once, although several laws show it, at several sizes, and beside other bugs of the kernel."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.features import HEADS, lie_as_contiguous
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.duplicates import why_same
from tests.harness.bugs.failure import Failure
from tests.harness.bugs.imprecise import Imprecise
from tests.harness.bugs.restatement import restate_by_basic_law, restate_by_its_calls
from tests.harness.clock import GRACE_SECONDS, Clock, ShrinkBudget
from tests.harness.diagnosis.conditions import ConditionSearch
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.reruns import with_ordinary_numbers
from tests.harness.diagnosis.shrink import shrunk_in_few_runs
from tests.harness.diagnosis.triage import WAIT_SECONDS, Triage
from tests.harness.run import NO_DESIGN, ONE_DESIGN, WHOLE_DESIGN
from tests.harness.running.runs import Runs
from tests.harness.running.tally import Tally
from tests.harness.verdict import Finding
from tests.unit.support.bugs import CAUSAL
from tests.unit.support.stubs import runs_of

CLAIMS = Capabilities(head_dims=(16, 32, 64, 128))
CASE = Case(batch=2, seqlen_q=9, seqlen_k=9, causal=True, dout_layout="gap")
LAID_OUT = Condition("dout_layout", ("gap",), ("contiguous",))

RUNS = runs_of(CLAIMS)
"""What an investigation asks of a kernel that is not run: its claims."""

Run = Callable[[str, Case, frozenset[str]], Finding | None]


def wrong(*tensors: str) -> Finding:
    """Return the finding that these tensors are wrong."""
    return Finding(claim="so", kind="error", tensor=tensors[0], tensors=tensors)


def bug(finding: Finding, *needs: Condition) -> Bug:
    environment = {"device": "cpu", "device_name": "abacus"}
    failure = Failure("k.py:f", (), "backward", CASE, kernel="k", finding=finding, environment=environment)
    return Bug(failure, finding.tensors, needs)


def backward(shows: Callable[[Case], bool], *, alone: bool = False) -> Run:
    """Return a function that runs laws: ``backward``, and unless ``alone`` all others, find dq wrong in some cases."""

    def run(law: str, case: Case, ignored: frozenset[str], **_: Any) -> Finding | None:
        is_judged = "dq" not in ignored and (law == "backward" or not (alone or law == "forward"))
        return wrong("dq") if is_judged and shows(case) else None

    return run


class TestDeterminism:
    BROKEN = FailingExample("determinism", CASE, wrong("dq", "dv"), sizes=({"batch": 1},))

    @pytest.mark.parametrize("batch", [1, 2])
    def test_a_call_that_is_wrong_by_itself_is_told(self, batch: int) -> None:
        told = restate_by_its_calls(self.BROKEN, backward(lambda case: case.batch == batch), CLAIMS)
        assert (told.law, told.case.batch, told.finding) == ("backward", batch, wrong("dq"))

    @pytest.mark.parametrize("tensors", [("dv",), ("dv", "out")])
    def test_calls_that_are_wrong_in_other_tensors_are_not(self, tensors: tuple[str, ...]) -> None:
        broken = replace(self.BROKEN, finding=wrong(*tensors))
        assert restate_by_its_calls(broken, backward(lambda case: True), CLAIMS) is broken

    def test_nor_are_those_that_are_wrong_in_another_way_each_time(self) -> None:
        worse = itertools.count()
        growing = backward(lambda case: True)

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            finding = growing(law, case, ignored)
            return finding and replace(finding, actual=float(next(worse)))

        assert restate_by_its_calls(self.BROKEN, run, CLAIMS) is self.BROKEN

    def test_nor_are_those_that_are_wrong_where_nothing_is_judged(self) -> None:
        broken = replace(self.BROKEN, ignored=frozenset({"dq"}))
        assert restate_by_its_calls(broken, backward(lambda case: True), CLAIMS) is broken

    @pytest.mark.parametrize("is_of_batch", [True, False])
    def test_gradients_of_a_batch_element_follow_from_a_wrong_lse(self, *, is_of_batch: bool) -> None:
        """What differs when the same call is repeated is no matter of lse."""
        finding = replace(wrong("dq"), other_expression="dq[-1:]" if is_of_batch else "")
        broken = replace(self.BROKEN, finding=finding)

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return wrong("lse") if law == "forward" and case == CASE else None

        for told in (restate_by_its_calls(broken, run, CLAIMS), restate_by_basic_law(broken, run, CLAIMS)):
            assert told.law == ("forward" if is_of_batch else "determinism")

    def test_they_follow_from_the_lse_of_the_element_alone_too(self) -> None:
        """A call for one sequence has as many rows and keys, and layouts of its own."""
        alone: dict[str, Any] = {"batch": 1, "dout_layout": "contiguous"}
        finding = replace(wrong("dv"), other_expression="dv[-1:]")
        broken = replace(self.BROKEN, finding=finding, ignored=frozenset({"lse"}), sizes=(alone,))

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return wrong("lse") if law == "forward" and case.batch == 1 and "lse" not in ignored else None

        told = restate_by_basic_law(broken, run, CLAIMS)
        assert (told.law, told.case, told.finding) == ("forward", replace(CASE, **alone), wrong("lse"))

    @pytest.mark.parametrize(
        ("known", "law"), [((), "backward"), ((bug(wrong("dq"), CAUSAL),), "determinism")]
    )
    def test_a_call_that_known_bugs_make_wrong_leaves_the_law_to_tell(
        self, known: tuple[Bug, ...], law: str
    ) -> None:
        """What is not the same twice is a bug of its own, also where another makes the same tensor wrong."""
        run = backward(lambda case: case.causal, alone=True)
        of_kernel: Any = SimpleNamespace(bugs=dict(enumerate(known)), precision=Imprecise(), finds=None)
        triage = Triage(runs_of(CLAIMS, judged=run), of_kernel, {}, ShrinkBudget(0.0))
        assert triage._by_basic_law(self.BROKEN).law == law

    def test_no_design_explains_a_part_unless_the_kernel_is_known_to_be_less_precise(self) -> None:
        """A design may happen to explain a wrong out, and not the gradients that are wrong as well."""
        of_kernel: Any = SimpleNamespace(precision=Imprecise())

        def asked(finding: Finding, *, explained: bool) -> str:
            found: list[str] = []

            def hard(*_: Any, designs: str = ONE_DESIGN, **options: Any) -> None:
                found.append(designs)

            runs = runs_of(CLAIMS, judged=hard, judged_raw=partial(hard, designs=NO_DESIGN))
            triage = Triage(runs, of_kernel, {}, ShrinkBudget(0.0))
            triage._asked_about(finding, explained=explained)("backward", CASE, frozenset())
            return found[0]

        of_dq = wrong("dq")
        assert [asked(of_dq, explained=x) for x in (False, True)] == [WHOLE_DESIGN, NO_DESIGN]
        assert asked(replace(of_dq, explained_by=("tf32=true",)), explained=True) == ONE_DESIGN
        of_kernel.precision.claims["float16"] = ["tf32=true"]
        assert [asked(of_dq, explained=x) for x in (False, True)] == [ONE_DESIGN, ONE_DESIGN]


class TestBesideCertificate:
    """What a certificate leaves of a failure is its bug's own where large scores and the bug's conditions make it."""

    @pytest.mark.parametrize(
        ("shows", "is_left"),
        [
            (lambda case: case.causal and case.sm_scale == 30.0, False),
            (lambda case: case.sm_scale == 30.0, True),
            (lambda case: case.causal, True),
        ],
    )
    def test_another_bug_shows_without_its_conditions_or_in_ordinary_calls(
        self, shows: Callable[[Case], bool], *, is_left: bool
    ) -> None:
        mask = json.dumps(("no_mask", ("dq",), {}))
        known = bug(replace(wrong("dq"), certificate="no mask is applied", alternatives=(mask,)), CAUSAL)
        assumed: list[tuple[str, ...]] = []

        @contextmanager
        def assuming(alternatives: tuple[str, ...]) -> Iterator[None]:
            assumed.append(alternatives)
            yield
            assumed.pop()

        def judged(law: str, case: Case, ignored: frozenset[str] = frozenset(), **_: Any) -> Finding | None:
            is_wrong = shows(case) if assumed else case.causal
            return wrong("dq") if is_wrong else None

        runs = runs_of(CLAIMS, judged=judged, holds_as=lambda *_: False, read_outside=lambda *_: ())
        runs.assuming, runs.info.known_failures = assuming, ()
        counted: list[Bug] = []
        of_kernel: Any = SimpleNamespace(
            bugs={known.key: known},
            precision=Imprecise(),
            finds=None,
            count=lambda known, *_: counted.append(known),
            blame_keeping=lambda told: False,
        )
        triage = Triage(runs, of_kernel, {}, ShrinkBudget(0.0))
        drawn = FailingExample(
            "backward", replace(CASE, sm_scale=30.0, dout_layout="contiguous"), wrong("dq")
        )
        rest = triage._unexplained(drawn)
        assert (rest is not None) is is_left
        assert counted == ([] if is_left else [known])


class TestRows:
    """A layout shows only if there are several rows, whichever size makes them several."""

    SMALLEST = Case(seqlen_q=2, dout_layout="gap")
    ROWS = Condition("seqlen_q", (2,), (0, 1))

    def needed(self, fails: Callable[[Case], bool], *needs: Condition) -> list[str]:
        failure = replace(bug(wrong("dq")).failure, case=self.SMALLEST)
        return [need.name for need in ConditionSearch(RUNS, failure).without_rows(needs, fails)]

    @pytest.mark.parametrize(
        ("shows", "needed"),
        [
            (lambda case: case.batch * case.heads_q * case.seqlen_q > 1, ["dout_layout"]),
            (lambda case: case.seqlen_q > 1, ["dout_layout", "seqlen_q"]),
        ],
    )
    def test_a_size_is_not_needed_if_another_does(
        self, shows: Callable[[Case], bool], needed: list[str]
    ) -> None:
        assert (
            self.needed(lambda case: case.dout_layout == "gap" and shows(case), LAID_OUT, self.ROWS) == needed
        )

    def test_another_size_that_shows_another_bug_is_none_instead(self) -> None:
        def fails(case: Case) -> bool:
            return case.heads_kv > 1 or (case.dout_layout == "gap" and case.seqlen_q > 1)

        assert self.needed(fails, LAID_OUT, self.ROWS) == ["dout_layout", "seqlen_q"]

    TURNED = Case(group=2, seqlen_q=2, dout_layout="bnhd")
    OF_HEADS, OF_TURNED = Condition("group", (2,), (1,)), Condition("dout_layout", ("bnhd",), ("contiguous",))

    @pytest.mark.parametrize(
        ("shows", "is_needed"),
        [
            (lambda case: True, False),
            (lambda case: case.group > 1, True),
            (lambda case: case.dout_layout == "bnhd", False),
        ],
    )
    def test_a_size_without_which_a_layout_is_contiguous_tells_nothing_by_itself(
        self, shows: Callable[[Case], bool], *, is_needed: bool
    ) -> None:
        """With other sizes above 1 numbers hide what is wrong."""

        def fails(case: Case) -> bool:
            is_hidden = case.batch * case.heads_kv > 1
            return shows(case) and not is_hidden and not lie_as_contiguous(["dout"], case)

        search = ConditionSearch(RUNS, replace(bug(wrong("dq")).failure, case=self.TURNED))
        needs = search.without_rows((self.OF_HEADS, self.OF_TURNED), fails)
        assert needs == [*([self.OF_HEADS] if is_needed else []), self.OF_TURNED]
        found = replace(bug(wrong("dq"), *needs), failure=search.failure)
        known = bug(wrong("dq", "dk"), LAID_OUT)

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            of_known = case.dout_layout == "gap" and case.batch > 1
            return wrong("dq") if fails(case) or of_known else None

        assert bool(why_same(known, found, run, CLAIMS)) == (not is_needed)

    @pytest.mark.parametrize(("law", "is_needed"), [("determinism", False), ("backward", True)])
    def test_the_law_of_a_batch_tells_nothing_of_one_element(self, law: str, *, is_needed: bool) -> None:
        several, laid_out = (
            Condition("batch", (2,), (1,)),
            Condition("k_layout", ("expanded",), ("contiguous",)),
        )
        case = Case(batch=2, k_layout="expanded")
        search = ConditionSearch(RUNS, replace(bug(wrong("dk")).failure, law=law, case=case))
        needs = search.without_rows((several, laid_out), lambda case: case.batch > 1)
        assert (several in needs) == is_needed

    def test_beside_another_field_sizes_tell_bugs_apart(self) -> None:
        assert self.needed(lambda case: True, CAUSAL, self.ROWS) == ["causal", "seqlen_q"]


class TestTheEnd:
    def test_what_other_dtypes_and_processes_have_found_is_known_also_when_time_is_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        events: list[str] = []
        known: Any = SimpleNamespace(learn=lambda: events.append("learn"), bugs={})
        broken = FailingExample("backward", CASE, wrong("dq"))
        runs: Any = SimpleNamespace(clock=Clock(-GRACE_SECONDS), tally=Tally(), share=math.inf)
        triage = Triage(runs, known, {}, ShrinkBudget(0.0), [broken, broken])
        monkeypatch.setattr(triage, "attribute", lambda broken, *, patient: events.append("sort"))
        triage.finish()
        assert events[:2] == ["learn", "sort"]

    @pytest.mark.parametrize(
        ("needs", "is_told"),
        [
            ((), False),
            ((CAUSAL,), False),
            ((Condition("batch", (2,), (1,)),), True),
            ((Condition("group", (2,), (1,)),), False),
            (tuple(Condition(name, (2,), (1,)) for name in ("batch", "heads_kv", "group")), False),
        ],
    )
    def test_in_a_hurry_only_what_few_other_fields_tell_from_a_known_bug_is_told(
        self, tmp_path: Path, needs: tuple[Condition, ...], is_told: bool
    ) -> None:
        known = KnownBugs("k", "float16", tmp_path, verbose=False)
        known.bugs = {"k": bug(wrong("dq"), CAUSAL), "h": bug(wrong("dq"), Condition(HEADS, (2,), (1,)))}
        assert known.tells_apart(bug(wrong("dq"), *needs)) is is_told
        assert known.tells_apart(bug(wrong("lse"), *needs))

    def test_a_failure_waits_only_for_the_investigation_of_the_same_part(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of_out, of_dq, died = (
            FailingExample("backward", CASE, finding)
            for finding in (wrong("out"), wrong("dq"), Finding(claim="", kind="died"))
        )
        ledger = SimpleNamespace(is_busy=lambda kernel, part: part == "forward")
        known: Any = SimpleNamespace(learn=lambda: None, kernel="k", ledger=ledger, bugs={})
        triage = Triage(cast(Any, None), known, {}, ShrinkBudget(0.0), [of_out, of_dq, died])
        looked_at: list[FailingExample] = []
        monkeypatch.setattr(triage, "attribute", looked_at.append)
        triage.learn()
        assert looked_at == [of_dq, died]
        assert triage.waiting == [of_out]

    def test_without_time_nothing_is_told_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a known bug may be to blame for is counted; what no bug is known of is told."""
        told: list[FailingExample] = []
        of_dq, of_dv = (FailingExample("backward", CASE, wrong(tensor)) for tensor in ("dq", "dv"))
        known: Any = SimpleNamespace(learn=lambda: None, bugs={"k": bug(wrong("dq"))})
        runs: Any = SimpleNamespace(clock=Clock(-GRACE_SECONDS), tally=Tally(), share=math.inf)
        triage = Triage(runs, known, {}, ShrinkBudget(0.0), [of_dq, of_dv])
        monkeypatch.setattr(triage, "attribute", lambda broken, *, patient: told.append(broken))
        triage.finish()
        assert (told, runs.tally.unsorted) == ([of_dv], 1)

    def test_failures_that_wait_take_no_more_time_than_their_turn_has_and_are_counted_at_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, ledger = 0.0, SimpleNamespace(is_busy=lambda kernel, part=None: False)
        known: Any = SimpleNamespace(learn=lambda: None, kernel="k", ledger=ledger, bugs={})
        runs: Any = SimpleNamespace(clock=Clock(), tally=Tally(), share=60.0)
        failures = [FailingExample("backward", replace(CASE, seed=seed), wrong("dq")) for seed in range(100)]
        other = FailingExample("backward", CASE, wrong("dv"))
        triage = Triage(runs, known, {}, ShrinkBudget(0.0), [*failures, other])
        looked_at: list[FailingExample] = []

        def sort(broken: FailingExample, **options: bool) -> None:
            nonlocal now
            now += 1.0
            looked_at.append(broken)

        monkeypatch.setattr(triage, "attribute", sort)
        clock = SimpleNamespace(perf_counter=lambda: now, sleep=lambda seconds: None)
        monkeypatch.setattr("tests.harness.diagnosis.triage.time", clock)
        triage.deadline = 2.0
        triage.learn()
        assert looked_at == failures[:2]
        triage.finish(last=False)
        assert (len(looked_at), len(triage.waiting), runs.tally.unsorted) == (2 + WAIT_SECONDS, 96, 0)
        triage.finish(last=True)
        assert other in looked_at
        assert (triage.waiting, runs.tally.unsorted) == ([], len(failures) + 1 - len(looked_at))
        assert len(looked_at) < 20
        left_out = runs.tally.unsorted
        runs.share, triage.waiting = math.inf, list(failures)  # the kernel shares its time with no other
        triage.finish(last=True)
        assert runs.tally.unsorted == left_out


class TestCrash:
    def test_head_dims_that_hold_are_told(self) -> None:
        """A case with a value that is not known to hold is taken for one that ends the process, and is not run."""
        case = Case(seqlen_q=9, seqlen_k=9, head_dim=128)
        *_, (smallest, needs) = shrunk_in_few_runs(case, lambda case: case.head_dim > 32, CLAIMS)
        assert needs == (Condition("head_dim", (64,), (16, 32)),)
        assert smallest.head_dim == 64

    def test_a_case_that_gave_numbers_is_not_told_as_one_that_ends_the_process(self) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            if ignored:
                return Finding(claim="it runs", kind="died")
            return wrong("dq", "dk") if case.causal else None

        known = bug(wrong("dq"), CAUSAL)
        outcome = explain_by_known_bugs(
            FailingExample("backward", CASE, wrong("dq", "dk")), (known,), run, CLAIMS
        )
        assert (outcome.rest, outcome.blamed) == (None, [known])


@pytest.mark.parametrize(
    ("law", "wrong_under", "told"),
    [
        ("calls", "calls", "calls"),
        ("calls", "backward", "backward"),
        ("special", "special", None),
        ("special", "backward", "backward"),
        ("backward", "backward", "backward"),
        ("backward", "forward", None),
    ],
)
def test_normal_numbers_are_asked_of_the_law_that_failed_and_of_a_basic_one(
    law: str, wrong_under: str, told: str | None
) -> None:
    """A kernel that forgets lse where a bias alone needs a gradient is wrong under the law ``calls`` alone."""
    wrong = Finding(claim="so", kind="error", tensor="dq", explained_by=("exp_error=1e-4",))

    def judged(asked: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        assert case.q_values == "normal"
        return replace(wrong, explained_by=()) if asked == wrong_under else None

    info = SimpleNamespace(capabilities=CLAIMS, known_failures=())
    runs = cast(Runs, SimpleNamespace(info=info, judged=judged))
    shown = with_ordinary_numbers(FailingExample(law, replace(CASE, q_values="ones"), wrong), runs)
    assert (shown.law if shown else None) == told

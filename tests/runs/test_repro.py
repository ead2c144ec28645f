"""Stand-alone scripts: they fail while the bug is there, and compare what the law compared."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.contract import AttentionKernel
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.bugs.failure import HOLDS_ALONE
from tests.harness.law import law_named
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.trial.problem import Outputs
from tests.harness.trial.ragged_form import Prepared
from tests.harness.trial.trial import Check, Trial
from tests.harness.verdict import Finding, Verdict
from tests.harness.worker.main import Worker
from tests.unit.support.running import CASE, TOYS, SubjectOf, exit_status, finding_of, report_of
from tests.unit.support.toys import CLAIMS, sound

SCRIPTS = [
    ("wrong", "forward", "error"),
    ("overwriting", "forward", "memory"),
    ("unwritten", "memory", "nonfinite"),
    ("ACCEPTING", "rejection", "accepted"),
    ("wrong_gradient", "identities", "error"),
    ("crashing", "forward", "died"),
    ("hanging", "forward", "hung"),
    ("MASKED", "forward", "error"),
]
"""Toys with the law that each breaks, and the kind of its finding."""
MORE_SCRIPTS = [
    ("nonfinite", "forward", "nonfinite"),
    ("raising", "forward", "exception"),
    ("misshapen", "forward", "contract"),
    ("writing", "memory", "memory"),
    ("pooled", "memory", "error"),
    ("REFUSING", "forward", "refused"),
    ("FORGETFUL", "determinism", "error"),
    ("WRONG_THROUGHOUT", "backward", "error"),
    ("BIASED", "backward", "error"),
    ("BIASED_BACKWARD", "backward", "error"),
]
"""The same for toys whose scripts are like one of the above in most lines."""
MASKED_CASE = replace(CASE, seqlen_q=8, seqlen_k=9, key_padding="scattered", dropout_p=0.5, seed=6)
CASES = {
    "BIASED": replace(CASE, batch=2, bias="shared"),
    "BIASED_BACKWARD": replace(CASE, batch=2, bias="shared"),
    "MASKED": replace(MASKED_CASE, softcap=2.0, bias="full", sinks=True),
}


@pytest.mark.usefixtures("without_ordinary_crashes")
@pytest.mark.parametrize(
    ("name", "law_name", "kind"),
    [*SCRIPTS, *(pytest.param(*row, marks=pytest.mark.nightly) for row in MORE_SCRIPTS)],
)
def test_a_stand_alone_script_exits_1_until_the_kernel_is_mended(
    subject_of: SubjectOf,
    child: Child,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    law_name: str,
    kind: str,
) -> None:
    toys = tmp_path / "toys.py"
    toys.write_text(TOYS.read_text())
    # On a busy machine a case that holds may take a second as well, so nothing but CASE must be run and reported.
    subject = subject_of(name, toys, shrink=name != "hanging")
    if name == "hanging":
        monkeypatch.setattr(child, "run_seconds", 1.0)
    assert finding_of(subject, law_name, CASES.get(name, CASE)).kind == kind
    script = report_of(subject) / "repro.py"
    assert exit_status(script, tmp_path) == 1
    toys.write_text(TOYS.read_text().replace("MENDED = False", "MENDED = True"))
    assert exit_status(script, tmp_path) == 0


def test_a_script_that_holds_is_left_out_and_the_report_says_so(subject_of: SubjectOf) -> None:
    subject = subject_of("wrong_in_company")
    finding_of(subject, "forward", CASE)
    assert not (report_of(subject) / "repro.py").exists()
    assert HOLDS_ALONE in (report_of(subject) / "report.md").read_text()


class Witness(Trial):
    """A trial that computes both sides of each check once more, by the expressions that a script would contain."""

    def call(self, prepared: Prepared, **how: Any) -> Outputs:
        outputs, problem = super().call(prepared, **how), prepared.problem
        inputs = {"q": problem.q, "k": problem.k, "v": problem.v, "dout": problem.dout}
        results.append(inputs | outputs.named())
        assert len(results) == len(self.calls)
        return outputs

    def settle(self, checks: list[Check]) -> dict[str, float]:
        for c in checks:
            self.compare(c.expression or c.tensor, c.call, c.actual)
            if c.other is not None:
                self.compare(c.other_expression or c.tensor, c.other, c.expected)
                seen.add((c.claim, c.tensor))
        return super().settle(checks)

    @staticmethod
    def compare(expression: str, call: int, side: torch.Tensor) -> None:
        value = eval(expression, {"torch": torch, "results": results}, results[call]).double()
        # A side may be only the first rows of the expression. Sums in float64 may differ by their order.
        torch.testing.assert_close(value[tuple(map(slice, side.shape))], side.double(), rtol=1e-9, atol=1e-9)


results: list[dict[str, torch.Tensor]] = []
seen: set[tuple[str, str]] = set()


def test_a_script_compares_what_the_law_compared() -> None:
    seen.clear()
    kernel = AttentionKernel(name="sound", forward=sound, capabilities=CLAIMS)
    for causal, shape in itertools.product((False, True), ((5, 7), (7, 5))):
        case = Case(batch=2, heads_kv=3, group=2, causal=causal, q_layout="gap", seed=9)
        case = replace(case, seqlen_q=shape[0], seqlen_k=shape[1])
        for name in ("identities", "invariance", "composition", "determinism", "memory"):
            results.clear()
            law_named(name)(Witness(kernel, case, "cpu", SAFETY))
    # In each of these, both sides come from the kernel, so a mended kernel gives other numbers on both sides.
    assert len({claim for claim, _ in seen}) >= 14, sorted(seen)


@pytest.mark.parametrize(
    ("name", "depends"), [("unwritten", True), ("unwritten_with_wrong_lse", True), ("wrong", False)]
)
def test_a_script_brings_its_memory_where_the_failure_depends_on_it(name: str, depends: bool) -> None:
    """A row that is never written is right if fresh memory happens to hold the expected zeros."""
    case = replace(CASE, v_values="zeros" if depends else "normal")
    run = Run(f"{TOYS}:{name}", (), "forward", case)
    assert Worker("cpu").depends_on_memory(run, "out") == depends


@pytest.mark.parametrize(
    ("at_zeros", "depends"), [("held", True), ("broken", False), ("skipped", False), ("refused", False)]
)
def test_a_trial_that_was_not_judged_tells_nothing_of_memory(
    monkeypatch: pytest.MonkeyPatch, at_zeros: str, *, depends: bool
) -> None:
    """A GPU that other processes fill may lack memory for the trial with zeros alone."""
    wrong = Verdict(
        status="broken", finding=Finding(claim="so", kind="error", tensor="dv", tensors=("out", "dv"))
    )

    def attempt(_: Worker, __: Run, trial_of: Callable[..., Trial]) -> tuple[Verdict, None]:
        is_usual = trial_of is Trial or at_zeros == "broken"
        return (wrong if is_usual else Verdict(status=at_zeros)), None

    monkeypatch.setattr(Worker, "attempt", attempt)
    run = Run(f"{TOYS}:wrong", (), "forward", CASE)
    assert Worker("cpu").depends_on_memory(run, "out") == depends


@pytest.mark.usefixtures("unscripted")
def test_tensors_of_a_script_have_the_layout_of_the_case(subject_of: SubjectOf) -> None:
    subject = subject_of("wrong", shrink=False)  # as shrinking removes the layouts, which do not matter
    case = replace(CASE, q_layout="offset", k_layout="gap", v_layout="expanded_rows", dtype="float32")
    finding_of(subject, "forward", case)
    text = (report_of(subject) / "repro.py").read_text()
    windows = re.findall(r"^(\w+)0 = window\(torch.float32, (\(.*?\)), (\(.*?\)), (\d+)", text, re.MULTILINE)
    assert [(name, stride) for name, _, stride, _ in windows] == [
        ("q", "(48, 48, 16, 1)"),
        ("k", "(50, 43, 19, 1)"),
        ("v", "(0, 0, 0, 1)"),
        ("dout", "(48, 48, 16, 1)"),
    ]
    assert int(windows[0][3]) % 64 == 1

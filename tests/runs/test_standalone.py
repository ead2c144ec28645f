"""The law ``standalone``: a function that answers otherwise where it is not tested is found, and no other is."""

import errno
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from strategies.case import Case
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.trial.problem import Problem
from tests.harness.trial.trial import CannotRun, RaisedElsewhere
from tests.harness.verdict import Verdict
from tests.harness.worker.script_process import ScriptProcess
from tests.unit.support import gaming

CASE = Case(
    batch=2,
    heads_kv=2,
    group=2,
    seqlen_q=9,
    seqlen_k=17,
    causal=True,
    q_layout="gap",
    v_layout="bnhd",
    seed=3,
)
SOUND = (
    *(f"{gaming.__name__}:{name}" for name in gaming.SOUND),
    *("tests.unit.support.large:sound", "tests.unit.support.large:right_gradients"),
    *("tests.panel.eager:float32", "kernels.adapters.pytorch.sdpa:MATH"),
)


def verdict(child: Child, spec: str, law: str = "standalone", case: Case = CASE) -> Verdict:
    return child.run(Run(spec, (), law, case), lambda: None)


@pytest.mark.parametrize("name", gaming.WRONG_ELSEWHERE)
def test_a_function_that_knows_that_it_is_tested_is_found(child: Child, name: str) -> None:
    told = verdict(child, f"{gaming.__name__}:{name}")
    assert told.finding is not None
    assert told.finding.claim.startswith("in a process without Flashproof, out is within")


def test_a_function_that_replaces_what_callers_compare_by_is_found(child: Child) -> None:
    told = verdict(child, f"{gaming.__name__}:other_comparison")
    assert told.finding is not None
    assert told.finding.claim.endswith("in place of torch.allclose")
    child.close()  # so that no other test compares by it


def test_a_tensor_of_another_class_is_no_answer(child: Child) -> None:
    told = verdict(child, f"{gaming.__name__}:lazy", "forward")
    assert told.finding is not None
    assert "returned a tests.Lazy, expected no other class" in told.finding.claim


@pytest.mark.parametrize(("name", "status"), [("late", "broken"), ("in_time", "held")])
def test_a_result_has_to_be_there_when_a_function_returns(child: Child, name: str, status: str) -> None:
    told = verdict(child, f"{gaming.__name__}:{name}", "forward")
    assert told.status == status
    assert told.finding is None or told.finding.kind == "nonfinite"


def test_a_tensor_that_spans_gigabytes_is_not_sent(child: Child) -> None:
    told = verdict(child, f"{gaming.__name__}:of_stack", case=replace(CASE, k_layout="huge"))
    assert (told.status, told.seconds["kernel"]) == ("held", 0.0)


@pytest.mark.parametrize("spec", SOUND)
def test_sound_functions_answer_alike(child: Child, spec: str) -> None:
    told = verdict(child, spec)
    assert (told.status, told.finding) == ("held", None)


@pytest.mark.parametrize("name", gaming.WITHOUT_MEMORY_ELSEWHERE)
def test_too_little_memory_elsewhere_is_no_fault_of_a_kernel(child: Child, name: str) -> None:
    told = verdict(child, f"{gaming.__name__}:{name}")
    assert (told.status, told.finding) == ("skipped", None)
    assert "without Flashproof" in told.reason


def test_what_a_function_raises_elsewhere_alone_is_found(child: Child) -> None:
    told = verdict(child, f"{gaming.__name__}:failing_elsewhere")
    assert told.finding is not None
    assert told.finding.claim.endswith("but the kernel raised ValueError: no test is running")


def problem() -> Problem:
    q, k, v, dout = (torch.randn(1, 2, 3, 16) for _ in range(4))
    return Problem(q, k, v, dout, causal=True, sm_scale=0.25)


def test_what_can_not_be_imported_or_ends_the_process_says_nothing_of_a_kernel() -> None:
    with pytest.raises(CannotRun, match="can't be imported: AttributeError"):
        ScriptProcess(f"{gaming.__name__}:nothing", "cpu").call(problem(), {}, False)
    with pytest.raises(CannotRun, match="ended, or did not answer: EOFError"):
        ScriptProcess(f"{gaming.__name__}:ending", "cpu").call(problem(), {}, False)


def test_what_a_function_raises_is_told() -> None:
    with pytest.raises(RaisedElsewhere, match=r"TypeError: .*unknown"):
        ScriptProcess(f"{gaming.__name__}:of_modules", "cpu").call(problem(), {"unknown": 1}, False)


def test_a_process_that_can_not_be_started_says_nothing_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(CannotRun, match="ended, or did not answer"):
        ScriptProcess(f"{gaming.__name__}:of_modules", "cpu").call(problem(), {}, False)


def test_half_an_answer_is_not_taken_for_that_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    process = ScriptProcess(f"{gaming.__name__}:reading_its_environment", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(process, "_receive", lambda: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            process.call(problem(), {}, False)
    asked = problem()
    outputs, _ = process.call(asked, {}, False)
    expected = gaming.sound(asked.q, asked.k, asked.v, causal=True, sm_scale=0.25)
    torch.testing.assert_close(outputs.out, expected)

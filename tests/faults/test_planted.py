"""Each planted fault is told as what it is, and what is no failure is none."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.duplicates import are_one_read
from tests.harness.bugs.failure import Failure
from tests.harness.device import memory
from tests.harness.run import Run
from tests.harness.running.child import KILLED, Child
from tests.harness.running.exits import KEPT_BYTES
from tests.harness.verdict import Finding, Verdict

MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """Yield a child with little patience, whose kernels print little and compile in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHPROOF_PRINTED_BYTES", str(64 * MEBIBYTE))
        patch.setenv("FLASHPROOF_COMPILE_SECONDS", "2")
        child = Child("cpu", run_seconds=30.0)
        yield child
        child.close()


def verdict(child: Child, name: str, law: str, case: Case) -> Verdict:
    """Run a law on a case of a planted kernel."""
    return child.run(Run(f"tests.faults.planted:{name}", (), law, case), lambda: None)


@pytest.mark.parametrize(
    ("name", "law", "case", "kind", "told"),
    [
        ("reading_outside", "forward", Case(seqlen_k=17), "nonfinite", "out is within the rounding bound"),
        ("reading_outside", "memory", Case(seqlen_q=0, seqlen_k=17), "died", "past the end of a tensor"),
        ("writing_outside", "memory", Case(seqlen_q=17), "memory", "nothing is written outside"),
        ("corrupting", "forward", Case(causal=True, seqlen_k=2), "memory", "k is never written"),
        ("aborting", "forward", Case(group=2), "died", "signal 6"),
        ("crashing", "forward", Case(seqlen_k=101), "died", "signal 11"),
        ("exiting", "forward", Case(seqlen_q=101), "died", "status 0"),
        ("exiting_politely", "forward", Case(group=2), "died", "status 1"),
    ],
)
def test_a_fault_is_told_as_what_it_is(
    child: Child, name: str, law: str, case: Case, kind: str, told: str
) -> None:
    assert verdict(child, name, "forward", Case(seqlen_q=16, seqlen_k=16)).status == "held"
    finding = verdict(child, name, law, case).finding
    assert finding is not None
    assert finding.kind == kind
    assert told in finding.claim


def test_a_hang_is_told_with_its_place(child: Child) -> None:
    with child.limited(5.0):
        finding = verdict(child, "hanging", "forward", Case(batch=3)).finding
    assert finding is not None
    assert finding.kind == "hung"
    assert finding.detail.endswith("in hanging")


def test_much_output_is_no_failure_and_takes_no_memory(child: Child) -> None:
    held = memory.held_bytes(os.getpid())
    assert verdict(child, "talking", "forward", Case(group=2)).status == "held"
    assert len(child.printed.kept) == KEPT_BYTES
    assert memory.held_bytes(os.getpid()) - held < 32 * MEBIBYTE


def test_a_long_compilation_is_no_failure_and_its_time_is_known(child: Child) -> None:
    start = time.perf_counter()
    answer = verdict(child, "slow_to_compile", "forward", Case(head_dim=32))
    assert answer.status == "held"
    assert 2.0 <= answer.seconds["kernel"] <= time.perf_counter() - start


def test_too_little_memory_is_no_failure(child: Child) -> None:
    answer = verdict(child, "asking_for_too_much", "forward", Case(group=2))
    assert (answer.status, answer.reason[:13]) == ("skipped", "out of memory")


def test_a_kernel_that_fills_the_machine_is_ended_and_that_is_no_failure(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    monkeypatch.setattr(memory, "SHARE_LEFT", 1.0)
    monkeypatch.setattr(memory, "SHARE_HELD", 1024 * MEBIBYTE / whole)
    answer = verdict(child, "taking_too_much", "forward", Case(group=2))
    assert (answer.status, answer.reason) == ("skipped", KILLED)


def test_a_read_that_makes_numbers_wrong_and_ends_at_a_fence_is_one_bug(child: Child) -> None:
    """A bug that makes the same numbers wrong without depending on what lies outside is another one."""

    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return verdict(child, "reading_outside", law, case).finding

    def found(law: str, case: Case) -> Bug:
        finding = run(law, case, frozenset())
        assert finding is not None
        failure = Failure("k.py:f", (), law, case, kernel="k", finding=finding, environment={})
        return Bug(failure, finding.tensors)

    numbers, fenced = found("forward", Case(seqlen_k=1)), found("memory", Case(seqlen_q=0, seqlen_k=17))
    for pair in ((numbers, fenced), (fenced, numbers)):
        assert are_one_read(*pair, run, Capabilities())
    assert not are_one_read(numbers, numbers, run, Capabilities())

    def run_elsewhere(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return None if law == "memory" else run(law, case, ignored)

    assert not are_one_read(numbers, fenced, run_elsewhere, Capabilities())

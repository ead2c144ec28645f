"""Each fault that only a GPU has is told as what it is, the case after it holds, and what is no failure is none."""

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from strategies.case import Case
from tests.faults.planted_triton import KEPT_BYTES, RARELY
from tests.harness.machine import SHARERS
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.session.plan import chosen_device
from tests.harness.verdict import ENDS, Verdict

SOUND = Case(seqlen_q=16, seqlen_k=16)
"""A case in which no planted kernel has its fault."""
CALLS = 600
"""So many calls of ``racing`` are all right once in 90,000 times."""


@pytest.fixture(scope="module")
def child(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Yield a child that finds nothing compiled, and whose kernels compile in seconds and leave memory to others."""
    device = chosen_device(pytestconfig)
    if device == "cpu":
        pytest.skip("these faults need a GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("FLASHPROOF_UNROLLED", "6000")
        patch.setenv(SHARERS, "2")
        child = Child(device)
        yield child
        child.close()


def run_of(name: str, case: Case, law: str = "forward") -> Run:
    return Run(f"tests.faults.planted_triton:{name}", (), law, case)


def verdict(child: Child, name: str, case: Case, law: str = "forward") -> Verdict:
    """Run a law on a case of a planted kernel."""
    return child.run(run_of(name, case, law), lambda: None)


@pytest.mark.parametrize(
    ("name", "law", "case", "kind", "told"),
    [
        ("reading_far_outside", "forward", Case(seqlen_k=17), "fault", "illegal memory access"),
        ("misaligned", "forward", Case(seqlen_q=17), "fault", "misaligned address"),
        ("trapping", "forward", Case(group=2), "fault", "CUDA"),
        ("asserting", "forward", Case(causal=True), "fault", "device-side assert"),
        ("hanging", "forward", Case(seqlen_k=101), "hung", "still running 20 s after the launch"),
        ("writing_outside", "memory", Case(seqlen_q=17), "memory", "nothing is written outside"),
        ("corrupting", "forward", Case(causal=True, seqlen_k=2), "memory", "k is never written"),
    ],
)
def test_a_fault_is_told_as_what_it_is_and_the_next_case_holds(
    child: Child, name: str, law: str, case: Case, kind: str, told: str
) -> None:
    assert verdict(child, name, SOUND).status == "held"
    before = child.process
    finding = verdict(child, name, case, law).finding
    assert finding is not None
    assert finding.kind == kind
    assert told in finding.claim
    assert verdict(child, name, SOUND).status == "held"
    assert (child.process is before) == (kind not in ENDS)


def test_a_kernel_that_has_hung_gets_less_time(child: Child) -> None:
    child.hung.clear()
    for seconds in (20, 5):
        finding = verdict(child, "hanging", Case(seqlen_k=101)).finding
        assert finding is not None
        assert finding.claim.endswith(f"the device was still running {seconds} s after the launch")


def test_a_race_shows_in_some_calls_alone(child: Child) -> None:
    answers = [verdict(child, "racing", SOUND) for _ in range(CALLS)]
    shown = Counter(answer.finding and answer.finding.kind for answer in answers)
    assert shown.keys() == {None, "error"}
    assert CALLS / RARELY / 10 < shown["error"] < 3 * CALLS / RARELY


def test_a_leak_of_the_gpus_memory_is_measured(child: Child) -> None:
    for case, left in ((SOUND, 0), (Case(causal=True), KEPT_BYTES)):
        measured = child.ask(run_of("leaking", case).request("leak", seconds=2.0))["left"]
        assert measured == pytest.approx(left, rel=0.1)
        child.close()


def test_a_long_compilation_is_no_failure_and_its_time_is_known(child: Child) -> None:
    first, second = (verdict(child, "slow_to_compile", Case(head_dim=32)) for _ in range(2))
    assert first.status == second.status == "held"
    assert first.seconds["kernel"] > 1.0 > second.seconds["kernel"]


def test_a_kernel_that_fills_the_gpu_is_no_failure_and_leaves_memory_to_others(child: Child) -> None:
    answer = verdict(child, "filling", Case(group=2))
    assert (answer.status, answer.reason[:13]) == ("skipped", "out of memory")
    assert re.search(r"of which \d\d+\.\d+ GiB is free", answer.reason)
    assert verdict(child, "filling", SOUND).status == "held"

"""Accesses outside of tensors are told with their line, and reproduced; kernels that make none are not accused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.algorithms.flash_v2 import forward_pass
from kernels.common import tiles
from kernels.contract import Capabilities
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.duplicates import are_one_read
from tests.harness.bugs.failure import Failure
from tests.harness.interpreter.accesses import Touched
from tests.harness.interpreter.installation import accesses_outside, tells_accesses
from tests.harness.law import law_named
from tests.harness.running.exits import is_outside
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import BEFORE_THE_BEGINNING, MEMORY, PAST_THE_END, Finding
from tests.unit.support import outside_toys
from tests.unit.support.outside_toys import line_of

TOYS = Path(outside_toys.__file__)
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in this process, without a GPU"),
    pytest.mark.usefixtures("nothing_left_to_interpreter"),
]

CASE = Case(seqlen_q=3, seqlen_k=7, head_dim=16, dtype="float32")

BUGS = [
    ("hidden_by_where", outside_toys._hide, PAST_THE_END, "reads x", "right at the end of x"),
    ("before_the_beginning", outside_toys._previous, BEFORE_THE_BEGINNING, "reads x", "64 bytes before"),
    ("stored_past_the_end", outside_toys._fill, PAST_THE_END, "writes out", "right at the end of out"),
    ("wrong_stride", outside_toys._tile, PAST_THE_END, "reads x", "past the end of x"),
    ("of_another_tensor", outside_toys._shifted, "", "reads x", "in y, of which it is element 0"),
]
"""Toys, the function that makes the access, and what is told of it."""


def found(name: str, case: Case = CASE, law: str = "memory") -> tuple[Finding | None, Trial]:
    """Return what a law finds in a case of a toy, and the trial."""
    trial = Trial(load(f"{TOYS}:{name}"), case, "cpu", SAFETY)
    try:
        law_named(law)(trial)
    except LawBroken as broken:
        return broken.finding, trial
    return None, trial


@pytest.mark.parametrize(("name", "function", "rule", "does", "where"), BUGS)
def test_an_access_is_told_with_its_line_operand_and_place(
    name: str, function: Any, rule: str, does: str, where: str
) -> None:
    finding, _ = found(name)
    assert finding is not None
    assert finding.kind == MEMORY
    assert is_outside(finding)
    assert finding.claim.startswith(rule)
    assert f", but outside_toys.py:{line_of(function)} {does} there: " in finding.claim
    assert finding.place == f'File "{TOYS}", line {line_of(function)}'
    assert where in finding.detail


def test_an_access_in_a_function_that_a_kernel_calls_is_told_with_the_call() -> None:
    finding, _ = found("wrong_stride")
    assert finding is not None
    call = outside_toys._sums.fn.__code__.co_firstlineno + 2
    files = [line.strip() for line in finding.detail.splitlines() if "File " in line]
    assert files == [f'File "{TOYS}", line {line}' for line in (call, line_of(outside_toys._tile))]


def test_of_functions_in_other_files_the_line_that_calls_them_is_told() -> None:
    flash = Path(forward_pass.__file__)
    frames = ((tiles.__file__, 3), (str(flash), 2), (str(flash), 1))
    shape, elements = (4,), range(4)
    access = Touched(
        kind="load",
        operand="q",
        index=4,
        elements=elements,
        shape=shape,
        nearest="right at the end of q",
        program=0,
        frames=frames,
    )
    assert access.claim.startswith(f"{PAST_THE_END}, but forward_pass.py:2 reads q there")
    assert "in tiles.py:3" in access.detail
    finding = Finding(claim=access.claim, kind=MEMORY, detail=access.detail)
    assert finding.origin.startswith("forward_pass.py:2 reads q")
    assert replace(access, frames=()).claim == f"{PAST_THE_END}, but a kernel reads q there"


def test_an_element_is_counted_from_the_first_one_of_its_tensor() -> None:
    storage = torch.zeros(64)
    outside_toys._previous[(2,)](storage[16:32], torch.zeros(32), 2, 16, MENDED=False)
    assert accesses_outside() == []
    outside_toys._previous[(2,)](storage[8:24], torch.zeros(32), 2, 16, MENDED=False)
    (access,) = accesses_outside()
    assert (access.index, access.elements, access.shape) == (-16, range(-8, 56), (16,))
    assert (access.program, access.nearest) == (0, "32 bytes before the beginning of x")


def test_of_each_operation_the_first_access_is_told() -> None:
    outside_toys._advance[(1,)](torch.zeros(16), torch.zeros(16), 3, 16)
    outside_toys._around[(1,)](torch.zeros(16), torch.zeros(16), 16)
    told = [(x.operand, x.index, x.is_before) for x in accesses_outside()]
    assert told == [("x", 16, False), ("x", -16, True), ("x", 16, False)]
    assert accesses_outside() == []


@pytest.mark.parametrize("name", [name for name, *_ in BUGS])
def test_findings_of_one_bug_have_one_origin(name: str) -> None:
    """The numbers that are told differ."""
    one, two = (found(name, replace(CASE, seqlen_k=n, head_dim=d))[0] for n, d in ((7, 16), (21, 32)))
    assert one is not None
    assert two is not None
    assert one.detail != two.detail
    assert one.origin == two.origin != ""


def test_accesses_of_different_lines_have_different_origins() -> None:
    assert len({finding.origin for name, *_ in BUGS if (finding := found(name)[0])}) == len(BUGS)


@pytest.mark.parametrize("layout", ["contiguous", "gap", "bnhd", "offset"])
@pytest.mark.parametrize("seqlen_k", [1, 7, 32])
def test_a_sound_kernel_is_not_accused(seqlen_k: int, layout: str) -> None:
    finding, trial = found("sound", replace(CASE, seqlen_k=seqlen_k, k_layout=layout, v_layout=layout))
    assert finding is None
    assert (trial.touched, trial.unwritten, trial.notes) == ([], [], {})
    assert tells_accesses()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_read_of_what_nobody_has_written_is_noted_and_breaks_no_law(dtype: str) -> None:
    finding, trial = found("unwritten", replace(CASE, dtype=dtype))
    assert finding is None
    line = line_of(outside_toys._half, "# unwritten")
    (note,) = trial.notes
    assert note.startswith(f"outside_toys.py:{line} reads numbers of out that nobody has written")


@pytest.mark.parametrize("name", ["hidden_by_where", "before_the_beginning", "stored_past_the_end"])
def test_other_laws_hold_if_nothing_comes_of_an_access(name: str) -> None:
    finding, trial = found(name, law="forward")
    assert finding is None
    assert (trial.touched == []) == (name != "stored_past_the_end")  # inputs have a margin, allocations none


def test_a_told_read_and_the_numbers_that_come_of_it_are_one_bug() -> None:
    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return found("used", case, law)[0]

    def bug(law: str) -> Bug:
        finding = run(law, CASE, frozenset())
        assert finding is not None
        failure = Failure("k.py:f", (), law, CASE, kernel="k", finding=finding, environment={})
        return Bug(failure, finding.tensors)

    numbers, read = bug("forward"), bug("memory")
    assert numbers.failure.finding.kind == "nonfinite"
    for pair in ((numbers, read), (read, numbers)):
        assert are_one_read(*pair, run, Capabilities())
    of_another_line = replace(read.failure.finding, claim=f"{PAST_THE_END}, but k.py:1 reads k there")
    elsewhere = replace(read, failure=replace(read.failure, finding=of_another_line))
    assert not are_one_read(numbers, elsewhere, run, Capabilities())

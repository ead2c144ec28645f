"""What a kernel leaves changed in its process changes nothing of what is drawn, expected or told of other kernels."""

from pathlib import Path

from tests.harness.run import Run
from tests.harness.running.child import Child, Children
from tests.harness.verdict import LEAVES, Verdict
from tests.unit.support import changing
from tests.unit.support.changing import CHANGES, spelled
from tests.unit.support.running import CASE, TOYS

CHANGING = Path(changing.__file__)
SOUND = f"{TOYS}:sound"


def verdict(child: Child, spec: str, law: str = "backward") -> Verdict:
    return child.run(Run(spec, (), law, CASE), lambda: None)


def test_what_a_kernel_leaves_changed_is_told_by_one_law_alone_and_meets_no_later_call(child: Child) -> None:
    """All run in one process here, so that each would meet what the one before it has left."""
    for piece in CHANGES:
        spec = f"{CHANGING}:{spelled(piece)}"
        assert verdict(child, spec).status == "held", piece
        finding = verdict(child, spec, "process").finding
        assert finding is not None
        assert finding.claim == f"{LEAVES}{piece} changed"
        assert [verdict(child, SOUND, law).status for law in ("backward", "process")] == ["held"] * 2


def test_what_no_call_puts_back_meets_no_other_kernel(child: Child) -> None:
    """A function of PyTorch that a kernel replaces spoils others in its process, and none in processes of their own."""
    child.close()
    specs = [f"{CHANGING}:replacing", SOUND]
    assert [verdict(child, spec).status for spec in specs] == ["held", "broken"]
    child.close()
    for order in (specs, specs[::-1]):
        children = Children("cpu")
        assert [verdict(children.of(spec), spec).status for spec in (*order, *order)] == ["held"] * 4
        children.close()


def test_of_many_processes_the_one_that_was_used_longest_ago_ends() -> None:
    children = Children("cpu", most=2)
    specs = [f"{TOYS}:{name}" for name in ("sound", "fused", "talking")]
    first, second, third = (children.of(spec) for spec in specs)
    for child, spec in ((first, specs[0]), (second, specs[1]), (first, specs[0])):
        assert verdict(child, spec).status == "held"
    kept = first.process
    assert verdict(third, specs[2]).status == "held"
    assert (first.process is kept, second.process) == (True, None)
    assert verdict(second, specs[1]).status == "held"
    assert first.process is None
    children.close()
    assert third.process is None

"""What a kernel leaves changed in its process changes nothing of what is drawn, expected or told of other kernels."""

from pathlib import Path

from tests.harness.run import Run
from tests.harness.running.child import Child, Children
from tests.harness.verdict import Verdict
from tests.unit.support import changing
from tests.unit.support.changing import CHANGES, spelled
from tests.unit.support.running import CASE, TOYS

CHANGING = Path(changing.__file__)
SOUND = f"{TOYS}:sound"


def verdict(child: Child, spec: str) -> Verdict:
    return child.run(Run(spec, (), "backward", CASE), lambda: None)


def test_a_kernel_that_leaves_its_process_changed_holds_and_so_does_a_sound_one_after_it(
    child: Child,
) -> None:
    """All run in one process here, so that each would meet what the one before it has left."""
    verdict(child, SOUND)  # what is imported at first is imported here
    for piece in CHANGES:
        told = verdict(child, f"{CHANGING}:{spelled(piece)}")
        assert (told.status, told.left_changed) == ("held", (piece,)), told
        sound = verdict(child, SOUND)
        assert (sound.status, sound.left_changed) == ("held", ())


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

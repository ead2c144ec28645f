"""What a kernel leaves changed in its process changes nothing of what is drawn, expected or told of other kernels."""

from pathlib import Path
from typing import Any

import torch

from tests.harness.run import Run
from tests.harness.running.child import Child, Children
from tests.harness.trial.process_state import PIECES, Piece
from tests.harness.verdict import Verdict
from tests.unit.support import changing
from tests.unit.support.changing import CHANGES as LEFT
from tests.unit.support.changing import spelled
from tests.unit.support.running import CASE, TOYS

CHANGING = Path(changing.__file__)
SOUND = f"{TOYS}:sound"


def lowered() -> None:
    """Change the process as a kernel for half precision may."""
    torch.set_default_dtype(torch.float16)
    torch.set_float32_matmul_precision("medium")


def raised() -> None:
    """Change the process as a kernel for another device and in double precision may."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)


CHANGES = (lowered, raised)


def verdict(child: Child, spec: str) -> Verdict:
    return child.run(Run(spec, (), "backward", CASE), lambda: None)


def values() -> list[tuple[Piece, Any]]:
    return [(piece, piece.read()) for piece in PIECES]


def test_a_kernel_that_leaves_its_process_changed_holds_and_so_does_a_sound_one_after_it(
    child: Child,
) -> None:
    """All run in one process here, so that each would meet what the one before it has left."""
    verdict(child, SOUND)  # what is imported at first is imported here
    for piece in LEFT:
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

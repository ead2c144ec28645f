"""``kernels.validation``: checks that remember what has passed them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import validation
from kernels.validation import remember_passed

ROWS = torch.zeros(8, 32)


class Check:
    """A check that passes tensors and numbers, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.remembering = remember_passed(self.check)

    def check(self, *arguments: Any) -> None:
        """Raise TypeError for anything else."""
        self.calls += 1
        if not all(isinstance(argument, Tensor | float | int) for argument in arguments):
            raise TypeError("expected tensors and numbers")


def test_what_has_passed_is_not_checked_again() -> None:
    check = Check()
    check.remembering(torch.zeros(8, 32), 1, 0.5)
    check.remembering(torch.ones(8, 32), 1, 0.5)
    assert check.calls == 1


@pytest.mark.parametrize(
    "other",
    [
        (ROWS.half(), ROWS, True, 0.5),
        (ROWS, ROWS.half(), True, 0.5),
        (ROWS, ROWS[:4], True, 0.5),
        (ROWS, torch.zeros(8, 64)[:, :32], True, 0.5),
        (ROWS, torch.zeros(257)[1:].view(8, 32), True, 0.5),
        (ROWS, ROWS.to("meta"), True, 0.5),
        (ROWS, ROWS, False, 0.5),
        (ROWS, ROWS, 1, 0.5),
        (ROWS, ROWS, True, 0.25),
        (ROWS, ROWS, True),
    ],
    ids=["q", "dtype", "shape", "strides", "start", "device", "value", "type", "number", "count"],
)
def test_what_differs_is_checked(other: tuple[Tensor | float, ...]) -> None:
    check = Check()
    for arguments in ((ROWS, ROWS, True, 0.5), other):
        check.remembering(*arguments)
    assert check.calls == 2


@pytest.mark.parametrize("wrong", [None, "0.5", ["unhashable"]])
def test_what_does_not_pass_is_checked_each_time(wrong: Any) -> None:
    check = Check()
    for calls in (1, 2):
        with pytest.raises(TypeError, match="expected tensors and numbers"):
            check.remembering(ROWS, wrong)
        assert check.calls == calls


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_MOST_REMEMBERED", 2)
    check = Check()
    for number in (1, 2, 2, 3, 3, 1):
        check.remembering(number)
    assert check.calls == 4

"""``kernels.common.launching.remembered``: a function that is called again only for arguments that differ for it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common import launching
from kernels.common.launching import remembered

ROWS = torch.zeros(8, 32)


class Counted:
    """A function that takes tensors, numbers and strings, and returns how often it was called."""

    def __init__(self) -> None:
        self.calls = 0
        self.remembered = remembered(self.function)

    def function(self, *arguments: Any) -> int:
        """Raise TypeError for anything else, and for sparse tensors."""
        self.calls += 1
        sparse = any(isinstance(argument, Tensor) and argument.is_sparse for argument in arguments)
        if sparse or not all(isinstance(argument, Tensor | float | int | str) for argument in arguments):
            raise TypeError("expected dense tensors, numbers and strings")
        return self.calls


def test_tensors_that_differ_in_their_numbers_and_address_alone_have_one_result() -> None:
    counted = Counted()
    for tensor in (torch.zeros(8, 32), torch.ones(8, 32)):
        assert counted.remembered(tensor, 1, 0.5, "name") == 1
    assert counted.calls == 1


@pytest.mark.parametrize(
    "other",
    [
        (ROWS.half(), ROWS, True, 0.5, "name"),
        (ROWS, ROWS.half(), True, 0.5, "name"),
        (ROWS, ROWS[:4], True, 0.5, "name"),
        (ROWS, torch.zeros(8, 64)[:, :32], True, 0.5, "name"),
        (ROWS, torch.zeros(257)[1:].view(8, 32), True, 0.5, "name"),
        (ROWS, ROWS.to("meta"), True, 0.5, "name"),
        (ROWS, ROWS, False, 0.5, "name"),
        (ROWS, ROWS, 1, 0.5, "name"),
        (ROWS, ROWS, True, 0.25, "name"),
        (ROWS, ROWS, True, 0.5, "another"),
        (ROWS, ROWS, True, 0.5),
    ],
    ids=["q", "dtype", "shape", "strides", "start", "device", "value", "type", "number", "string", "count"],
)
def test_arguments_that_differ_have_results_of_their_own(other: tuple[Tensor | float | str, ...]) -> None:
    counted = Counted()
    for _ in range(2):
        assert counted.remembered(ROWS, ROWS, True, 0.5, "name") == 1
        assert counted.remembered(*other) >= 2


def test_nothing_is_remembered_of_meta_tensors() -> None:
    counted = Counted()
    assert [counted.remembered(1, ROWS.to("meta")) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("wrong", [None, ["unhashable"], ROWS.to_sparse()], ids=["none", "list", "sparse"])
def test_an_exception_is_raised_each_time(wrong: Any) -> None:
    counted = Counted()
    for calls in (1, 2):
        with pytest.raises(TypeError, match="expected dense tensors, numbers and strings"):
            counted.remembered(ROWS, wrong)
        assert counted.calls == calls


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST_REMEMBERED", 2)
    counted = Counted()
    assert [counted.remembered(number) for number in (1, 2, 2, 3, 3, 1)] == [1, 2, 2, 3, 3, 4]

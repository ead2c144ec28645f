"""The live line of a run."""

import math
from typing import Any

import pytest

from tests.harness.progress import progress


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1.0, 200, math.inf), "0 of 200 examples"),
        ((50, 10.0, 200, math.inf), "50 of 200 examples, 5.0 examples/s, 0:30 left"),
        ((50, 10.0, 200, 20.0), "50 of 200 examples, 5.0 examples/s, 0:20 left"),
        ((300, 10.0, 200, math.inf), "300 of 200 examples, 30.0 examples/s, 0:00 left"),
        ((50, 10.0, None, 590.0), "50 examples, 5.0 examples/s, 9:50 left"),
    ],
)
def test_the_live_line(arguments: tuple[Any, ...], text: str) -> None:
    assert progress(*arguments) == text

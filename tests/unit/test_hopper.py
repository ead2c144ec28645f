"""``kernels.hopper``: what its launchers compute."""

import math

from kernels.hopper import heads_together


def test_heads_are_walked_an_even_number_of_times() -> None:
    assert heads_together(192, 64) == 48  # four times in place of three
    assert heads_together(192, 192) == 96
    assert heads_together(5, 1) == 1
    assert heads_together(1, 8) == 1
    for heads in range(2, 200):
        for most in (1, 2, 7, 64):
            together = heads_together(heads, most)
            assert 1 <= together <= most
            assert math.ceil(heads / together) <= math.ceil(heads / most) + 1

"""What a symptom hides, and which symptoms have something in common."""

from dataclasses import replace

import pytest

from tests.harness.symptoms import is_in_common, is_not_cured
from tests.harness.verdict import Finding


@pytest.mark.parametrize(("kind", "tensor", "expected"), [("memory", "q", True), ("memory", "out", False)])
def test_a_write_to_an_input_hides_numbers(kind: str, tensor: str, expected: bool) -> None:
    """Numbers can't be judged if the kernel has changed an input, so no other bug counts as absent from the case."""
    found = Finding(claim="so", kind=kind, tensor=tensor)
    assert found.hides_numbers == expected
    mine = Finding(claim="so", kind="error", tensor="dk")
    assert is_not_cured(mine, found) == expected


@pytest.mark.parametrize(("tensor", "expected"), [("dq", True), ("lse", False)])
def test_what_is_not_finite_hides_gradients(tensor: str, expected: bool) -> None:
    mine = Finding(claim="so", kind="error", tensor=tensor)
    assert is_not_cured(mine, Finding(claim="so", kind="nonfinite", tensor="out")) == expected
    assert not is_not_cured(mine, Finding(claim="so", kind="nonfinite", tensor="dv"))


@pytest.mark.parametrize(("tensor", "expected"), [("dq", False), ("lse", True)])
def test_roundings_of_a_tensor_are_not_its_wrong_numbers(tensor: str, expected: bool) -> None:
    """Of lse an error is as small where one of many keys is left out."""
    mine, found = (
        Finding(claim="so", kind="error", tensor=tensor, relative=relative) for relative in (1.0, 1e-3)
    )
    assert is_in_common(mine, found) == expected
    assert is_in_common(found, mine)
    assert is_in_common(replace(mine, tensor="out", tensors=("out", tensor)), found) is False
    assert is_in_common(mine, replace(found, tensor="out", tensors=("out", tensor)))

"""Cases that held are run once more under a sanitizer, and what that reports is a failure with a smallest case."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strategies.layouts import place
from tests.harness.device.poison import alone
from tests.harness.diagnosis.reruns import SAMPLE, sample
from tests.harness.run import Run, read
from tests.unit.support.drawing import drawn
from tests.unit.support.running import CASE


def test_a_sample_has_the_first_cases_of_a_law_without_huge_strides() -> None:
    cases = [replace(CASE, seed=seed) for seed in range(SAMPLE + 2)]
    huge = replace(CASE, k_layout="huge")
    held = [("forward", case) for case in (huge, *cases, cases[0])] + [("backward", CASE)]
    assert sample(held, "forward") == cases[:SAMPLE]
    assert sample(held, "memory") == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["contiguous", "gap", "offset", "expanded_rows"])
def test_a_tensor_alone_ends_where_its_memory_ends(layout: str, dtype: torch.dtype) -> None:
    for shape in ((2, 3, 5, 8), (1, 1, 0, 8)):
        x = place(drawn("normal", shape, dtype), layout).tensor
        copy = alone(x)
        assert torch.equal(copy, x)
        assert copy.stride() == x.stride()
        ends = copy.storage_offset() + sum(
            (size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)
        )
        assert copy.untyped_storage().nbytes() == (ends + 1) * x.element_size() if x.numel() else True
        assert copy.data_ptr() % 16 == x.data_ptr() % 16 or not x.numel()


def test_a_record_names_its_sanitizer_or_has_none(tmp_path: Path) -> None:
    run = Run("flash_v2", (), "forward", CASE)
    assert "sanitizer" not in run.to_dict()
    path = tmp_path / "case.json"
    path.write_text(json.dumps({**run.to_dict(), "sanitizer": "valgrind"}))
    with pytest.raises(ValueError, match=r"sanitizer: got 'valgrind', expected one of memcheck, racecheck"):
        read(path)

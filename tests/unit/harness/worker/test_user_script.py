"""The program of a process without Flashproof imports functions from files, and knows what callers compare by."""

from pathlib import Path

import pytest
import torch

from tests.harness.worker.user_script import answered, imported, watched


def test_a_file_is_imported_with_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("NUMBER = 3")
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import NUMBER\nattention = [NUMBER]")
    assert imported(str(tmp_path / "mine.py"), "attention") == [3]


def test_a_function_that_takes_the_place_of_another_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = watched()
    assert watched() == before
    monkeypatch.setattr(torch, "allclose", lambda *args: True)
    assert [name for name, x in watched().items() if x is not before[name]] == ["torch.allclose"]


def test_gradients_are_given_where_they_are_asked_for() -> None:
    flat = torch.arange(6.0)
    tensors = dict.fromkeys(("q", "k", "v", "dout"), (flat, (1, 1, 3, 2), (6, 6, 2, 1)))
    call = {**tensors, "options": {"causal": False}, "backward": True}

    def product(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return q * k

    got = answered(product, call, "cpu")
    assert {*got} == {"out", "dq", "dk", "dv"}
    torch.testing.assert_close(got["dq"].flatten(), flat * flat)
    assert not got["dv"].any()
    assert {*answered(product, {**call, "backward": False}, "cpu")} == {"out"}

"""Adapters of public kernels are small and registered, and say what they need where they cannot run."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import registry
from kernels.adapters import bridge
from kernels.registry import PUBLIC, REGISTERED, SpecError, load, unavailable_reason
from tests.harness.files import ROOT

FILES = {path.stem: path for path in (ROOT / "kernels/adapters").glob("*/*.py")}
SHARED = {"__init__", "flex_attention", "known_failures", "masks", "onnx_operator", "sdpa"}
"""Modules of several kernels, and those of kernels that are not public alone."""
ADAPTERS = [name for name in PUBLIC if name not in REGISTERED]
MOST_LINES = 40


def test_every_adapter_is_registered_and_every_name_has_one() -> None:
    assert FILES.keys() - SHARED == set(ADAPTERS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_has_at_most_40_lines(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_says_where_it_has_run(name: str) -> None:
    text = FILES[name].read_text()
    assert re.search(r"It has (not been run yet|run )|where it has run\.", text.split('"""')[1])


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_that_can_run_has_its_registered_name(name: str, device: str) -> None:
    if reason := unavailable_reason(name, device):
        pytest.skip(reason)
    kernel = load(name)
    assert kernel.name == name
    assert kernel.capabilities.min_seqlen <= 2


def test_a_package_that_is_missing_is_what_the_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PUBLIC, "lost", "no-such-package")
    assert unavailable_reason("lost", "cpu") == "needs no-such-package"
    assert registry.package_version("lost") is None


def test_a_package_that_raises_as_it_is_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_gpu(name: str) -> None:
        raise RuntimeError(f"no GPU for {name}")

    monkeypatch.setattr(registry.importlib, "import_module", find_no_gpu)
    told = "cannot be imported: RuntimeError: no GPU for kernels.adapters.pytorch.torch_mha"
    assert unavailable_reason("torch_mha", "cpu") == told


def test_public_kernels_are_tried_only_where_they_are_named() -> None:
    assert not set(ADAPTERS) & set(REGISTERED)
    assert registry.EVERY_PUBLIC not in (*PUBLIC, *REGISTERED)


def test_an_unknown_name_lists_public_kernels_too() -> None:
    with pytest.raises(SpecError, match="did you mean flashinfer"):
        load("flashinfe")


def doubled(q: Any, k: Any) -> tuple[Any, Any]:
    """Stand for a function of another framework, here torch itself: q + 2 k, and the function of its gradients."""
    return q + 2 * k, lambda dout: (dout, 2 * dout)


def test_a_foreign_function_has_its_own_gradients() -> None:
    q, k, dout = (torch.randn(2, 1, 3, 4) for _ in range(3))
    q, k = (x.transpose(2, 3).requires_grad_() for x in (q, k))
    out = bridge.foreign(doubled, torch.from_dlpack, q, k)
    assert torch.equal(out, q + 2 * k)
    dq, dk = torch.autograd.grad(out, (q, k), dout.transpose(2, 3))
    assert torch.equal(dq, dout.transpose(2, 3))
    assert torch.equal(dk, 2 * dq)


def test_a_foreign_function_gets_copies_that_are_contiguous() -> None:
    given: list[Tensor] = []

    def remember(x: Tensor) -> Tensor:
        given.append(x)
        return x

    q = torch.randn(2, 3, 4).transpose(0, 1)
    bridge.foreign(doubled, remember, q, q)
    assert all(x.is_contiguous() and x.data_ptr() != q.data_ptr() and torch.equal(x, q) for x in given)


def test_a_batch_is_packed_as_sequences_of_equal_lengths() -> None:
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 1, 7, 4)
    (rows, keys, _), (starts_q, starts_k, longest_q, longest_k) = bridge.packed(q, k, k)
    assert torch.equal(rows[5:], q[1].transpose(0, 1))
    assert torch.equal(keys[:7], k[0].transpose(0, 1))
    assert starts_q.tolist() == [0, 5, 10]
    assert starts_k.tolist() == [0, 7, 14]
    assert (starts_q.dtype, longest_q, longest_k) == (torch.int32, 5, 7)


def test_sequences_that_are_packed_already_keep_their_lengths() -> None:
    x, starts = torch.randn(1, 2, 5, 4), torch.tensor([0, 2, 5])
    rows, told = bridge.packed(
        x, x, x, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=3, max_seqlen_k=3
    )
    assert rows[0].shape == (5, 2, 4)
    assert told == (starts, starts, 3, 3)

"""What a kernel leaves changed in its process changes nothing of what is drawn, expected or told of other kernels."""

import importlib
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.contract import AttentionKernel
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import TENSORS, Case
from strategies.layouts import bits
from strategies.tensors import tensors
from strategies.values import FAMILIES, fill
from tests.harness.device.process_state import PIECES, Piece, put_back
from tests.harness.law import law_named
from tests.harness.trial.trial import CannotRun, LawBroken, Refused, Trial
from tests.mutation.schedule import Schedule
from tests.panel.test_models import CLAIMS
from tests.unit.support.changing import CHANGES as LEFT

SPECS = (
    "tests.panel.scores:everything",
    "tests.panel.rotated:appended",
    "tests.panel.eight_bits:of_pages",
    "tests.panel.eight_bit_inputs:dequantised",
    "tests.panel.packed:eager",
    "tests.panel.latent:of_one_buffer",
    "tests.panel.masks:eager",
    "tests.panel.documents:eager",
    "tests.panel.parts:split_4",
)
"""Sound functions that claim, all together, whatever laws make tensors for."""
EXAMPLES = 15


def lowered() -> None:
    """Change the process as a kernel for half precision may."""
    torch.set_default_dtype(torch.float16)
    torch.set_float32_matmul_precision("medium")


def raised() -> None:
    """Change the process as a kernel for another device and in double precision may."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)


Change = Callable[[], None]
CHANGES: tuple[Change, ...] = (lowered, raised)


def in_usual_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the same in any state, and has the same gradients.

    It is called in the default dtype and so on. PyTorch computes gradients later: for these its hooks set the precision
    of products, which some CPUs lower to bfloat16.
    """

    def exactly(_: Any = None) -> None:
        torch.set_float32_matmul_precision("highest")

    def called(*args: Any, **options: Any) -> Any:
        with put_back(set()):
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.set_default_device(None)
            exactly()
            results = function(*args, **options)
        for result in results:
            if result.requires_grad:
                result.register_hook(exactly)
        return results

    return called


def found(kernel: AttentionKernel, examples: Sequence[tuple[str, Case]], change: Change) -> list[Any]:
    """Return the bits of the tensors of each example, and how near the kernel is to the bounds of the law."""
    results: list[Any] = []
    for law, case in examples:
        change()
        made = tensors(case, "cpu")
        drawn = [bits(getattr(made, name).tensor).tolist() for name in TENSORS]
        trial = Trial(kernel, case, "cpu", SAFETY)
        try:
            law_named(law)(trial)
            outcome: object = trial.worst
        except (LawBroken, Refused, CannotRun) as e:
            outcome = repr(e)
        results.append((law, case, drawn, outcome))
    return results


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_drawn_and_expected_depends_on_no_state(spec: str) -> None:
    kernel = load(spec, CLAIMS.get(spec, ()))
    kernel = replace(kernel, forward=in_usual_state(kernel.forward))
    examples = list(Schedule(kernel.capabilities, "cpu").examples(1, EXAMPLES))
    usual = found(kernel, examples, lambda: None)
    for change in CHANGES:
        with put_back(set()):
            changed = found(kernel, examples, change)
        for one, other in zip(usual, changed, strict=True):
            assert one == other


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_of_values_is_drawn_alike_in_any_state(family: str, change: Callable[[], None]) -> None:
    def drawn() -> list[Any]:
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        shape, generator = (2, 3, 5, 4), torch.Generator().manual_seed(1)
        return [bits(fill(family, shape, dtype, generator)).tolist() for dtype in dtypes]

    usual = drawn()
    with put_back(set()):
        change()
        assert drawn() == usual


def values() -> list[tuple[Piece, Any]]:
    return [(piece, piece.read()) for piece in PIECES]


@pytest.mark.parametrize("piece", LEFT)
def test_what_is_changed_is_named_and_put_back(piece: str) -> None:
    with put_back(set()):
        LEFT[piece]()  # what it imports is imported here
    before, names = values(), set[str]()
    with put_back(names):
        LEFT[piece]()
    assert names == {piece}
    assert values() == before


def test_inference_mode_is_put_back_with_grad_mode() -> None:
    before, names, mode = values(), set[str](), torch.inference_mode()
    with put_back(names):
        mode.__enter__()
    assert "inference mode" in names
    assert values() == before


def test_newer_flags_of_precision_are_put_back_with_older_ones() -> None:
    before, names = values(), set[str]()
    with put_back(names):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
    assert names == {"the precision of float32 products"}
    assert values() == before


def test_nothing_is_named_where_nothing_is_left_changed() -> None:
    names = set[str]()
    with put_back(names), torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        torch.zeros(2) @ torch.zeros(2)
    assert not names


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    draws = (random.random, np.random.rand, lambda: torch.rand(1).item())
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    with put_back(set()):
        expected = [draw() for draw in draws]
    assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == states
    assert [draw() for draw in draws] == expected


def test_what_an_import_changes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changing_as_it_is_imported.py").write_text(
        "import warnings; warnings.simplefilter('ignore')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = set[str]()
    with warnings.catch_warnings():
        before = [*warnings.filters]
        with put_back(names):
            importlib.import_module("changing_as_it_is_imported")
        assert (names, [*warnings.filters] == before) == (set(), False)


def test_every_piece_of_state_is_changed_by_a_kernel_here() -> None:
    assert {piece.name for piece in PIECES} == {*LEFT, "inference mode"}

"""Laws give a kernel tensors in the layouts that it claims, and in no others, whatever calls they make."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import DTYPES, LAYOUTS, RAGGED_KEYWORDS, AttentionKernel, Capabilities
from kernels.contract.parsing import PLAIN_FUNCTION
from strategies.case import LAYOUT_FIELDS, Case, Spike
from strategies.layouts import REPEATED, can_hold, laid_out, lies_as, place
from tests.harness.law import LAWS, law_named
from tests.harness.trial.trial import Refused, Trial
from tests.panel import appended, documents, eager, packed, packed_paged, paged
from tests.unit.support.sound import CLAIMS, Sound

ANSWERS: Mapping[str, Callable[..., Any]] = {
    "packed": packed.eager,
    "document": documents.eager,
    "cache": lambda q, k, v, *, cache_seqlens, **options: eager.of_filled_parts(
        q, k, v, cache_seqlens, **options
    ),
    "paged": paged.eager,
    "append": appended.in_a_cache,
    "packed_paged": packed_paged.eager,
}
"""A sound function for each kind of calls."""


SOUND = Sound()
"""A sound kernel of plain calls, with a backward of its own."""


class Recorder:
    """A sound kernel that notes which of its arguments lie in another layout than the one that it claims."""

    def __init__(self, layout: str, answer: Callable[..., Any], capabilities: Capabilities) -> None:
        self.layout, self.answer, self.calls = layout, answer, 0
        self.wrong: list[str] = []
        self.kernel = AttentionKernel(
            name="recorder", forward=self.forward, backward=self.backward, capabilities=capabilities
        )

    def note(self, **tensors: Tensor) -> None:
        """Note the tensors of a call that lie in another layout."""
        self.calls += 1
        self.wrong += [
            f"{name} {tuple(x.shape)} has strides {x.stride()} at {x.storage_offset()}"
            for name, x in tensors.items()
            if not lies_as(x, self.layout)
        ]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Answer a call."""
        new = {name: x for name, x in options.items() if name in ("k_new", "v_new")}
        self.note(q=q, k=k, v=v, **new)
        return self.answer(q, k, v, **options)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *stored: Tensor, **options: Any) -> Any:
        """Return the gradients of a plain call, or of packed sequences."""
        self.note(q=q, k=k, v=v, dout=dout)
        if self.answer == SOUND.forward:
            return SOUND.backward(dout, q, k, v, *stored, **options)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, _ = self.answer(*leaves, **options)
        return torch.autograd.grad(out, leaves, dout)


def cases_of(law: str, layout: str, kind: str, capabilities: Capabilities) -> Iterator[Case]:
    """Yield a causal case of each dtype that a law is about: several heads of two sequences, with infinity in v."""
    for seed, dtype in enumerate(DTYPES):
        if law_named(law).applies_to(capabilities, dtype):
            yield Case(
                batch=2,
                heads_kv=2,
                group=2,
                seqlen_q=19,
                seqlen_k=19 if kind == "document" else 33,
                dtype=dtype,
                causal=True,
                sm_scale=-0.5,
                ragged=kind,
                **dict.fromkeys(LAYOUT_FIELDS, layout),  # type: ignore[arg-type]  # each is a str
                seed=seed + 1,
                spikes=(Spike("v", (0, 1, 3, 5), "inf"),) if law == "special" else (),
            )


def checked(recorder: Recorder, law: str, kind: str) -> None:
    """Check a law on some cases, and that each call had tensors in the claimed layout alone."""
    for case in cases_of(law, recorder.layout, kind, recorder.kernel.capabilities):
        try:
            law_named(law)(Trial(recorder.kernel, case, "cpu", 4.0))
        except Refused:
            continue
        assert not recorder.wrong, (case, recorder.wrong)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("law", [law for law in LAWS if law_named(law).is_tried_on("cpu")])
def test_tensors_of_plain_calls_lie_in_the_layout_claimed(law: str, layout: str) -> None:
    if not law_named(law).applies_to(CLAIMS, "float16"):
        pytest.skip("the kernel does not claim what the law is about")
    recorder = Recorder(layout, SOUND.forward, replace(CLAIMS, layouts=(layout,), launch={}))
    checked(recorder, law, "none")
    # What has every head alike can't be asked of most laws, and all that is empty of none.
    assert recorder.calls or layout in REPEATED


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in REPEATED])
@pytest.mark.parametrize("kind", RAGGED_KEYWORDS)
def test_tensors_of_all_other_calls_lie_in_the_layout_claimed(kind: str, layout: str) -> None:
    dense = kind == "document"  # panel functions for documents take plain calls as well
    claims = replace(PLAIN_FUNCTION, layouts=(layout,), ragged=(kind,), dense=dense, head_dims=(16,))
    recorder = Recorder(layout, ANSWERS[kind], claims)
    for law in LAWS:
        checked(recorder, law, kind)
    assert recorder.calls


@pytest.mark.parametrize("layout", REPEATED)
@pytest.mark.parametrize("law", LAWS)
def test_a_cache_that_a_kernel_writes_to_has_memory_of_its_own_for_each_entry(law: str, layout: str) -> None:
    claims = replace(
        PLAIN_FUNCTION, layouts=("bnhd", layout), ragged=("append",), dense=False, head_dims=(16,)
    )

    def answer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if options.get("k_new") is not None:
            assert not {k.stride(), v.stride()} & {place(k, name).tensor.stride() for name in REPEATED}
        return appended.in_a_cache(q, k, v, **options)

    kernel = AttentionKernel(name="writes", forward=answer, backward=None, capabilities=claims)
    for case in cases_of(law, layout, "append", claims):
        with suppress(Refused):
            law_named(law)(Trial(kernel, case, "cpu", 4.0))


def test_a_layout_is_told_from_all_others_with_other_strides() -> None:
    x = torch.randn(2, 3, 5, 16)
    for layout in LAYOUTS:
        tensor = place(x, layout).tensor
        assert [other for other in LAYOUTS if lies_as(tensor, other)] == [layout]


def test_a_tensor_is_copied_only_where_it_lies_in_no_claimed_layout() -> None:
    x = place(torch.randn(2, 3, 5, 16), "bnhd").tensor
    assert laid_out(x, ("gap", "bnhd"), "gap") is x
    moved = laid_out(x, ("contiguous", "gap"), "gap")
    assert moved is not None
    assert lies_as(moved, "gap")
    torch.testing.assert_close(moved, x, rtol=0, atol=0)


def test_an_expanded_layout_holds_only_slices_that_are_alike() -> None:
    x = torch.randn(1, 1, 5, 16)
    assert can_hold(x.expand(2, 3, 5, 16), "expanded")
    assert not can_hold(x.expand(2, 3, 5, 16), "expanded_rows")
    assert laid_out(torch.randn(2, 3, 5, 16), ("expanded",), "expanded") is None

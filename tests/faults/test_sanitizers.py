"""On a GPU, each sanitizer reports what it is made to find, and nothing of a sound kernel."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.registry import unavailable_reason
from strategies.case import Case
from tests.harness.diagnosis.reruns import Watch
from tests.harness.run import SANITIZERS
from tests.harness.running.child import Child
from tests.harness.running.journal import Journal
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.runs import Runs
from tests.harness.running.sanitizers import why_not

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="sanitizers watch a GPU")

CASES = [
    Case(
        dtype="float16",
        batch=batch,
        heads_kv=2,
        group=group,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=64,
        causal=causal,
        k_layout=layout,
        seed=batch,
    )
    for batch, group, seqlen_q, seqlen_k, causal, layout in [
        (1, 1, 64, 64, False, "contiguous"),
        (2, 2, 65, 127, True, "contiguous"),
        (1, 4, 128, 63, True, "bnhd"),
        (1, 1, 1, 300, False, "gap"),
        (3, 1, 200, 129, True, "offset"),
        (1, 2, 17, 33, False, "expanded"),
        (1, 1, 0, 16, False, "contiguous"),
        (2, 1, 257, 255, True, "packed"),
    ]
]
WatchOf = Callable[[str, str], Watch]


@pytest.fixture
def watch_of(tmp_path: Path) -> Iterator[WatchOf]:
    """Yield a function from a sanitizer and a SPEC to the watch; a tool that is not here skips the test."""
    child = Child("cuda:0")

    def make(sanitizer: str, spec: str) -> Watch:
        if reason := why_not(sanitizer, child.device):
            pytest.skip(reason)
        info = KernelInfo.ask(child, spec, ())
        return Watch(sanitizer, Runs(info, child, Journal(tmp_path / "journal.json")))

    yield make
    child.close()


@pytest.mark.parametrize(
    ("sanitizer", "kernel"), [*((each, "flash_v2") for each in SANITIZERS), ("racecheck", "flash_v3_gluon")]
)
def test_nothing_is_reported_of_a_sound_kernel(watch_of: WatchOf, sanitizer: str, kernel: str) -> None:
    if reason := unavailable_reason(kernel, "cuda"):
        pytest.skip(reason)
    watch = watch_of(sanitizer, kernel)
    assert watch.reported("forward", CASES) == []
    assert (watch.told, watch.done) == ([], len(CASES))


@pytest.mark.parametrize(
    ("sanitizer", "name", "told"),
    [
        ("memcheck", "writing_outside", ("Invalid __global__ write", "_write (on_gpu.py:")),
        ("initcheck", "reading_unwritten", ("Uninitialized __global__ memory read", "_copy (on_gpu.py:")),
        ("racecheck", "racing", ("race between", "_exchange (on_gpu.py:")),
        ("triton", "overflowing", ("int32 overflow detected for operation mul in on_gpu.py:",)),
        ("triton", "asserting", ("few keys in on_gpu.py:",)),
    ],
)
def test_what_only_a_sanitizer_sees_is_reported(
    watch_of: WatchOf, sanitizer: str, name: str, told: tuple[str, ...]
) -> None:
    watch = watch_of(sanitizer, f"tests.faults.on_gpu:{name}")
    reports = watch.reported("forward", CASES[:2])
    assert reports, watch.told
    assert all(part in reports[0].what for part in told), reports[0]

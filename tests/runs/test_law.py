"""The child that checks laws imports nothing that draws cases."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies.case import Case
from tests.harness.law import LAWS
from tests.harness.run import Run
from tests.harness.running.child import Child

KERNEL = """
import json, sys
from pathlib import Path
from torch.nn.functional import scaled_dot_product_attention

def attention(q, k, v, *, causal, sm_scale):
    Path(__file__).with_suffix(".json").write_text(json.dumps(list(sys.modules)))
    return scaled_dot_product_attention(q, k, v, scale=sm_scale, is_causal=causal)
"""
"""A kernel that writes down which modules are imported as it is called."""


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child("cpu")
    yield child
    child.close()


def test_every_child_is_free_of_what_only_the_parent_needs(child: Child, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(KERNEL)
    called = [
        x for x in LAWS if x not in ("standalone", "streams")
    ]  # one calls elsewhere, one on a GPU alone
    case = Case(seqlen_q=32, seqlen_k=32, head_dim=32)  # one calls for many elements alone
    for name in called:
        child.run(Run(f"{kernel}:attention", (), name, case), lambda: None)
    modules = json.loads(kernel.with_suffix(".json").read_text())
    assert "torch" in modules
    assert {f"tests.properties.test_{name}" for name in called} <= set(modules)
    # torch._dynamo takes about as long to import as the rest of torch.
    assert not {"pytest", "_pytest", "hypothesis", "rich", "torch._dynamo"} & set(modules)


def test_a_process_without_flashproof_has_none_of_our_modules(child: Child, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(KERNEL)
    told = child.run(Run(f"{kernel}:attention", (), "standalone", Case(seqlen_q=2, seqlen_k=2)), lambda: None)
    assert told.status == "held"
    packages = {name.partition(".")[0] for name in json.loads(kernel.with_suffix(".json").read_text())}
    assert "torch" in packages
    assert not {"pytest", "hypothesis", "tests", "kernels", "strategies", "reference"} & packages

"""The script of a report shows the bug in a process of its own, and exits with 0 once the function is right."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strategies.case import Case
from tests.harness.run import Run
from tests.harness.running import exits
from tests.harness.worker.main import Worker
from tests.panel import eight_bit_inputs, latent
from tests.unit.support import eight_bit_toys, triton_toys
from tests.unit.support.running import exit_status, mended, script_of
from tests.unit.support.toys import sound

LSE = Case(batch=2, heads_kv=3, seqlen_q=70, seqlen_k=66, causal=True)
OF_TWO = Case(batch=2, heads_kv=2, group=2, seqlen_q=5, seqlen_k=70, head_dim=24, dtype="bfloat16")
EIGHT_BITS = replace(OF_TWO, fp8_inputs="qk")
LATENT = replace(OF_TWO, seqlen_q=9, dtype="float32", v_head_dim=16, v_in_k=True, k_layout="bnhd")
RAGGED = Case(batch=3, heads_kv=2, seqlen_q=20, seqlen_k=70, dtype="float16")
ROTATED = Case(seqlen_q=4, seqlen_k=9, dtype="float16", rotary="halves")


def infinite(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Return an lse of +inf for rows that see no key."""
    out, lse = sound(q, k, v, **options)
    return out, lse.masked_fill(lse.isneginf(), math.inf)


def infinite_but_in_the_last_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Return an lse of +inf for rows that see no key, and in the last head one of -inf."""
    (out, lse), (_, other) = (f(q, k, v, **options) for f in (infinite, sound))
    return out, torch.cat([lse[:, :-1], other[:, -1:]], 1)


@pytest.mark.parametrize(
    ("planted", "right", "claims", "law", "case", "shown"),
    [
        (
            f"{__file__}:infinite_but_in_the_last_head",
            f"{__file__}:infinite",
            ("lse_of_no_keys=inf",),
            "forward",
            LSE,
            "",
        ),
        (
            "latent:v_in_k__last_columns",
            "latent:eager",
            latent.CLAIMS,
            "forward",
            LATENT,
            r"v0 = k0\[\.\.\., :",
        ),
        (
            "latent:v_in_k__values_behind_the_end",
            "latent:tiled",
            latent.SERVED,
            "ragged",
            replace(LATENT, ragged="append"),
            r"v0 = k0\[\.\.\., :",
        ),
        (
            "eight_bit_inputs:fp8_inputs__scale_of_head_0",
            "eight_bit_inputs:dequantised",
            eight_bit_inputs.OF_INPUTS,
            "eight_bits",
            EIGHT_BITS,
            r"window\(torch.float8_e4m3fn, ",
        ),
        ("rotated:rotary__dq_not_rotated_back", "rotated:fused", ("rotary=all",), "rotary", ROTATED, ""),
        ("rotated:rotary__q_rotated_in_place", "rotated:fused", ("rotary=all",), "rotary", ROTATED, ""),
        (
            "rotated:rotary__new_keys_not_rotated",
            "rotated:appended",
            ("rotary=all", "ragged=paged,append"),
            "ragged",
            replace(ROTATED, ragged="append"),
            "",
        ),
        (
            "appended:ragged__one_row_cleared_behind",
            "appended:in_a_cache",
            ("ragged=append",),
            "ragged",
            replace(RAGGED, ragged="append", seqlens_k=(40,)),
            "",
        ),
        (
            "documents:ragged__documents_of_the_first_element",
            "documents:eager",
            ("ragged=document",),
            "ragged",
            replace(RAGGED, ragged="document"),
            r"document_ids=torch.tensor\(",
        ),
    ],
    ids=lambda value: value.rpartition(":")[2] if isinstance(value, str) else "",
)
def test_a_script_exits_with_0_once_the_function_is_right(
    planted: str, right: str, claims: tuple[str, ...], law: str, case: Case, shown: str, tmp_path: Path
) -> None:
    """A name without a folder is one of the panel: functions with planted bugs, and right ones."""
    if not planted.startswith("/"):
        planted, right = f"tests.panel.planted_{planted}", f"tests.panel.{right}"
    path = script_of(planted, claims, law, case, tmp_path)
    assert re.search(shown, path.read_text())
    assert exit_status(path, tmp_path) == 1
    assert exit_status(mended(path, planted, right), tmp_path) == 0


@pytest.mark.parametrize("name", ["overwriting", "of_the_dtype_of_q"])
def test_a_script_shows_what_breaks_the_contract(name: str, tmp_path: Path) -> None:
    planted = f"{eight_bit_toys.__file__}:{name}"
    path = script_of(planted, eight_bit_inputs.OF_INPUTS, "eight_bits", EIGHT_BITS, tmp_path)
    assert exit_status(path, tmp_path) == 1


def test_a_script_has_the_table_with_its_rows_apart(tmp_path: Path) -> None:
    planted = "tests.panel.planted_pages:ragged__rows_of_the_table_adjacent"
    path = script_of(planted, ("ragged=paged",), "ragged", replace(RAGGED, ragged="paged"), tmp_path)
    assert re.search(r"block_table=torch.tensor\(.*\).as_strided\(\(3, \d\), \(\d, 1\)\)", path.read_text())
    assert exit_status(path, tmp_path) == 1


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter runs kernels where there is no GPU"
)
def test_a_script_repairs_the_interpreter_by_itself(tmp_path: Path) -> None:
    toys = tmp_path / "toys.py"
    toys.write_text(Path(triton_toys.__file__).read_text())
    case = Case(batch=1, heads_kv=2, seqlen_q=33, seqlen_k=33, head_dim=16, dtype="bfloat16", seed=3)
    run, worker = Run(f"{toys}:attention", (), "forward", case), Worker("cpu")
    finding = worker.attempt(run)[0].finding
    assert finding is not None
    text = worker.do_repro(run.request("repro", finding=asdict(finding), title="", seconds=60.0))["text"]
    assert "from tests" not in text
    assert exits.exit_status(text, 60.0) == 1
    toys.write_text(toys.read_text().replace("MENDED = False", "MENDED = True"))
    assert exits.exit_status(text, 60.0) == 0
    # Without the repair, bit patterns are multiplied.
    assert exits.exit_status(text.replace("\nrepair()\n", "\n"), 60.0) == 1

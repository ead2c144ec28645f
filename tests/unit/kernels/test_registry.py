"""SPECs and claims: which are understood, and the message for each mistake."""

import dataclasses
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels import registry
from kernels.contract import LAYOUTS, OUTPUTS, AttentionKernel, Capabilities
from kernels.contract.parsing import CAPABILITIES, PLAIN_FUNCTION, ClaimError, describe, parse_claims
from kernels.registry import REGISTERED, SpecError, load, unavailable_reason
from reference.mask_pattern import MaskPattern
from strategies.case import Case
from tests.harness.trial.trial import Trial, run_kernel
from tests.unit.support.calling import DEVICE

KERNEL_FILE = """
from helper_beside import ANSWER
from kernels.contract import AttentionKernel, Capabilities

def out_only(q, k, v, *, causal, sm_scale):
    return ANSWER

def with_lse(q, k, v, *, causal, sm_scale):
    return ANSWER, sm_scale

class Model:
    def attend(self, q, k, v, *, causal, sm_scale):
        return ANSWER

class Duck:
    name = "duck"
    capabilities = Capabilities(head_dims=(8,))
    def forward(self, q, k, v, *, causal, sm_scale):
        return ANSWER, None
    def backward(self, dout, q, k, v, out, lse, *, causal, sm_scale):
        return 1, 2, 3

KERNEL = AttentionKernel(name="mine", forward=out_only, capabilities=Capabilities(min_seqlen=7))
DUCK = Duck()
MODEL = Model()
MISLABELLED = AttentionKernel(name="mine", forward=out_only, capabilities={"lse": True})
CONSTANT = 3
"""


@pytest.fixture
def kernel_file(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "helper_beside.py").write_text("ANSWER = 42\n")
    path = tmp_path / "my_kernels.py"
    path.write_text(KERNEL_FILE)
    yield path
    sys.modules.pop("helper_beside", None)


def message_of(spec: str) -> str:
    with pytest.raises(SpecError) as raised:
        load(spec)
    message = str(raised.value)
    assert "\n" not in message
    assert repr(spec) in message
    return message


def test_file_function_is_wrapped_to_return_a_pair(kernel_file: Path) -> None:
    kernel = load(f"{kernel_file}:out_only")
    assert kernel.name == "my_kernels.out_only"
    assert kernel.forward(None, None, None, causal=False, sm_scale=1.0) == (42, None)
    assert kernel.backward is None
    assert kernel.capabilities == PLAIN_FUNCTION


def test_file_function_may_return_lse(kernel_file: Path) -> None:
    assert load(f"{kernel_file}:with_lse").forward(1, 2, 3, causal=True, sm_scale=0.5) == (42, 0.5)


def test_an_attribute_of_an_attribute_is_named_with_a_point(kernel_file: Path) -> None:
    kernel = load(f"{kernel_file}:MODEL.attend")
    assert kernel.name == "my_kernels.MODEL.attend"
    assert kernel.forward(None, None, None, causal=False, sm_scale=1.0) == (42, None)
    assert "no 'MODEL.absent.attend' in" in message_of(f"{kernel_file}:MODEL.absent.attend")


def test_relative_path(kernel_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kernel_file.parent.parent)
    spec = f"{kernel_file.parent.name}{os.sep}my_kernels.py:out_only"
    assert load(spec).forward(None, None, None, causal=False, sm_scale=1.0) == (42, None)


def test_file_is_imported_once_and_leaves_the_path_as_it_was(kernel_file: Path) -> None:
    before = list(sys.path)
    first, second = (load(f"{kernel_file}:KERNEL") for _ in range(2))
    assert first.forward is second.forward
    assert (first.name, first.capabilities.min_seqlen) == ("mine", 7)
    assert sys.path == before


def test_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    for folder, answer in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"def f(q, k, v, *, causal, sm_scale): return {answer}\n")
    answers = [
        load(f"{tmp_path}/{folder}/same.py:f").forward(0, 0, 0, causal=False, sm_scale=1.0)
        for folder in ("a", "b")
    ]
    assert answers == [(1, None), (2, None)]


def test_module_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_package.attention")
    exec("def f(q, k, v, *, causal, sm_scale): return q, k", vars(module))
    monkeypatch.setitem(sys.modules, "some_package", types.ModuleType("some_package"))
    monkeypatch.setitem(sys.modules, "some_package.attention", module)
    kernel = load("some_package.attention:f")
    assert kernel.name == "attention.f"
    assert kernel.forward(1, 2, 3, causal=False, sm_scale=1.0) == (1, 2)


def test_object_with_a_kernels_attributes(kernel_file: Path) -> None:
    kernel = load(f"{kernel_file}:DUCK", ["min_seqlen=3"])
    assert isinstance(kernel, AttentionKernel)
    assert (kernel.name, kernel.capabilities.head_dims, kernel.capabilities.min_seqlen) == ("duck", (8,), 3)
    assert kernel.backward is not None
    assert kernel.backward(0, 0, 0, 0, 0, 0, causal=False, sm_scale=1.0) == (1, 2, 3)


def test_registered_name_with_claims() -> None:
    kernel = load("sdpa_math", ["head_dims=64"])
    assert (kernel.name, kernel.capabilities.head_dims) == ("sdpa_math", (64,))


@pytest.mark.parametrize("name", [name for name in REGISTERED if name != "flash_v2"])
def test_adapters_have_their_registered_names(name: str) -> None:
    assert load(name).name == name


def test_unknown_name_suggests_and_lists() -> None:
    message = message_of("sdpa_mat")
    assert "did you mean sdpa_math" in message
    assert all(name in message for name in REGISTERED)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("", "package.module:attribute"),
        (":", "package.module:attribute"),
        ("flash_v3:", "package.module:attribute"),
        (":KERNEL", "package.module:attribute"),
        ("no such thing", "package.module:attribute"),
        ("/absent/absent.py:f", "no file"),
        ("absent_package.attention:f", "no module 'absent_package'"),
        ("kernels.absent:f", "no module 'kernels.absent'"),
        ("kernels.registry.absent:f", "no module 'kernels.registry.absent'"),
        ("kernel.cu:f-g", "no module 'kernel'"),
        ("folder/kernel:f", "expected a module or the path of a .py file"),
        ("a b:f", "expected a module or the path of a .py file"),
        ("..relative:f", "expected a module or the path of a .py file"),
    ],
)
def test_spec_that_names_nothing(spec: str, told: str) -> None:
    assert told in message_of(spec)


def test_a_failed_import_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('first line\\nsecond line')")
    assert f"importing {path} raised RuntimeError: first line" in message_of(f"{path}:f")
    # This file has another size than the one above, because Python takes one of the same size and second for the same.
    path.write_text("def f(q, k, v, *, causal, sm_scale):\n    return q  # mended\n")
    assert load(f"{path}:f").name == "broken.f"


@pytest.mark.parametrize(
    ("attribute", "told"),
    [
        ("absent", ["no 'absent'", "out_only, with_lse"]),
        ("CONSTANT", ["got int"]),
        ("MISLABELLED", ["expected capabilities of type Capabilities, got dict"]),
    ],
)
def test_attribute_that_is_no_kernel(kernel_file: Path, attribute: str, told: list[str]) -> None:
    message = message_of(f"{kernel_file}:{attribute}")
    assert all(text in message for text in told)
    assert "CONSTANT" not in message.replace(f":{attribute}", "")


def test_missing_attribute_of_a_module_without_functions(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("from math import exp\n")
    assert "no public function" in message_of(f"{tmp_path}/bare.py:f")


@pytest.mark.parametrize(
    ("spec", "device", "reason"),
    [
        ("sdpa_math", "cpu", None),
        ("sdpa_flash", "cpu", None),
        ("sdpa_efficient", "cpu", "CUDA"),
        ("sdpa_cudnn", "cpu", "CUDA"),
        ("flex_attention", "cpu", "backward"),
        ("flex_attention", "cuda", None),
        ("flex_attention", "xpu", "backward"),
        ("sdpa_cudnn", "xpu", "CUDA"),
        ("sdpa_math", "xpu", None),
        ("lost", "cpu", "No module named 'kernels.absent'"),
        ("my_kernels.py:f", "cpu", None),
    ],
)
def test_reasons_why_a_kernel_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, spec: str, device: str, reason: str | None
) -> None:
    monkeypatch.setitem(registry.REGISTERED, "lost", "kernels.absent:KERNEL")
    found = unavailable_reason(spec, device)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("claim", "field", "value"),
    [
        ("dtypes=bfloat16,float16", "dtypes", ("float16", "bfloat16")),
        ("head_dims=64,128", "head_dims", (64, 128)),
        ("head_dims=3-5, 1 ,4", "head_dims", (1, 3, 4, 5)),
        ("grouped_heads=false", "grouped_heads", False),
        ("unequal_lengths=false", "unequal_lengths", False),
        ("min_seqlen=1", "min_seqlen", 1),
        ("seqlen_multiple=64", "seqlen_multiple", 64),
        ("causal=true", "causal", (True,)),
        ("causal=false", "causal", (False,)),
        ("causal=both", "causal", (False, True)),
        ("causal_alignment=top_left", "causal_alignment", "top_left"),
        ("causal_unequal_lengths=false", "causal_unequal_lengths", False),
        ("sm_scale=positive", "sm_scale", "positive"),
        ("layouts=bnhd,contiguous", "layouts", ("contiguous", "bnhd")),
        ("layouts=all", "layouts", LAYOUTS),
        ("key_padding=true", "key_padding", True),
        ("dropout=0.1,0", "dropout", (0.0, 0.1)),
        ("window=0,64-66", "window", (0, 64, 65, 66)),
        ("backward=false", "backward", False),
        ("lse=False", "lse", False),
        ("deterministic=lse,out", "deterministic", ("out", "lse")),
        ("deterministic=all", "deterministic", OUTPUTS),
        ("deterministic=none", "deterministic", ()),
        ("batch_invariant=true", "batch_invariant", True),
        ("may_refuse=false", "may_refuse", False),
    ],
)
def test_claim_overrides_one_field(claim: str, field: str, value: Any) -> None:
    claimed = parse_claims([claim], PLAIN_FUNCTION)
    assert claimed == dataclasses.replace(PLAIN_FUNCTION, **{field: value})
    assert type(getattr(claimed, field)) is type(value)


def test_every_capability_can_be_claimed() -> None:
    fields = {field.name for field in dataclasses.fields(Capabilities)}
    assert set(CAPABILITIES) == fields - {"launch", "arithmetic", "designs", "by_autograd"}


ARITHMETIC_CLAIMS = [
    ("l_from_rounded_p=true", "l_from_rounded_p", True),
    ("k_prescaled=true", "k_prescaled", True),
    ("exp_error=1e-4", "exp_error", 1e-4),
    ("operand_rounding=0.001", "operand_rounding", 0.001),
    ("tile_max=512", "tile_max", 512),
]


@pytest.mark.parametrize(("claim", "field", "value"), ARITHMETIC_CLAIMS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arithmetic_claim_changes_one_field_of_what_is_declared(
    claim: str, field: str, value: Any, device: str
) -> None:
    declared = Capabilities()
    claimed = parse_claims([claim], declared)
    for dtype in claimed.dtypes:
        base = declared.arithmetic(dtype, device, {})
        assert claimed.arithmetic(dtype, device, {}) == dataclasses.replace(base, **{field: value})


@pytest.mark.parametrize(("claim", "field", "value"), ARITHMETIC_CLAIMS)
def test_arithmetic_claim_adds_members_to_the_family_of_a_plain_function(
    claim: str, field: str, value: Any
) -> None:
    claimed = parse_claims([claim], PLAIN_FUNCTION)
    for dtype in claimed.dtypes:
        usual, family = (c.family(dtype, "cuda", {}) for c in (PLAIN_FUNCTION, claimed))
        added = [dataclasses.replace(base, **{field: value}) for base in usual.bases]
        assert family.bases == (*usual.bases, *added)
        assert (family.forward, family.backward) == (usual.forward, usual.backward)


def test_arithmetic_claim_for_one_dtype_alone() -> None:
    claimed = parse_claims(["float16:k_prescaled=true"], PLAIN_FUNCTION)
    assert [base.k_prescaled for base in claimed.family("float16", "cpu", {}).bases] == [False, True]
    assert claimed.family("bfloat16", "cpu", {}) == PLAIN_FUNCTION.family("bfloat16", "cpu", {})


def test_claim_of_what_members_differ_in_keeps_those_that_have_it() -> None:
    family = parse_claims(["delta=probabilities"], PLAIN_FUNCTION).family("float16", "cpu", {})
    assert {way["delta"] for way in family.backward} == {"probabilities"}
    assert family.bases == PLAIN_FUNCTION.family("float16", "cpu", {}).bases


def test_precision_concerns_float32_and_what_is_converted_to_it() -> None:
    tf32, ieee = (
        parse_claims([f"precision={precision}"], Capabilities()).arithmetic for precision in ("tf32", "ieee")
    )
    assert (tf32("float32", "cuda", {}).weights.name, tf32("float32", "cuda", {}).operand_rounding) == (
        "tf32_truncated",
        2.0**-10,
    )
    assert tf32("float32", "cpu", {}) == tf32("float32", "cuda", {})
    assert ieee("float32", "cuda", {}).weights.name == "float32"
    assert tf32("float16", "cuda", {}).weights.name == "tf32_truncated"
    assert tf32("float16", "cuda", {}).operand_rounding == 0.0  # float16 operands keep all of their bits
    assert ieee("float16", "cuda", {}) == Capabilities().arithmetic("float16", "cuda", {})
    assert tf32("bfloat16", "cuda", {}) == Capabilities().arithmetic("bfloat16", "cuda", {})


def test_precision_of_a_plain_function_may_be_emulated_on_the_cpu() -> None:
    bases = parse_claims(["precision=tf32"], PLAIN_FUNCTION).family("float32", "cpu", {}).bases
    assert "tf32_truncated" in [base.weights.name for base in bases]


def test_claims_add_up_and_the_last_of_a_key_holds() -> None:
    claimed = parse_claims(["lse=false", "min_seqlen=1", "lse=true", "exp_error=0.5"], PLAIN_FUNCTION)
    assert (claimed.lse, claimed.min_seqlen) == (True, 1)
    again = parse_claims(["delta=out"], claimed).family("float16", "cpu", {})
    assert [base.exp_error == 0.5 for base in again.bases] == [False, True]


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ("lse", "expected key=value"),
        ("hed_dims=64", "head_dims"),
        ("launch=1", "expected one of"),
        ("weights=float16", "expected one of"),
        ("dtypes=float8", "float16,bfloat16,float32"),
        ("dtypes=", "''"),
        ("head_dims=0", "integers and ranges of at least 1"),
        ("head_dims=8-4", "1-256"),
        ("head_dims=64,x", "64,128"),
        ("head_dims=64,,128", "64,128"),
        ("grouped_heads=maybe", "true or false"),
        ("min_seqlen=-1", "an integer of at least 0"),
        ("min_seqlen=1.5", "an integer of at least 0"),
        ("seqlen_multiple=0", "an integer of at least 1"),
        ("causal=sometimes", "true or false or both"),
        ("causal_alignment=middle", "bottom_right or top_left"),
        ("sm_scale=half", "any, positive, default, or finite numbers"),
        ("layouts=none", "some of contiguous,"),
        ("dropout=1", "got '1', expected probabilities from 0 up to 1"),
        ("deterministic=dp", "all or none, or some of out,lse,dq,dk,dv,dbias"),
        ("precision=fp8", "ieee or tf32"),
        ("delta=dout", "out or probabilities or weights"),
        ("exp_error=nan", "an error"),
        ("exp_error=-1e-3", "an error"),
        ("exp_error=2ulp", "an error"),
        ("tile_min=0", "an integer of at least 1"),
        ("float8:k_prescaled=true", "got dtype 'float8', expected one of float16, bfloat16, float32"),
        ("float16:causal=true", "got 'causal' for one dtype, expected one of precision"),
    ],
)
def test_claim_that_cannot_be_read(claim: str, told: str) -> None:
    with pytest.raises(ClaimError) as raised:
        parse_claims([claim], PLAIN_FUNCTION)
    message = str(raised.value)
    assert "\n" not in message
    assert told in message
    assert all(part in message for part in claim.split("="))


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        (["v_in_k=always"], "claim v_in_k: got always beside backward=true, expected backward=false"),
        (
            ["v_in_k=always", "backward=false", "head_dims=32,64", "v_head_dim=48,64"],
            "claim v_in_k: got always with head_dim 32, expected a v_head_dim of at most that, not 48",
        ),
    ],
)
def test_claims_that_contradict_each_other(claims: list[str], told: str) -> None:
    with pytest.raises(ClaimError, match=told):
        parse_claims(claims, PLAIN_FUNCTION)


def test_load_passes_claim_errors_on() -> None:
    with pytest.raises(ClaimError, match="no key 'color'"):
        load("sdpa_math", ["color=red"])


def test_describe_prints_every_claim_shortly() -> None:
    claimed = dataclasses.replace(
        PLAIN_FUNCTION, head_dims=tuple(range(1, 257)), launch={"block_m": (32, 64), "precision": ("ieee",)}
    )
    lines = describe(claimed, "cuda")
    fields = {field.name for field in dataclasses.fields(Capabilities)} - {
        "arithmetic",
        "designs",
        "by_autograd",
    }
    assert set(lines) == fields | {f"arithmetic {dtype}" for dtype in claimed.dtypes}
    assert all(0 < len(text) <= 120 and "\n" not in text for text in lines.values())
    assert lines["head_dims"] == "1-256"
    assert lines["deterministic"] == "none"
    assert lines["launch"] == "block_m 32 or 64, precision ieee"
    assert lines["arithmetic float16"] == "any design of full precision"
    added = describe(parse_claims(["float16:k_prescaled=true"], claimed), "cuda")
    assert added["arithmetic float16"] == "any design of full precision; or with k_prescaled"
    assert added["arithmetic bfloat16"] == lines["arithmetic bfloat16"]


def test_describe_shows_an_overridden_arithmetic() -> None:
    claimed = parse_claims(["dtypes=float32", "precision=tf32"], Capabilities())
    for device in ("cpu", "cuda"):
        assert "weights tf32_truncated, operand_rounding" in describe(claimed, device)["arithmetic float32"]
    assert "arithmetic float32" not in describe(claimed)


@pytest.mark.parametrize("spec", REGISTERED)
def test_a_claim_is_printed_as_it_is_read(spec: str) -> None:
    try:
        claimed = load(spec).capabilities
    except SpecError:
        pytest.skip(f"{spec} cannot be imported here")
    lines = describe(claimed)
    again = parse_claims([f"{name}={lines[name]}" for name in CAPABILITIES], PLAIN_FUNCTION)
    assert all(getattr(again, name) == getattr(claimed, name) for name in CAPABILITIES)


@pytest.mark.parametrize("spec", REGISTERED)
def test_a_kernel_takes_every_option_that_it_claims(spec: str) -> None:
    """A kernel that is made of another one inherits claims that are added to that one later."""
    if reason := unavailable_reason(spec, DEVICE):
        pytest.skip(reason)
    kernel = load(spec)
    claimed = kernel.capabilities
    case = Case(
        seqlen_q=claimed.seqlen_multiple,
        seqlen_k=claimed.seqlen_multiple,
        head_dim=claimed.head_dims[0],
        dtype=claimed.dtypes[0],
        key_padding="left" if claimed.key_padding else "none",
        dropout_p=max(claimed.dropout),
        **{x.name: max(getattr(claimed, x.name)) for x in dataclasses.fields(MaskPattern)},
        softcap=max(claimed.softcap),
        alibi_slopes=claimed.alibi_slopes,
        bias=claimed.bias[0] if claimed.bias else "none",
        sinks=claimed.sinks,
    )
    run_kernel(kernel, Trial(kernel, case, DEVICE, 0.0).problem, {}, backward=True)

"""The header of a run says how the claims of each kernel differ from the default."""

from dataclasses import replace

from kernels.contract import Capabilities, flash_arithmetic
from kernels.contract.parsing import PLAIN_FUNCTION, describe, parse_claims
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.session.header import all_claims, claims, too_old


def told(capabilities: Capabilities) -> str:
    printed = describe(capabilities, "cpu")
    return claims(KernelInfo("k.py:f", (), "k.f", capabilities, printed), "cpu")


def test_default_claims_are_not_listed() -> None:
    assert told(Capabilities()) == "default claims"
    assert told(PLAIN_FUNCTION) == "default claims of a plain function"


def test_what_differs_is_listed() -> None:
    narrow = replace(PLAIN_FUNCTION, head_dims=(64,), lse=False)
    assert told(narrow) == "default claims of a plain function, but head_dims=64; lse=false"


def test_what_dtypes_have_in_common_in_their_arithmetic_is_told_once() -> None:
    tiled = parse_claims(["tile_max=64"], Capabilities())
    assert told(tiled) == "default claims, but arithmetic=tile_max 64"
    assert (
        told(replace(tiled, dtypes=("float16",)))
        == "default claims, but dtypes=float16; arithmetic=tile_max 64"
    )
    one = parse_claims(["float16:tile_max=64"], Capabilities())
    assert told(one) == "default claims, but arithmetic float16=tile_max 64"


def test_an_old_hypothesis_is_warned_of() -> None:
    assert too_old("6.170.15") == too_old("7.0.1") == []
    assert too_old("6.168.3") == [
        "hypothesis 6.168.3 is older than 6.170: many of its cases repeat parts of others"
    ]


def test_all_claims_are_those_that_are_printed() -> None:
    capabilities = Capabilities(arithmetic=flash_arithmetic)
    printed = describe(capabilities, "cpu")
    assert all_claims(KernelInfo("k.py:f", (), "k.f", capabilities, printed)).count("=") == len(printed)

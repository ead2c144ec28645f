"""Configurations of tuners: how they are named, what several have in common, and where tuners are found."""

import functools
from typing import Any

import pytest
import triton
import triton.language as tl

from kernels.contract import Capabilities
from kernels.contract.parsing import ClaimError, describe, parse_claims
from kernels.contract.tuners import AT_WORK, has, texts, told, wanted
from kernels.tuners import settings_of, tuners_of

NAMES = tuple(
    f"BLOCK_M={m} BLOCK_N={n} num_stages={s}" for m in (32, 64) for n in (32, 64, 128) for s in (2, 3)
)


@triton.autotune([triton.Config({"SIZE": 16}), triton.Config({"SIZE": 32}, num_warps=8)], key=["count"])
@triton.jit
def _below(x, count, SIZE: tl.constexpr):
    pass


@triton.jit
def _plain(x, count, SIZE: tl.constexpr):
    pass


_above = triton.heuristics({"EVEN": lambda args: True})(
    triton.autotune([triton.Config({"SIZE": size}) for size in (16, 32)], key=["count"])(_plain)
)
_single = triton.autotune([triton.Config({"SIZE": 16})], key=["count"])(_plain)
_others = {"first": _above}


class _Function:
    @staticmethod
    def forward(x: Any) -> None:
        _below[(1,)](x, 3)


def _by_class(x: Any) -> None:
    _Function.forward(x)


def _by_table(x: Any) -> None:
    _others["first"][(1,)](x, 3)


def _within(x: Any) -> Any:
    def inner() -> None:
        _below[(1,)](x, 3)

    return inner()


def _of_one_configuration(x: Any) -> None:
    _single[(1,)](x, 3)


def test_configurations_are_named_by_their_parameters() -> None:
    alike = triton.Config({"SIZE": 16}, num_warps=8, num_stages=2, pre_hook=print)
    configs = [triton.Config({"SIZE": 16}, num_warps=8, num_stages=2), alike, triton.Config({}, num_ctas=2)]
    first = "SIZE=16 num_warps=8 num_stages=2"
    assert texts(configs) == (first, f"{first} #2", "num_warps=4 num_stages=3 num_ctas=2")


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (("BLOCK_N=128",), "BLOCK_N 128"),
        (("BLOCK_N=128 num_stages=3",), "BLOCK_N 128, num_stages 3"),
        (("BLOCK_N=64", "BLOCK_N=128"), "BLOCK_N above 32"),
        (("BLOCK_M=32 BLOCK_N=64", "BLOCK_N=128", "BLOCK_M=64 BLOCK_N=32"), "BLOCK_M other than BLOCK_N"),
        (("BLOCK_M=64 BLOCK_N=128 num_stages=3",), "BLOCK_M 64, BLOCK_N 128, num_stages 3"),
    ],
)
def test_what_failing_configurations_have_in_common(fails: tuple[str, ...], words: str) -> None:
    failing = [name for name in NAMES if any(has(name, part) for part in fails)]
    holding = [name for name in NAMES if name not in failing]
    assert told(failing, [*holding]) == words
    left_out = wanted(failing, (*holding, AT_WORK))
    assert [name for name in NAMES if any(has(name, part) for part in left_out)] == failing
    assert not any(has(AT_WORK, part) for part in left_out)


def test_configurations_without_a_rule_are_named() -> None:
    assert told(NAMES[:1] + NAMES[-1:], NAMES[1:-1]) == (
        "BLOCK_M 32, BLOCK_N 32, num_stages 2 or BLOCK_M 64, BLOCK_N 128, num_stages 3"
    )
    assert wanted([AT_WORK], NAMES) == (AT_WORK,)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_by_class, ["_below.config"]),
        (_by_table, ["_plain.config"]),
        (_within, ["_below.config"]),
        (functools.partial(_by_class, x=1), ["_below.config"]),
        (_of_one_configuration, []),
        (settings_of, []),
    ],
)
def test_tuners_are_found_by_names(function: Any, names: list[str]) -> None:
    assert [*tuners_of(function)] == names


def test_claims_name_configurations() -> None:
    claims = Capabilities(launch={"block": (16, 32), **settings_of(tuners_of(_by_class))})
    first, second, at_work = claims.launch["_below.config"]
    assert (first, at_work) == ("SIZE=16 num_warps=4 num_stages=3", AT_WORK)

    def left(*texts: str) -> Any:
        return parse_claims([f"launch.{text}" for text in texts], claims).launch

    assert left("_below.config=SIZE=16")["_below.config"] == (first,)
    assert left("_below.config=not num_warps=8,tuned")["_below.config"] == (first,)
    assert left("_below.config=not SIZE=16", "block=32") == {
        "block": (32,),
        "_below.config": (second, AT_WORK),
    }
    assert describe(claims)["launch"] == "block 16 or 32, _below.config 2 configurations"


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ("launch._below.config=SIZE=64", "got 'SIZE=64', expected some of SIZE=16"),
        ("launch._below.config=not SIZE=16,SIZE=32,tuned", "expected some of"),
        ("launch.block=16", "got launch setting 'block', expected launch._below.config=VALUE"),
        ("launch._below.config", "expected launch._below.config=VALUE"),
    ],
)
def test_a_claim_that_names_none_is_an_error(claim: str, told: str) -> None:
    claims = Capabilities(launch=settings_of(tuners_of(_by_class)))
    with pytest.raises(ClaimError, match=told):
        parse_claims([claim], claims)
    with pytest.raises(ClaimError, match="the kernel has no launch settings"):
        parse_claims([claim], Capabilities())

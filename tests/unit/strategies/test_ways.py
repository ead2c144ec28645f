"""A case has what its way of calling needs, and the way is declared once."""

from dataclasses import replace

import pytest

from kernels.contract import Capabilities
from kernels.contract.parsing import PLAIN_FUNCTION
from strategies.case import SIMPLEST, Case
from strategies.cases import Space
from strategies.ways import WAYS, as_its_way_has_it, ways_of
from tests.harness.law import law_named

ALL = replace(
    PLAIN_FUNCTION,
    bias=("full", "shared"),
    bias_gradient=True,
    sinks=True,
    sinks_gradient=True,
    lse_gradient=True,
)


def test_ways_follow_from_claims() -> None:
    assert ways_of(ALL) == tuple(WAYS)
    assert "vmap" not in ways_of(replace(ALL, layouts=("bnhd",)))
    assert "through_lse" not in ways_of(replace(ALL, lse_gradient=False))
    assert not {name for name in ways_of(replace(ALL, sinks=False)) if WAYS[name].option == "sinks"}
    for claims in (Capabilities(), replace(ALL, backward=False)):
        assert {WAYS[name].by_autograd for name in ways_of(claims)} == {False}


@pytest.mark.parametrize("way", WAYS)
def test_a_case_has_what_its_way_needs(way: str) -> None:
    case = as_its_way_has_it(replace(ALL, backward="causal"), Case(way=way, dtype="float16"))
    assert (case.bias != "none") == (way == "bias_alone")
    assert case.sinks == way.startswith("sinks")
    assert case.causal or not (WAYS[way].by_autograd and WAYS[way].has_gradients)
    assert as_its_way_has_it(ALL, Case()) == Case()


def test_autocast_casts_no_float32_of_a_case() -> None:
    assert as_its_way_has_it(ALL, Case(way="autocast")).way == SIMPLEST["way"]


def test_claims_admit_the_ways_that_are_claimed() -> None:
    for way in WAYS:
        case = replace(as_its_way_has_it(ALL, Case(way=way)), dtype="bfloat16")
        assert ALL.admits(case)
        needs_more = WAYS[way].needs in ("lse_gradient", "sinks_gradient")
        assert replace(ALL, lse_gradient=False, sinks_gradient=False).admits(case) != needs_more


def test_the_law_draws_no_plain_call() -> None:
    space = Space(capabilities=ALL, dtype="float16", **law_named("calls").draws)
    assert space.call_fields == ("way",)
    assert space.values_of_call("way") == tuple(WAYS)

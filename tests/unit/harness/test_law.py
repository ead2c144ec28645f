"""Laws are found as they are declared, each with what other code has to know of it."""

import ast
import math
from dataclasses import replace
from importlib import import_module

import pytest

from kernels.contract import DTYPES, Capabilities, KnownFailure
from strategies.cases import Space
from tests.harness.files import ROOT
from tests.harness.law import LAWS, by_place, law, law_named
from tests.harness.trial.trial import Trial
from tests.mutation.schedule import ROUND


@pytest.mark.parametrize("name", LAWS)
class TestEachLaw:
    def test_is_declared_in_the_file_of_its_name(self, name: str) -> None:
        assert law_named(name).name == name

    def test_says_what_it_states_and_what_it_catches(self, name: str) -> None:
        docstring = import_module(f"tests.properties.test_{name}").__doc__ or ""
        assert docstring.lower().startswith(f"{name}: ")
        assert "Catches" in docstring

    def test_needs_a_claim_that_there_is_and_draws_by_options_that_there_are(self, name: str) -> None:
        declared = law_named(name)
        assert declared.needs in ("", *Capabilities.__dataclass_fields__)
        assert declared.draws.keys() <= Space.__dataclass_fields__.keys()

    def test_sets_and_compares_what_there_is(self, name: str) -> None:
        declared = law_named(name)
        assert {*declared.sets} <= {"numbers", "scores", "lengths"}
        assert {*declared.compares} <= {"repeats", "batch", "calls"}


def test_a_law_applies_where_what_it_needs_is_claimed() -> None:
    assert not law_named("backward").applies_to(Capabilities(backward=False), "float16")
    assert law_named("backward").applies_to(Capabilities(), "float16")
    assert law_named("forward").applies_to(Capabilities(backward=False), "float16")
    eight_bits, claimed = law_named("eight_bits"), Capabilities(fp8_inputs=("qk",))
    assert [dtype for dtype in DTYPES if eight_bits.applies_to(claimed, dtype)] == ["bfloat16"]
    assert not eight_bits.applies_to(Capabilities(), "bfloat16")


def test_known_failures_of_what_a_law_needs_are_its_own() -> None:
    known = KnownFailure(what="", laws=("backward",), case=None, device="cpu", torch=())
    of_sums = law(needs="backward")(dependent)
    assert of_sums.name == "dependent"
    assert of_sums.fails_by(known)
    assert law_named("backward").fails_by(known)
    assert not law()(dependent).fails_by(known)


def dependent(trial: Trial) -> None:
    """Take the place of the check of a law."""


def test_laws_of_which_a_case_takes_longest_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn = sorted(LAWS, key=by_place)
    assert in_turn[:2] == ["forward", "backward"]
    assert in_turn[-1] == max(LAWS, key=lambda name: law_named(name).costs)
    undeclared = replace(law_named("forward"), place=math.inf)
    monkeypatch.setattr("tests.properties.test_forward.forward", undeclared)
    assert sorted(LAWS, key=by_place)[-1] == "forward"


def test_no_list_of_laws_stands_outside_of_the_laws() -> None:
    listing = set()
    for path in (ROOT / "tests/harness").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                named = [x for x in node.elts if isinstance(x, ast.Constant) and x.value in LAWS]
                listing |= {path.name} if len(named) > 1 else set()
    assert listing == {"programs.py"}  # the orders of programs are called forward and backward too


def test_the_schedule_of_mutants_has_every_law_but_three_that_cost_much() -> None:
    assert {*LAWS} - {*ROUND} == {"scale", "standalone", "streams"}

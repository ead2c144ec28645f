"""Every launch setting compiles for every target, fits it, and spills no more than it may."""

from dataclasses import asdict

import pytest

from tests.compile.items import Item
from tests.compile.limits import SPILLS, UNCLAIMED, limits
from tests.compile.resources import Record
from tests.harness.running.child import Child

SECONDS = 240.0
"""The time limit of a forward and a backward on a busy machine; they take some five seconds on an idle one."""


def test_compiles(item: Item, compiler: Child, request: pytest.FixtureRequest) -> None:
    tables = {"spills": limits(SPILLS, item.kernel), "unclaimed": limits(UNCLAIMED, item.kernel)}
    answer = compiler.ask({"do": "compile", "item": asdict(item), **tables}, SECONDS)
    Record(asdict(item), answer["unclaimed"], answer["functions"]).attach(request.node)
    if answer["unclaimed"]:
        pytest.skip(f"{item.kernel} doesn't claim it: {answer['unclaimed']}")
    assert answer["functions"], f"{item}: nothing was launched"
    problems = [f"{f['name']}: {f['problem']}" for f in answer["functions"] if f["problem"]]
    assert not problems, f"{item}: " + "; ".join(problems)

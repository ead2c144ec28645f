"""The cases that an item draws in a run with a seed and a shard."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from strategies.case import Case
from strategies.cases import Space, cases
from strategies.design import Design
from tests.harness.clock import Clock
from tests.harness.session.item import draw_examples
from tests.harness.session.plan import Plan
from tests.harness.session.turns import Turn
from tests.harness.shard import shard_of
from tests.properties.test_forward import forward
from tests.unit.support.drawing import CLAIMS


def drawn(seed: int | None = None, shard: str | None = None) -> list[str]:
    """Return the cases that an item draws in a run with this seed and shard."""
    return list(map(repr, drawn_in_turn(Turn(0, 0, 1.0, last=True, examples=20), seed, shard)))


def drawn_in_turn(turn: Turn, seed: int | None = None, shard: str | None = None) -> list[Case]:
    """Return the cases that a turn draws in a run with this seed and shard."""
    found: list[Case] = []

    def uphold(law: object, case: Case) -> None:
        found.append(case)
        subject.generated += 1

    plan: Any = SimpleNamespace(seed=seed, shard=shard and shard_of(shard), clock=Clock())
    plan.source = Plan.source.fget(plan)  # type: ignore[attr-defined]  # mypy does not know that it is a property
    item: Any = SimpleNamespace(law=forward, turn=turn, plan=plan, nodeid="forward")
    subject: Any = SimpleNamespace(
        generated=0,
        replay=None,
        check=uphold,
        claims=CLAIMS,
        runs=SimpleNamespace(in_turns=nullcontext, device_type="cpu", is_compiled=False),
    )
    subject.cases = lambda **options: cases(CLAIMS, dtype="float16", **options)
    space = Space(capabilities=CLAIMS, dtype="float16", **forward.draws)
    subject.design = lambda law, number, source, variants: Design([space], seed=f"{source} {number}")
    draw_examples(item, subject)
    return found


def common(some: list[str], others: list[str]) -> float:
    """Return the share of cases that are in both lists."""
    return len({*some} & {*others}) / len(some)

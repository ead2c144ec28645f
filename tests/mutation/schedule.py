"""Which cases a mutant is tried on, in which order: those of the property tests, the cheap laws first and oftener.

They depend on the seed and on what the kernel claims, never on what it answers: all mutants of a kernel, and
the kernel itself, get the same ones.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import cases
from strategies.focus import without_huge_strides
from tests.harness.trial import Trial

ROUND = (
    *("forward", "backward") * 3,
    *("special", "exact", "identities", "rejection"),
    *("forward", "backward", "memory", "invariance"),
    *("special", "exact", "identities", "composition"),
    *("forward", "backward", "determinism", "ragged"),
)
"""The laws of a round, one example each. Forward and backward catch most, at a tenth of determinism's cost."""

LAWS = tuple(dict.fromkeys(ROUND))

DRAWN_AT_ONCE = 8
"""As in a run, which has no longer ones of Hypothesis's."""
EVERY = 5
"""Every so manieth example is drawn from all that is claimed, huge strides too, which in a run are the last fifth."""

QUICK = 20
"""A profile of fewer examples is a quick one: a sample of the mutants will do."""
SAMPLE = 3
"""Every so manieth planted bug."""

Law = Callable[[Trial], None]


class Collector:
    """Stands for ``tests.harness.subject.Subject``: keeps the cases that a property test draws."""

    def __init__(self, capabilities: Capabilities, dtype: str, device_type: str) -> None:
        self.capabilities, self.dtype, self.device_type = capabilities, dtype, device_type
        self.collected: list[Case] = []

    def cases(self, **options: Any) -> st.SearchStrategy[Case]:
        """As the subject's."""
        return cases(self.capabilities, dtype=self.dtype, device_type=self.device_type, **options)

    def requires(self, claim: str) -> None:
        """Draw nothing for a law that is about what the kernel does not claim."""
        if not getattr(self.capabilities, claim):
            raise Unclaimed

    def uphold(self, law: Law, case: Case) -> None:
        """Keep the case."""
        self.collected.append(case)


class Unclaimed(Exception):
    """The law does not apply to the kernel."""


def is_quick() -> bool:
    """Whether the Hypothesis profile asks for a glance."""
    return settings().max_examples < QUICK


def module_of(law: str) -> Any:
    """The module of a law's property test."""
    return importlib.import_module(f"tests.properties.test_{law}")


def draw(law: str, collector: Collector, number: int, seed_: object) -> list[Case]:
    """``number`` cases as the law's own test draws them, the same for the same seed; none if unclaimed."""
    test = getattr(module_of(law), f"test_{law}").hypothesis.inner_test

    @seed(seed_)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        test(subject=collector, data=data)

    try:
        run()
    except Unclaimed:
        return []
    return collector.collected


class Schedule:
    """Examples, each a law and a case, for one kernel's claims on one device."""

    def __init__(self, capabilities: Capabilities, device_type: str) -> None:
        self.capabilities, self.device_type = capabilities, device_type
        self._drawn = cache(self._draw)

    def examples(self, seed_: int, limit: int) -> Iterator[tuple[str, Case]]:
        """The first ``limit`` examples of a seed. Each law takes the dtypes in turn."""
        dtypes = self.capabilities.dtypes
        counts: dict[str, int] = {}
        for index in range(limit):
            law = ROUND[index % len(ROUND)]
            count = counts[law] = counts.get(law, -1) + 1
            # Not every law begins with the same dtype.
            dtype = dtypes[(count + ROUND.index(law)) % len(dtypes)]
            of_all, before = divmod(count // len(dtypes), EVERY)
            everything = before == EVERY - 1
            number = of_all if everything else of_all * (EVERY - 1) + before
            chunk, place = divmod(number, DRAWN_AT_ONCE)
            drawn = self._drawn(law, dtype, seed_, chunk, everything)
            if place < len(drawn):
                yield law, drawn[place]

    def _draw(self, law: str, dtype: str, seed_: int, chunk: int, everything: bool) -> list[Case]:
        claims = self.capabilities if everything else without_huge_strides(self.capabilities)
        collector = Collector(claims, dtype, self.device_type)
        drawn = draw(law, collector, DRAWN_AT_ONCE + 1, f"{seed_} {law} {dtype} {chunk} {everything}")
        # A Hypothesis run begins with the same case whatever the seed.
        return drawn[1:]

"""Which cases a mutant is tried on, and in which order: those of the property tests, the cheap laws first and oftener.

The cases depend on the seed and on what the kernel claims, never on what it answers: all mutants of a kernel, and
the kernel itself, get the same ones.
"""

from collections.abc import Iterator
from functools import cache

from hypothesis import HealthCheck, Phase, given, seed, settings

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import cases
from strategies.focus import without_huge_strides
from tests.harness.law import LAWS as ALL_LAWS
from tests.harness.law import Law, law_named

WEIGHED = (
    *("forward", "backward") * 3,
    *("special", "exact", "identities", "rejection"),
    *("forward", "backward", "memory", "invariance"),
    *("special", "exact", "identities", "composition"),
    *("forward", "backward", "determinism", "ragged"),
)
"""Laws by how often each is tried: forward and backward catch most, at a tenth of determinism's cost."""

ROUND = (*WEIGHED, *(law for law in ALL_LAWS if law not in WEIGHED))
"""The laws of a round, one example each. A law that is not weighed is tried once, at the end."""

LAWS = tuple(dict.fromkeys(ROUND))

DRAWN_AT_ONCE = 8
"""Examples drawn by one run of Hypothesis. The suite's own runs of it are no longer."""
EVERY = 5
"""Every fifth example is drawn from all claims, huge strides included; in a run of the suite the last fifth is."""

QUICK = 20
"""A profile of fewer examples than this is a quick one, for which a sample of the mutants is enough."""
SAMPLE = 3
"""A quick run takes every third planted bug."""


def is_quick() -> bool:
    """Whether the Hypothesis profile is a quick one."""
    return settings().max_examples < QUICK


def draw(
    law: Law, capabilities: Capabilities, dtype: str, device_type: str, number: int, seed_: object
) -> list[Case]:
    """``number`` cases as a run draws them for the law, the same for the same seed; none if it does not apply."""
    drawn: list[Case] = []
    if not law.applies_to(capabilities):
        return drawn

    @seed(seed_)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(capabilities, dtype=dtype, device_type=device_type, **law.draws))
    def run(case: Case) -> None:
        drawn.append(case)

    run()
    return drawn


class Schedule:
    """Examples, each a law and a case, for one kernel's claims on one device."""

    def __init__(self, capabilities: Capabilities, device_type: str) -> None:
        self.capabilities, self.device_type = capabilities, device_type
        self._drawn = cache(self._draw)

    def examples(self, seed_: int, limit: int) -> Iterator[tuple[str, Case]]:
        """Yield the first ``limit`` examples of a seed. Each law takes the dtypes in turn."""
        dtypes = self.capabilities.dtypes
        counts: dict[str, int] = {}
        for index in range(limit):
            law = ROUND[index % len(ROUND)]
            count = counts[law] = counts.get(law, -1) + 1
            # Laws begin with different dtypes.
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
        seed_of_chunk = f"{seed_} {law} {dtype} {chunk} {everything}"
        drawn = draw(law_named(law), claims, dtype, self.device_type, DRAWN_AT_ONCE + 1, seed_of_chunk)
        # A Hypothesis run begins with the same case whatever the seed, so that case is left out.
        return drawn[1:]

"""The examples that mutants are tried on, in their order: cases as the property tests draw them, cheap laws more often.

The examples depend on the seed and on the kernel's claims, but not on its answers. So all mutants of a kernel, and the
kernel itself, are tried on the same examples.
"""

from collections.abc import Iterator
from functools import cache

from hypothesis import settings

from kernels.contract import CLAIMS, Capabilities
from strategies.case import Case
from strategies.cases import Space, without_huge_strides
from strategies.design import Design
from tests.harness.law import LAWS as ALL_LAWS
from tests.harness.law import law_named, place_among_laws
from tests.harness.session.subject import AT_ONCE, drawn

WEIGHED = (
    *("forward", "backward") * 3,
    *("special", "exact", "identities", "rejection"),
    *("forward", "backward", "memory", "invariance"),
    *("special", "exact", "identities", "composition"),
    *("forward", "backward", "determinism", "ragged", "rotary"),
)
"""Laws, repeated by how often they are tried: forward and backward catch most, at a tenth of determinism's cost."""

ROUND = (*WEIGHED, *(law for law in ALL_LAWS if law not in WEIGHED and law_named(law).costs == 1))
"""The laws of one round, with an example for each entry. A law that ``WEIGHED`` lacks is tried once, at the end. Laws
that cost much are left out: those of large sizes, those of GPUs alone, and that which starts a process for a kernel."""

LAWS = tuple(dict.fromkeys(ROUND))

FIRST = 2
"""Cases of a Hypothesis run that are drawn at first, and are enough for most laws and dtypes of a short schedule.

The first cases of a run are the same, however many follow.
"""

EVERY = 5
"""Every fifth example may have huge strides. A run of the property tests draws these in its last fifth instead."""

QUICK = 20
"""A Hypothesis profile of fewer examples than this is quick: only a sample of the mutants is tried."""
SAMPLE = 5
"""A quick run takes every fifth planted bug."""


def is_quick() -> bool:
    """Whether the Hypothesis profile is a quick one."""
    return settings().max_examples < QUICK


class Schedule:
    """Draws examples, each a law and a case, for the claims of one kernel on one device."""

    def __init__(self, capabilities: Capabilities, device_type: str) -> None:
        self.capabilities, self.device_type = capabilities, device_type
        self.round = tuple(law for law in ROUND for _ in range(self._kinds_of(law)))
        self._drawn = cache(self._draw)
        self._design = cache(self._make_design)

    def _kinds_of(self, law: str) -> int:
        """Return how many kinds of calls that are claimed a law makes; each example has one of them.

        Ways of calling are no such kinds: they are many, and few mutants depend on them.
        """
        claimed = (name for name in law_named(law).draws.get("calls", ()) if name in CLAIMS)
        return max([1, *(len(getattr(self.capabilities, name)) for name in [*claimed][:1])])

    def examples(self, seed_: int, limit: int) -> Iterator[tuple[str, Case]]:
        """Yield the first ``limit`` examples of a seed. Successive examples of one law have successive dtypes."""
        dtypes = self.capabilities.dtypes
        counts: dict[str, int] = {}
        for index in range(limit):
            law = self.round[index % len(self.round)]
            count = counts[law] = counts.get(law, -1) + 1
            # Different laws begin with different dtypes.
            dtype = dtypes[(count + ROUND.index(law)) % len(dtypes)]
            of_all, before = divmod(count // len(dtypes), EVERY)
            everything = before == EVERY - 1
            number = of_all if everything else of_all * (EVERY - 1) + before
            chunk, place = divmod(number, AT_ONCE)
            found = self._drawn(law, dtype, seed_, chunk, everything, FIRST if place < FIRST else AT_ONCE)
            if place < len(found):
                case = found[place]
                yield law, case if everything else self._design(law, seed_).steered(number, case)

    def _space(self, claims: Capabilities, law: str, dtype: str) -> Space:
        return Space(capabilities=claims, dtype=dtype, device_type=self.device_type, **law_named(law).draws)

    def _make_design(self, law: str, seed_: int) -> Design:
        of_law = law_named(law)
        spaces = [
            self._space(self.capabilities, law, dtype)
            for dtype in self.capabilities.dtypes
            if of_law.applies_to(self.capabilities, dtype)
        ]
        first = place_among_laws(of_law) * len(spaces)
        return Design(spaces, numbers="numbers" not in of_law.sets, seed=f"{seed_} {law}", first=first)

    def _draw(
        self, law: str, dtype: str, seed_: int, chunk: int, everything: bool, number: int
    ) -> list[Case]:
        claims = self.capabilities if everything else without_huge_strides(self.capabilities)
        if not law_named(law).applies_to(self.capabilities, dtype):
            return []
        seed_of_chunk = f"{seed_} {law} {dtype} {chunk} {everything}"
        return drawn(self._space(claims, law, dtype).strategy(), seed_of_chunk, number)

"""Turns: every law at every dtype of every kernel gets a few examples first, and twice as many in each later round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kernels.contract import Capabilities
from strategies.focus import Focus, focused, without_huge_strides

FEWEST = 3
"""A turn in the first round has at least this many examples."""
FIRST_ROUND_SECONDS = 45.0
"""The first round of a run that ends by the clock takes about so long, for a table to stand after a minute."""
ITEM_SECONDS = 0.5
"""In the first round each law at each dtype gets this long, though later rounds then start later."""
LAST_ROUND = 0.2
"""The share of the last round, in which huge strides are drawn too: they end many a process."""

CHEAP_FIRST = (
    "forward",
    "backward",
    "special",
    "exact",
    "rejection",
    "identities",
    "composition",
    "ragged",
    "memory",
    "invariance",
    "determinism",
)
"""The order of the laws in a round. What a law costs is the number of calls that it makes."""


@dataclass(frozen=True)
class Turn:
    """One turn of a law at one dtype of a kernel: a Hypothesis run of its own.

    ``number`` tells it from the other turns of its law and dtype, and ``round`` says how wide it draws. It has at
    most ``examples``, None where only the clock ends it; ``weight`` is its share of the time beside other turns.
    In the ``last`` round all that is claimed is drawn.
    """

    number: int
    round: int
    weight: float
    last: bool
    examples: int | None = None

    def focus(self, capabilities: Capabilities, device_type: str, seed: object) -> Focus:
        """What the turn draws from: on a GPU few compiled variants, more in each round, other ones for each number.

        An interpreter compiles nothing, so there every turn draws from all claims but huge strides.
        """
        if self.last:
            return Focus(capabilities)
        without = without_huge_strides(capabilities)
        if device_type == "cpu":
            return Focus(without)
        return focused(without, self.round, Random(f"{seed} {self.number}"))


def turns_of_examples(examples: int) -> tuple[Turn, ...]:
    """Turns that have so many examples together, each twice as many as the one before, and a last one."""
    weights = _weights(int(math.log2((1 - LAST_ROUND) * examples / FEWEST + 1)))
    ends = [round(examples * sum(weights[: i + 1])) for i in range(len(weights))]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        Turn(i, i, weight=size, last=i == len(sizes) - 1, examples=size) for i, size in enumerate(sizes)
    )


def turns_of_seconds(seconds: float, workers: int, items: int) -> tuple[Turn, ...]:
    """Turns of a run that ends by the clock: in each round one for each worker.

    ``items`` are the combinations of a kernel, a law and a dtype, all of which take part in each round.
    """
    first_round = max(FIRST_ROUND_SECONDS, ITEM_SECONDS * items)
    weights = _weights(round(math.log2((1 - LAST_ROUND) * seconds / first_round + 1)))
    return tuple(
        Turn(round_ * workers + worker, round_, weight, last=round_ == len(weights) - 1)
        for round_, weight in enumerate(weights)
        for worker in range(workers)
    )


def _weights(doubling: int) -> list[float]:
    """Shares of rounds that add up to 1: each is twice the one before, but for the last. With no round to double, 1."""
    if doubling < 1:
        return [1.0]
    total = 2**doubling - 1
    return [*((1 - LAST_ROUND) * 2**i / total for i in range(doubling)), LAST_ROUND]


def rank(law: str) -> int:
    """The place of a law in a round; one that is not listed comes last."""
    return CHEAP_FIRST.index(law) if law in CHEAP_FIRST else len(CHEAP_FIRST)


def seconds_for(
    place: int, weights: Sequence[float], left: float, workers: int, patience: float = 1.0
) -> float:
    """How long the turn at ``place`` may take, of the seconds ``left`` to it and to those that follow.

    ``workers`` share the turns out among them in their order. With ``patience`` a turn may take so many times its
    share, as those that follow share what is left then.
    """
    return min(left, patience * left * workers * weights[place] / sum(weights[place:]))

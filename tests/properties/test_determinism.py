"""Determinism: an answer depends on nothing but the question.

Four pairs of calls are compared: the same call before and after a call of another shape; a batch element among others
and alone; one launch setting and another; a dout that the kernel itself has written and a copy of it. They must have
the same bits if that is claimed, else the same answer up to rounding. Catches state kept between calls, races that show
in one process, scratch memory reused too early, launch settings that break.

A fifth pair shows races of Triton kernels without a GPU, where the programs of a launch run in any order that is asked
for: one after the other by their numbers, and from the last one to the first. A GPU promises neither.
"""

from dataclasses import replace

from tests.harness.interpreter.programs import BACKWARD, FORWARD
from tests.harness.law import law
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.relate import (
    ALONE,
    Allowed,
    Derived,
    agree,
    allowances,
    asked,
    claimed_length,
    lies_in_claimed_layout,
    of_a_repeat,
    twice,
)
from tests.harness.trial.trial import Trial

MOST_IN_TURN = 32
"""Programs of a launch that are run one after the other: that takes as many times as long as running them at once.

Programs of small launches race for the same places as those of large ones do.
"""


@law(
    on_device=True,
    key_padding=True,
    dropout=True,
    variants=True,
    kinds=True,
    place=13,
    stands_alone=True,
    compares=("repeats", "batch"),
)
def determinism(trial: Trial) -> None:
    """Compare the pairs of calls."""
    p = trial.problem
    first = trial.gradients()
    allowed = allowances(trial, p, gradients=first.dq is not None)
    if (other := another_shape(trial, p)) is not None:
        trial.gradients(other)
    repeated = of_a_repeat(trial, allowed)
    again = trial.gradients()
    agree(trial, "the same call gives the same {}", again, first, repeated)
    if 1 < first.programs <= MOST_IN_TURN:
        from_first, from_last = (trial.gradients(order=order) for order in (FORWARD, BACKWARD))
        claim = "the same call gives the same {} if the last program of each launch runs first"
        agree(trial, claim, from_last, from_first, repeated)
    alone(trial, p, first, allowed)
    relaunched(trial, p, first, allowed)
    if first.dq is not None and lies_in_claimed_layout(trial, first.out):
        fed_back(trial, replace(p, dout=first.out))


def another_shape(trial: Trial, p: Problem) -> Problem | None:
    """Return a claimed problem with about half of the queries, or of the keys of a single query, or of both."""
    c, rows, keys = trial.kernel.capabilities, p.q.shape[2], p.k.shape[2]

    def half(length: int) -> int:
        return max(c.length_from(1), claimed_length(trial, length // 2))

    if not c.may_differ(causal=p.causal):
        fewer = half(rows), half(rows)
    else:
        fewer = (half(rows), keys) if rows > 1 else (rows, half(keys))
    return asked(trial, p.with_rows(slice(fewer[0])).with_keys(slice(fewer[1])))


def alone(trial: Trial, p: Problem, first: Outputs, allowed: Allowed) -> None:
    """Compare the last batch element with a call for it alone, but not under dropout, which depends on its place."""
    if p.q.shape[0] < 2 or p.dropout_p:
        return
    if (last := asked(trial, p.with_batch(slice(-1, None)))) is None:
        return
    got = trial.gradients(last)
    # A sum over the batch, as dbias may be, has one element for all.
    outputs = {name: x for name, x in first.named().items() if len(x) == len(p.q)}
    expected = Derived(
        first.call, {name: x[-1:] for name, x in outputs.items()}, {name: f"{name}[-1:]" for name in outputs}
    )
    bound = twice(lambda: {name: allowed()[name][-1:] for name in outputs})
    agree(trial, ALONE, got, expected, bound, exactly=True)


def relaunched(trial: Trial, p: Problem, first: Outputs, allowed: Allowed) -> None:
    """Compare with a call in which each launch setting has its next declared value; roundings may differ.

    Settings that decide how inputs are quantised stay as they are, because other numbers have another answer.
    """
    declared = trial.kernel.capabilities.launch
    if not declared:
        return
    other = trial
    for name, values in declared.items():
        at = values.index(trial.launch[name]) if trial.launch.get(name) in values else 0
        moved = trial.with_launch({**other.launch, name: values[(at + 1) % len(values)]})
        if moved.arithmetic.quantisation == trial.arithmetic.quantisation:
            other = moved
    bound = twice(allowed, allowances(other, p, gradients=first.dq is not None))
    agree(other, "another launch setting gives the same {}", other.gradients(p), first, bound)


def fed_back(trial: Trial, p: Problem) -> None:
    """Compare a call whose dout is a tensor that the kernel itself wrote with a call whose dout is a copy of it."""
    written = trial.gradients(p)
    copied = trial.gradients(replace(p, dout=p.dout.clone()))
    bound = of_a_repeat(trial, allowances(trial, p, gradients=True))
    agree(trial, "a dout that the kernel itself wrote gives the {} of its copy", written, copied, bound)

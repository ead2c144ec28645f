"""Identities: equations between inputs and outputs that need no reference, so they hold at any length.

Rows of dS sum to 0, so sum_j dk_j = 0; sum_j dv_j = sum_i dout_i over rows that see a key; <dq, q> = <dk, k> for each
key head and its group; v = 1 gives out = 1; each row of out lies between the smallest and the largest rows of v.
Catches dropped or repeated keys, a delta that is slightly off, and wrong normalisation, at lengths where a reference
would be too slow, which no other law on gradients draws.
"""

import torch
from torch import Tensor

from reference.bounds.identities import Sizes, hull_bound, ones_bound, sizes, sums_bounds
from reference.heads import fold, unfold
from tests.harness.law import law
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.relate import asked, settled
from tests.harness.trial.trial import Check, Trial

LONGEST = 4096
MOST_SCORES = 2**26
"""The most scores of a case. There is no reference to wait for, so this is only to limit the time of the kernel."""


@law(max_seqlen=LONGEST, max_scores=MOST_SCORES, place=6, compares=("calls",))
def identities(trial: Trial) -> None:
    """Check all identities on one problem."""
    trial = settled(trial)
    p = trial.problem
    if 0 in p.q.shape or 0 in p.k.shape:
        return  # every sum is over nothing
    s = sizes_of(trial, p)
    if not s.safe:
        return  # float32 may overflow, of which the laws forward and special judge the results
    got = trial.gradients(p)
    checks = hull(trial, s, got)
    if s.known and got.dq is not None and got.dk is not None and got.dv is not None:
        checks += sums_of_gradients(trial, p, s, got, got.dq, got.dk, got.dv)
    trial.hold(checks + ones(trial, p, s))


def sizes_of(trial: Trial, p: Problem) -> Sizes:
    """Return what the bounds of the identities are computed from."""
    return sizes(
        p.q,
        p.k,
        p.v,
        p.dout,
        trial.arithmetic,
        causal=p.causal,
        sm_scale=p.sm_scale,
        alignment=trial.alignment,
        gradients=trial.kernel.capabilities.gives_gradients(causal=p.causal),
    )


def hull(trial: Trial, s: Sizes, got: Outputs) -> list[Check]:
    """Return the check that each entry of out lies between the smallest and the largest entry of its column of v."""
    out = fold(got.out, s.k.shape[1]).double()
    low, high = s.v.amin(-2, keepdim=True), s.v.amax(-2, keepdim=True)
    low, high = (torch.where(s.live[:, None], x, 0.0) for x in (low, high))
    nearest = torch.minimum(torch.maximum(out, low), high)
    nearest = unfold(torch.where(out.isnan(), low, nearest), trial.case.heads_q)
    bound = unfold(hull_bound(s, trial.arithmetic).expand_as(out), trial.case.heads_q)
    group, live = trial.problem.heads_q // trial.problem.heads_kv, s.live[: got.out.shape[2]].long().tolist()
    each = f"x.repeat_interleave({group}, 1) * torch.tensor({live}).to(x)[:, None]"
    ends = f"({each} for x in v.double().aminmax(dim=-2, keepdim=True))"
    return [
        Check(
            claim="out lies in the hull of v",
            tensor="out",
            actual=got.out,
            other_expression=f"out.double().nan_to_num(0.0).clamp(*{ends})",
            expected=nearest,
            bound=bound,
            maximum=trial.arithmetic.output.maximum,
            call=got.call,
            other=got.call,
        )
    ]


def ones(trial: Trial, p: Problem, s: Sizes) -> list[Check]:
    """Return the check that v = 1 gives out = 1 in rows that see a key, also if k is then 1 in these columns."""
    given = asked(trial, p.with_values(torch.ones_like(p.v)))
    if given is None or (given.v_in_k and not (s := sizes_of(trial, given)).safe):
        return []
    got = trial.forward(given)
    expected = s.live[: p.q.shape[2], None].double().expand_as(got.out)
    bound = ones_bound(s, trial.arithmetic).expand(*s.score.shape, 1)
    allowed = unfold(bound, p.heads_q).expand_as(expected)
    return [Check("v = 1 gives out = 1", "out", got.out, expected, allowed, call=got.call)]


def sums_of_gradients(
    trial: Trial, p: Problem, s: Sizes, got: Outputs, dq: Tensor, dk: Tensor, dv: Tensor
) -> list[Check]:
    """Return the checks of three sums: of dk over keys, of dv over keys, and of the products dq q and dk k."""
    dq, dk, dv = fold(dq, p.heads_kv).double(), dk.double(), dv.double()
    dk_bound, dv_bound, pair_bound = sums_bounds(s, trial.arithmetic, dq, dk, dv)
    return [
        Check(
            claim="rows of dS sum to 0, so the sum of dk over keys is 0",
            tensor="dk",
            expression="dk.double().sum(-2)",
            actual=dk.sum(-2),
            expected=torch.zeros_like(dk_bound),
            bound=dk_bound,
            call=got.call,
        ),
        Check(
            claim="the sum of dv over keys is the sum of dout over rows that see a key",
            tensor="dv",
            expression="dv.double().sum(-2)",
            actual=dv.sum(-2),
            expected=(s.dout * s.live[:, None]).sum(-2),
            bound=dv_bound,
            call=got.call,
        ),
        Check(
            claim="<dq, q> = <dk, k> for each key head and its group",
            tensor="dq",
            expression="(dq.double() * q.double()).sum((-2, -1)).unflatten(1, (k.shape[1], -1)).sum(-1)",
            actual=(dq * s.q).sum((-2, -1)),
            other_expression="(dk.double() * k.double()).sum((-2, -1))",
            expected=(dk * s.k).sum((-2, -1)),
            bound=pair_bound,
            call=got.call,
            other=got.call,
        ),
    ]

"""Special: NaN and infinity reach exactly the rows they should; empty rows have fixed answers.

NaN in q spoils its row; NaN in k every row that sees the key; NaN or infinity in v its column in every row
that sees it with weight; a score of +inf spoils its row, a score of -inf is a key of weight 0. A row that
sees a score of NaN has no dq, and the keys that it sees have no dk and dv. Rows that don't
see the key, other heads and other batch elements keep the answer they have without it; only a value masked
from a row may leak into it through 0 * NaN inside a tile, so that is left open, and so is what q and k
do where sm_scale is 0, because BLAS leaves out a product that is multiplied by 0. With the claim ``nonfinite=seen`` a
masked score may leak as well, which is noted. Catches NaN turned to 0, -inf replaced by a finite sentinel, masks that
leak, state shared between heads.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.bounds.answers import leftover
from reference.heads import fold, unfold
from reference.masks import visible
from tests.harness.law import law
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.relate import agree, allowances, asked, twice, with_v_apart
from tests.harness.trial.trial import Check, LawBroken, Trial
from tests.harness.verdict import Finding

UNREACHED = "{} of what sees neither NaN nor infinity is as it is without them"
"""What is claimed of rows that NaN and infinity must not reach."""

LEAK = (
    "NaN or infinity behind a mask reached rows that do not see it in {}: no bug as it is claimed;"
    " --claims nonfinite=strict asks for more"
)
"""What is noted of a kernel that may let masked scores leak."""

HEAVY = 1e-3
"""The smallest weight at which NaN or infinity in v must show in out; no arithmetic rounds it to 0."""


@law(needs="nonfinite", nonfinite=True, patterns=True, kinds=True, place=3, sets=("numbers",))
def special(trial: Trial) -> None:
    """Check the rows that see no NaN or infinity, those that do, and the weight of a score of -inf."""
    p = trial.problem
    got = trial.gradients()
    if 0 in p.q.shape or 0 in p.k.shape:
        return  # there are no scores
    scores = scores_of(trial, p)
    try:
        unreached(trial, got, scores)
    except LawBroken as made:
        raise LawBroken(with_lost(made.finding, trial, got, scores)) from None
    reached(trial, got, scores)
    weightless(trial, scores)


@dataclass(frozen=True)
class Scores:
    """The scores of a problem, (B, H, R, N): H key heads, R rows of all query heads of a group, N keys.

    Attributes:
        value: the scores in float64, with NaN and infinities as exact arithmetic has them.
        seen: bool, whether the row sees the key.
        bad: bool (B, H, R, 1), whether the row sees a score of NaN or +inf.
        hidden: bool, whether the row sees the key and its score is -inf, so that its weight is 0.
        leaky: bool (B, H, R, 1), whether a score that a mask hides from the row is NaN or infinite.
    """

    value: Tensor
    seen: Tensor
    bad: Tensor
    hidden: Tensor
    leaky: Tensor


def scores_of(trial: Trial, p: Problem) -> Scores:
    """Compute the scores of a problem."""
    value = fold(p.q, p.heads_kv).double() @ p.k.double().mT * p.sm_scale
    group = p.heads_q // p.heads_kv
    seen = visible(
        *(p.q.shape[2], p.k.shape[2], p.causal, trial.alignment, p.q.device), group=group, pattern=p.pattern
    )
    seen = torch.ones_like(value, dtype=torch.bool) if seen is None else seen.expand_as(value)
    bad = ((value.isnan() | value.isposinf()) & seen).any(-1, keepdim=True)
    leaky = (~value.isfinite() & ~seen).any(-1, keepdim=True)
    leaky = leaky | beside(trial, (~p.k.isfinite()).flatten(2).any(-1)[..., None, None])
    return Scores(value, seen, bad, value.isneginf() & seen, leaky)


def beside(trial: Trial, x: Tensor) -> Tensor:
    """Return for each sequence whether x (batch, ...), which is bool, is True for another one in the same call.

    That counts if they are packed end to end: a mask then hides each from the others, as it hides keys from rows.
    """
    return x.sum(0, keepdim=True) > x.long() if trial.case.ragged == "packed" else torch.zeros_like(x)


def unreached(trial: Trial, got: Outputs, s: Scores) -> None:
    """Check that rows and columns that see neither NaN nor infinity have the same answer as without them.

    If the kernel may let masked scores leak, the rows that these may reach are not judged, and it is noted whether they
    are reached.
    """
    p = trial.problem
    finite = asked(trial, replace(p.with_both(without_nan), q=without_nan(p.q)))
    if finite is None:
        return
    touching = torch.ones_like(s.seen).double() @ (~p.v.isfinite()).double() > 0
    clean = ~(s.bad | s.hidden.any(-1, keepdim=True) | touching | beside(trial, touching))
    if not bool(clean.any()):
        return
    allowed, expected = twice(allowances(trial, finite, gradients=False)), trial.forward(finite)

    def agree_in(judging: Trial, rows: Tensor) -> None:
        """Compare ``rows`` of out, and those of lse of which all columns are compared."""
        of_out = unfold(rows, p.heads_q)
        of_both = {"out": of_out, "lse": of_out.all(-1)}
        agree(
            judging,
            UNREACHED,
            got,
            expected,
            lambda: {name: allowed()[name].masked_fill(~x, torch.inf) for name, x in of_both.items()},
        )

    if trial.kernel.capabilities.hides_all:
        agree_in(trial, clean)
        return
    agree_in(trial, clean & ~s.leaky)
    behind = clean & s.leaky
    if bool(behind.any()):
        try:
            agree_in(trial.replayed(trial.family), behind)
            shows = False
        except LawBroken:
            shows = True
        trial.note(LEAK, shows=shows)


def without_nan(x: Tensor) -> Tensor:
    """Return a tensor with 0 in place of NaN and infinity."""
    return x.nan_to_num(0.0, 0.0, 0.0)


def reached(trial: Trial, got: Outputs, s: Scores) -> None:
    """Check that no result is finite that depends on a bad score, or on NaN or infinity in v with a weight."""
    p = trial.problem
    usable = s.value.masked_fill(~s.seen | ~s.value.isfinite(), -torch.inf)
    weight = torch.softmax(usable, -1).nan_to_num(nan=0.0)
    heavy = (weight > HEAVY).double() @ (~p.v.isfinite()).double() > 0
    # BLAS does not compute a product that it multiplies by 0, so it is open whether NaN shows in the scores then.
    bad = s.bad & (p.sm_scale != 0)
    # Arithmetics differ in what a score of +inf does to the gradients of a row, so only NaN counts for these.
    nan = (s.value.isnan() & s.seen).any(-1, keepdim=True) & bad
    # They also differ in a score of -inf, which some treat as masked, with weight 0 whatever else is in the row.
    of_keys = (s.seen & ~s.hidden & nan).any(-2)[..., None]
    spoiled = {
        "out": unfold(bad | heavy, p.heads_q),
        "dq": unfold(nan, p.heads_q),
        "dk": of_keys,
        "dv": of_keys,
    }
    for name, value in got.named().items():
        if name not in spoiled:
            continue
        kept = spoiled[name] & value.isfinite()
        if bool(kept.any()):
            at = tuple(int(i) for i in kept.nonzero()[0])
            trial.fail(
                f"NaN or infinity among what a row sees reaches its {name}",
                kind="nonfinite",
                of_nan=("lost",),
                tensor=name,
                index=at,
                expected="nan",
                actual=float(value[at]),
                allowed=0.0,
                ratio="inf",
                wrong=int(kept.sum()),
                total=kept.numel(),
                call=got.call,
            )


def with_lost(finding: Finding, trial: Trial, got: Outputs, scores: Scores) -> Finding:
    """Return the finding, told to be of NaN that moved if NaN is missing elsewhere in a tensor where it is too many."""
    try:
        reached(trial, got, scores)
    except LawBroken as lost:
        return finding.with_nan_of(lost.finding) if lost.finding.tensor in finding.tensors else finding
    return finding


def weightless(trial: Trial, s: Scores) -> None:
    """Check that keys whose score is -inf weigh nothing: if v is 1 at these and 0 elsewhere, out is 0.

    This holds in rows that also see keys with other scores. A kernel whose v is always the first columns of k is not
    asked, because other values would give other scores.
    """
    if trial.arithmetic.quantisation is not None:
        return  # quantisation turns infinity into NaN
    p = with_v_apart(trial, trial.problem)
    if p.v_in_k:
        return
    marked = s.hidden.any(-2, keepdim=True)
    others = s.seen & ~s.hidden
    rows = s.hidden.any(-1, keepdim=True) & others.any(-1, keepdim=True)
    rows = rows & ~(others & marked).any(-1, keepdim=True) & ~s.bad
    if not trial.kernel.capabilities.hides_all:
        rows = rows & ~s.leaky
    if not bool(rows.any()):
        return
    v = marked.mT.to(p.v.dtype).expand(p.v.shape).contiguous()
    if (given := asked(trial, replace(p, v=v))) is None:
        return
    got = trial.forward(given)
    bound = torch.full(got.out.shape, leftover(p.k.shape[2]), dtype=torch.float64, device=got.out.device)
    bound = bound.masked_fill(~unfold(rows, p.heads_q), torch.inf)
    claim = "a key whose score is -inf has weight 0"
    trial.hold([Check(claim, "out", got.out, torch.zeros_like(bound), bound, call=got.call)])

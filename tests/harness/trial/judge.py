"""Judge kernel outputs by the float64 reference: by rule 1 on every case, by rule 2 on fresh random data.

A kernel whose source is not known may have any design of a family. The judgement looks for one design that explains
everything that a call returned.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kernels.contract import GRADIENTS, OUTPUTS
from reference.alternatives.declaration import Moved, Scores
from reference.alternatives.views import views
from reference.arithmetic import Arithmetic
from reference.bounds import Exact, ForwardBounds, backward_bounds, exact, forward_bounds, fused_overflow
from reference.family import Changes, Family, in_words, widest
from reference.heads import fold, unfold
from reference.score_rule import broadcast
from strategies.by_device import ByDevice
from strategies.landmarks import MOST_LANDMARKS, landmarks
from tests.harness.trial.outputs import form_of
from tests.harness.trial.pattern import ComparedTensor
from tests.harness.trial.problem import Outputs, Problem, as_changed, given_of
from tests.harness.trial.trial import Check, OutOfBounds, Trial

MOST_JUDGED = ByDevice(cpu=2**20, accelerator=2**24)
"""The most scores that are judged of a call, by device type; of a larger one they are those of some rows and heads."""
COLUMNS = 4
"""A call is large too if q or k has so many times as many elements: bounds of out, dq, dk and dv take as long then."""
MOST_KEYS = 256
"""Of a large call, dk and dv of so many keys are judged, about."""
FEW_HEADS = 4
"""Of a call so large that as many rows are not judged in each head, fewer rows are judged of so many key heads."""
BLOCK_ELEMENTS = 2**22
"""How many scores are judged at once: a float64 matrix of them takes 32 MiB, and about 25 such are alive."""

WHOLE: Mapping[str, str] = {}
"""No expressions: the outputs are those of a call as they are."""

AS_THEY_ARE: Mapping[str, Moved] = {}
"""A kernel gives each tensor as it is expected."""

Breach = tuple[OutOfBounds, list[ComparedTensor]]
"""How checks were broken, and the tensors that were compared then."""

CERTAIN = "{} is within the rounding bound of float64"
PROBABLE = "{} is within the probable rounding bound of float64 (rule 2: independent roundings)"


@dataclass(frozen=True)
class Piece:
    """A part of a problem: all of it, or some sequences and key heads from ``batch`` and ``head`` (of k) on."""

    problem: Problem
    outputs: Outputs
    batch: int = 0
    head: int = 0
    rows: tuple[int, ...] = ()
    """The numbers of its rows, if they are some rows of the problem; none if they are all."""


def pieces(p: Problem, o: Outputs, chosen: Callable[[int], Iterable[int]] = range) -> Iterator[Piece]:
    """Yield the problem as a whole or, if its scores would take too much memory, one key head at a time.

    A sum over the batch or over heads, as dbias may be, is judged with all that it is a sum of. Of so many key heads of
    all sequences, those with the ``chosen`` numbers are yielded.
    """
    batch, heads_kv, *_ = p.k.shape
    if chosen is range and p.scores <= BLOCK_ELEMENTS:
        yield Piece(p, o)
        return
    group = p.heads_q // heads_kv
    summed = () if o.dbias is None else broadcast(o.dbias.shape)
    summed = summed if o.dsinks is None else (0, *summed)
    sequences, heads = (size if dim in summed else 1 for dim, size in enumerate((batch, heads_kv)))
    of_sequences, of_heads = range(0, batch, sequences), range(0, heads_kv, heads)
    for number in chosen(len(of_sequences) * len(of_heads)):
        b, h = of_sequences[number // len(of_heads)], of_heads[number % len(of_heads)]
        at_q = (slice(b, b + sequences), slice(h * group, (h + heads) * group))
        at_k = (slice(b, b + sequences), slice(h, h + heads))
        first = p.first_head + b * p.heads_q + h * group
        problem = replace(
            p.with_batch(at_k[0]),
            **{name: getattr(p, name)[at_q] for name in ("q", "dout")},
            **{name: getattr(p, name)[at_k] for name in ("k", "v")},
            first_head=first,
            rule=p.rule.part(*at_q),
            units=None if p.units is None else p.units[:, *at_k],
        )
        part: dict[str, Any] = {
            name: x[at_k if name in ("dk", "dv") else at_q[1:] if name == "dsinks" else at_q]
            for name, x in o.named().items()
        }
        yield Piece(problem, replace(o, **part), b, h)


def exact_of(trial: Trial, p: Problem, rescored: Scores | None = None) -> Exact:
    """Return the float64 quantities of a problem, computed with the kernel's causal alignment.

    ``rescored`` is that of ``bounds.exact``.
    """
    return exact(
        p.q,
        p.k,
        p.v,
        causal=p.causal,
        sm_scale=p.sm_scale,
        alignment=trial.alignment,
        product_floor=trial.arithmetic.product_floor,
        quantisation=trial.arithmetic.quantisation,
        units=p.units,
        key_padding_mask=p.key_padding_mask,
        dropout_p=p.dropout_p,
        dropout_seed=p.dropout_seed,
        first_head=p.first_head,
        pattern=p.pattern,
        rule=p.rule,
        diagonals=p.diagonals,
        hides_all=trial.kernel.capabilities.hides_all,
        rescored=rescored,
    )


def judge(
    trial: Trial,
    p: Problem,
    o: Outputs,
    expressions: Mapping[str, str] = WHOLE,
    moved: Mapping[str, Moved] = AS_THEY_ARE,
    names: Collection[str] = OUTPUTS,
) -> None:
    """Judge everything that a call returned by both rules: one design has to explain all of it.

    Of a large problem, out, lse and dq of some rows and heads are judged: see ``judge_rows``. Gradients are judged at
    the kernel's own out and lse where they follow from them. ``expressions`` say, by tensor, how an output was cut from
    the tensors of a call. ``moved`` has functions for tensors (batch, heads, rows, columns) whose elements the kernel
    gives in other columns, such as gradients of rows that are rotated later. Tensors that are not among ``names`` are
    not judged.
    """
    if is_large(p) and not goes_by_number(trial, p):
        rows = landmarks(p.q.shape[2], judged_rows(p), trial.chance("landmarks"))
        judge_rows(trial, p, replace(o, dk=None, dv=None), rows)
        return
    breach: Breach | None = None
    given = given_of(p, o, trial.alignment)
    for view in views(given, trial.alternatives, [x for x in names if x in given]):
        for piece in pieces(*as_changed(p, o, view.changed)):
            e = exact_of(trial, piece.problem, view.scores)
            instead = " and ".join(x.words for x in view.alternatives)
            judge_piece = _Judge(
                trial, piece, view.rescaled(e), expressions, view.moved(e) or moved, view.names, instead
            ).judge
            try:
                judge_piece()
            except OutOfBounds as broken:
                if trial.to_first_breach or not trial.alternatives:
                    raise
                breach = (breach[0].beside(broken.tensors), breach[1]) if breach else (broken, trial.compared)
    if breach is not None:
        found, trial.compared = breach
        raise found


def judge_rows(trial: Trial, p: Problem, o: Outputs, rows: list[int]) -> None:
    """Judge these rows of some heads, and dk and dv if they are given; then dout is 0 in all other rows."""
    at, chance = torch.tensor(rows, device=p.q.device), trial.chance("heads")
    some: dict[str, Any] = {name: x if name in ("dk", "dv") else x[:, :, at] for name, x in o.named().items()}
    of_head = len(rows) * p.heads_q // p.heads_kv * p.k.shape[2]
    most = max(1, min(MOST_LANDMARKS, MOST_JUDGED[p.q.device.type] // max(1, of_head)))
    for piece in pieces(
        p.at_rows(at, trial.alignment), replace(o, **some), partial(landmarks, most=most, chance=chance)
    ):
        part = replace(piece, rows=tuple(rows))
        _Judge(trial, part, exact_of(trial, part.problem), WHOLE, AS_THEY_ARE).judge()


def is_large(p: Problem) -> bool:
    """Whether a problem is too large for all of it to be judged."""
    return max(p.scores, p.q.numel() // COLUMNS, p.k.numel() // COLUMNS) > MOST_JUDGED[p.q.device.type]


def judged_rows(p: Problem) -> int:
    """Return how many rows of a large problem are judged: as many as some of its heads leave room for."""
    heads = min(FEW_HEADS, len(p.k) * p.heads_kv)
    of_row = heads * p.heads_q // p.heads_kv * p.k.shape[2]
    return max(1, min(MOST_LANDMARKS, MOST_JUDGED[p.q.device.type] // max(1, of_row)))


def goes_by_number(trial: Trial, p: Problem) -> bool:
    """Whether what a call does to a row follows from its number otherwise than by a mask, as dropout does."""
    return bool(p.rule or p.dropout_p or trial.arithmetic.quantisation)


def judge_plain_call(trial: Trial, p: Problem) -> None:
    """Judge a call with gradients, as the basic laws make it, in place of one with arguments that a law adds."""
    judge(trial, p, trial.gradients(p))


@dataclass(frozen=True)
class _Judge:
    """The judge of one piece of a problem, whose float64 quantities are ``exact``.

    It compares tensors of ``names``. ``instead`` are the words of what the kernel is taken to compute in place of
    attention.
    """

    trial: Trial
    piece: Piece
    exact: Exact
    expressions: Mapping[str, str]
    moved: Mapping[str, Moved]
    names: Collection[str] = OUTPUTS
    instead: str = ""

    def judge(self) -> None:
        """Raise OutOfBounds if no base of the family explains the piece, as the nearest design is."""
        trial, breaches = self.trial, list[Breach]()
        for at in sorted(range(len(trial.family.bases)), key=lambda at: at != trial.explained.get("base", 0)):
            broken = self.of_both_passes(trial.family.bases[at])
            if broken is None:
                trial.explained["base"] = at
                return
            breaches.append((broken, trial.compared))
        best, trial.compared = nearest(breaches)
        raise best

    def of_both_passes(self, base: Arithmetic) -> OutOfBounds | None:
        """Return the first breach, that of out and lse if there is one, with all tensors wrong in either pass."""
        first: OutOfBounds | None = None
        for judge_pass in (self.forward, self.gradients):
            compared = self.trial.compared
            try:
                judge_pass(base)
            except OutOfBounds as broken:
                if self.trial.to_first_breach:
                    return broken
                if first is None:
                    first = broken
                else:
                    first = first.beside(broken.tensors)
                    self.trial.compared = compared
        return first

    def forward(self, base: Arithmetic) -> None:
        """Judge out and lse by each of the ways in which a forward may round, until one explains them."""
        e = self.exact
        if {"out", "lse"}.isdisjoint(self.names):
            return

        def checks(a: Arithmetic, claim: str, **rule: Any) -> list[Check]:
            bounds = forward_bounds(e, a, **rule)
            if self.overflowed is not None:
                bounds = bounds.unknown_in(self.overflowed)
            return self.checks(claim, {"out": (e.out, bounds.out), "lse": (e.lse, bounds.lse)})

        explain(self.trial, "forward", base, self.ways.forward, checks)

    @cached_property
    def ways(self) -> Family:
        """The designs as they are in calls with so many keys."""
        return self.trial.family.of_keys(self.piece.problem.k.shape[2])

    @cached_property
    def overflowed(self) -> Tensor | None:
        """Rows (B, H, R) that are not finite where a fused multiply-add may make them so: see ``fused_overflow``.

        None if it may not do so in any row, as in nearly all cases.
        """
        o, heads_kv = self.piece.outputs, self.piece.problem.heads_kv
        may_be = fused_overflow(self.exact.row_max.abs(), self.exact.v)
        if not bool(may_be.any()):
            return None
        out_is = ~fold(o.out, heads_kv).isfinite().all(-1)
        if o.lse is None:
            return may_be & out_is
        lse = fold(o.lse, heads_kv)
        return may_be & (out_is | ~(lse.isfinite() | lse.isneginf()))

    def gradients(self, base: Arithmetic) -> None:
        """Judge gradients by each of the ways in which a backward may round, until one explains them."""
        if self.piece.outputs.gradients.keys().isdisjoint(self.names):
            return
        p, ways = self.piece.problem, self.ways
        dout = fold(p.dout, p.heads_kv).double()
        dlse = None if p.dlse is None else self.in_contract_form(p.dlse)
        own = self.own_results()

        @cache
        def forward() -> ForwardBounds:
            """Return bounds for any forward of the family, for a backward that reads P, or without out or lse."""
            return forward_bounds(self.exact, widest(replace(base, **changes) for changes in ways.forward))

        def checks(a: Arithmetic, claim: str, **rule: Any) -> list[Check]:
            known = {name: x for name, x in own.items() if name == "out" or not a.saved_weights}
            if len(known) < 2:
                known["forward"] = forward()
            bias_shape = None if self.piece.outputs.dbias is None else self.piece.outputs.dbias.shape
            known |= {"dlse": dlse, "of_sinks": self.piece.outputs.dsinks is not None}
            b = backward_bounds(self.exact, dout, a, **known, **rule, bias_shape=bias_shape, keys=self.keys)
            return self.checks(
                claim,
                {name: (getattr(b, name), getattr(b, f"{name}_bound")) for name in GRADIENTS},
            )

        def lse_is_wrong() -> bool:
            return "lse" in own and bool(((own["lse"] - self.exact.lse).abs() > forward().lse).any())

        explain(self.trial, "backward", base, ways.backward, checks, lse_is_wrong)

    @cached_property
    def keys(self) -> Tensor | None:
        """The keys whose dk and dv are judged where rows are some of a longer sequence; None for all.

        There are none where dk and dv are not judged. Else they are those where dk or dv is furthest from P^T dout and
        dS^T q in float64, as errors and by their size, and landmarks.
        """
        p, o, e = self.piece.problem, self.piece.outputs, self.exact
        if not self.piece.rows or p.k.shape[2] <= MOST_KEYS:
            return None
        if o.dk is None or o.dv is None:
            return torch.empty(0, dtype=torch.int64, device=p.k.device)
        dout = fold(p.dout, p.heads_kv).double()
        grad_p = dout @ e.v.mT
        grad_s = e.weights * (grad_p - (e.weights * grad_p).sum(-1, keepdim=True))
        found = set(landmarks(p.k.shape[2], MOST_KEYS // 4, self.trial.chance("keys")))
        for actual, expected in ((o.dv, e.weights.mT @ dout), (o.dk, grad_s.mT @ e.q * e.sm_scale)):
            error = (actual.double() - expected).norm(dim=-1).nan_to_num(nan=math.inf)
            size = expected.norm(dim=-1) + self.trial.arithmetic.output.underflow * p.k.shape[3] ** 0.5
            for merit in (error, error / size):
                found |= set(merit.amax((0, 1)).topk(MOST_KEYS // 8).indices.tolist())
        return torch.tensor(sorted(found), device=p.k.device)

    def own_results(self) -> dict[str, Any]:
        """Return the kernel's own out and lse, folded, as far as it returns them and its gradients are judged at them.

        If they are not finite the bounds of the gradients are infinite, since that error is for the forward to report.
        """
        o, heads_kv = self.piece.outputs, self.piece.problem.heads_kv
        found = {"out": o.out, "lse": o.lse} if self.trial.apart else {}
        return {name: fold(x, heads_kv).double() for name, x in found.items() if x is not None}

    def in_contract_form(self, dlse: Tensor) -> Tensor:
        """Return the gradient of the natural lse (B, H, R), folded, from that of the lse that the kernel returns."""
        base, layout, _ = form_of(self.trial.kernel.capabilities)
        natural = (dlse.transpose(1, 2) if layout == "bnh" else dlse).double()
        return fold(natural / (math.log(2.0) if base == "2" else 1.0), self.piece.problem.heads_kv)

    def checks(self, claim: str, expected: Mapping[str, tuple[Tensor, Tensor]]) -> list[Check]:
        """Make a check for each tensor that the kernel returned, with expected and bound unfolded to its shape."""
        p, outputs, found = self.piece.problem, self.piece.outputs, []
        for name, actual in outputs.named().items():
            if name in expected and name in self.names:
                as_it_is = name in ("dk", "dv", "dbias", "dsinks")
                value, bound = (x if as_it_is else unfold(x, p.heads_q) for x in expected[name])
                if name in self.moved:
                    value, bound = self.moved[name](value, bound)
                rows = self.piece.rows
                if name in ("dk", "dv") and rows:
                    rows = () if self.keys is None else tuple(self.keys.tolist())
                    actual = actual if self.keys is None else actual[:, :, self.keys]
                group = 1 if name in ("dk", "dv") else p.heads_q // max(1, p.heads_kv)
                of_what = f" of attention in which {self.instead}" if self.instead else ""
                check = Check(
                    claim=claim.format(name) + of_what,
                    tensor=name,
                    actual=actual,
                    expected=value,
                    bound=bound,
                    maximum=torch.inf if name in ("lse", "dsinks") else self.trial.arithmetic.output.maximum,
                    call=outputs.call,
                    expression=self.expressions.get(name, ""),
                    origin=(self.piece.batch, self.piece.head * group),
                    rows=rows,
                )
                found.append(check)
        return found


def explain(
    trial: Trial,
    factor: str,
    base: Arithmetic,
    ways: tuple[Changes, ...],
    checks: Callable[..., list[Check]],
    lse_is_wrong: Callable[[], bool] = lambda: False,
) -> None:
    """Find a way to round with which all ``checks`` hold, trying first the one that held last.

    If there is none, raises OutOfBounds as the nearest way is. Two kinds of ways are not tried: those that agree with a
    failed way in everything that the failing tensor depends on, and, once one has failed, those of a group (see
    ``GROUPS``) for which not even the widest bounds hold. If the kernel's own lse is wrong, ways that compute gradients
    from it count as further away, because that lse may make any gradient seem wrong.
    """
    failed: set[tuple[str, tuple[Any, ...]]] = set()
    widest_of: dict[tuple[Any, ...], Breach | None] = {}
    breaches: list[tuple[Arithmetic, Breach]] = []

    @cache
    def members() -> list[Arithmetic]:
        return [replace(base, **changes) for changes in ways]

    def is_hopeless(way: Arithmetic) -> bool:
        for rules, group_of in GROUPS:
            group = group_of(way)
            if group not in widest_of:
                alike = [x for x in members() if group_of(x) == group]
                widest_of[group] = _breach(trial, partial(checks, widest(alike)), rules)
            if widest_of[group]:
                return True
        return False

    for at in sorted(range(len(ways)), key=lambda at: at != trial.explained.get(factor, 0)):
        way = replace(base, **ways[at])
        if any((tensor, signature(tensor, way)) in failed for tensor in OUTPUTS):
            continue
        if breaches and is_hopeless(way):
            continue
        try:
            _both_rules(trial, partial(checks, way))
        except OutOfBounds as broken:
            breaches.append((way, (broken, trial.compared)))
            failed.add((broken.tensor, signature(broken.tensor, way)))
        else:
            trial.explained[factor] = at
            if len(ways) > 1:
                trial.designs.add(in_words(ways, ways[at]))
            return
    # Where one tensor is wrong, a design that is not the kernel's may make others seem wrong too.
    of_ways = [(way.saved_weights, breach) for way, breach in breaches]
    of_groups = [(saved_weights, breach) for (saved_weights, *_), breach in widest_of.items() if breach]
    differ = len({saved_weights for saved_weights, _ in (*of_ways, *of_groups)}) > 1
    is_wrong = differ and lse_is_wrong()

    def is_misled(saved_weights: bool) -> bool:
        return is_wrong and not saved_weights

    near = min(of_ways, key=lambda x: (is_misled(x[0]), x[1][0].ratio))
    _, (fewest, trial.compared) = min([near, *of_groups], key=lambda x: (_count(x[1]), is_misled(x[0])))
    raise fewest


def _count(breach: Breach) -> int:
    """Return how many tensors are wrong."""
    return len({*breach[0].tensors})


def source_of_weights(a: Arithmetic) -> tuple[Any, ...]:
    """Return the field that decides whether gradients are computed from the weights of the forward, or from its lse."""
    return (a.saved_weights,)


def sources(a: Arithmetic) -> tuple[Any, ...]:
    """Return the fields that decide from which results of a call its gradients are computed, and so what is right."""
    return (a.saved_weights, a.delta)


GROUPS = ((1, source_of_weights), (2, sources))
"""Groups of ways that are judged together first, by so many rules, the largest groups first.

Where delta may be either sum, the bound allows for the distance between both, by rule 1 alone.
"""


def signature(tensor: str, a: Arithmetic) -> tuple[Any, ...]:
    """Return the fields that decide the bounds of a tensor, among arithmetics of one factor of a family."""
    of_weights = (a.saved_weights,)
    of_keys = (a.dk_dv_per_head,) if tensor in ("dk", "dv") else ()
    of_scores = (
        (a.delta, a.ds_scaled, a.ds_from_rounded_p) if tensor in ("dq", "dk", "dbias", "dsinks") else ()
    )
    of_forward = (a.normalised_first, a.partial_results) if tensor in ("out", "lse") else ()
    return (*of_weights, *of_keys, *of_scores, *of_forward)


def nearest(breaches: Sequence[Breach]) -> Breach:
    """Return the breach with the smallest error over bound."""
    return min(breaches, key=lambda breach: breach[0].ratio)


def _breach(trial: Trial, checks: Callable[..., list[Check]], rules: int) -> Breach | None:
    """Return the breach of checks by rule 1 or, if ``rules`` is 2, by both; None if all hold.

    Nothing is recorded in the trial. Rule 1 comes first, because one of its bounds is enough to show a breach.
    """
    other = trial.replayed(trial.family)
    try:
        other.hold(checks(CERTAIN))
        if rules == 2:
            other.hold(checks(PROBABLE, safety=trial.safety))
    except OutOfBounds as broken:
        return broken, other.compared
    return None


def _both_rules(trial: Trial, checks: Callable[..., list[Check]]) -> None:
    """Hold the checks to both rules, first to rule 2 without clusters: the lowest bound, which settles most cases."""
    lowest = checks(PROBABLE, safety=trial.safety, clustered=False)
    trial.note_idle(lowest)
    try:
        trial.hold(lowest)
    except OutOfBounds:
        trial.hold(checks(CERTAIN))
        trial.hold(checks(PROBABLE, safety=trial.safety))

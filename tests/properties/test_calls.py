"""Calls: what a kernel answers does not depend on how autograd, and the modes of PyTorch, have it called.

A case names a way of calling (``strategies.ways``): one input alone requires grad; another forward comes before the
backward; one forward has two backwards; dout is that of ``out.sum()``, is transposed or has a last stride of 2;
gradients flow through lse or into sinks; out is written to before the backward; the forward runs under
``torch.no_grad``, ``inference_mode`` with a training call after it, ``autocast`` or ``vmap``, or again within the
backward, as activation checkpointing has it, or all of it on another thread. Whatever a call returns is judged by
float64, as if it were plain. An error by which a mode, a transform, a dout or a second backward is refused is noted
and no bug. Catches what a backward writes over although it
may be called again, state of one forward that the next one replaces, inputs that are not asked whether they require
grad, strides that are taken for granted, and gradients that are lost without a word.

Gradients are lost where out requires no grad, or autograd has none for an input, and they are not 0. That is no bug of
a kernel that gives no gradients in any call.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.contract import THROUGH_LSE
from reference.heads import unfold
from reference.score_rule import PLAIN
from strategies.case import TENSORS
from strategies.ways import WAYS, ways_of
from tests.harness.law import law
from tests.harness.trial.judge import exact_of, judge
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.relate import asked
from tests.harness.trial.trial import NO_WAY, LawBroken, OutOfBounds, Refused, Trial, gradients_given
from tests.harness.verdict import NUMBERS, Finding

MOST_SCORES = 2**14
"""The most scores of a case: what is wrong with a way of calling shows in small cases."""
LONGEST = 140
"""The longest sequence: a tile of 128 rows and a part of another."""
ORDINARY = 128
"""The rows and keys of a call of which a kernel gives gradients, if it gives any."""
LOST = "inputs that require grad get gradients, but in this call some get none"
"""What is claimed of a call that lacks gradients, where ordinary calls have them."""
LOST_ALONE = "inputs that require grad get gradients, but one gets none if others do not require grad"
"""What is claimed of a call in which one input alone requires grad, where plain calls have gradients."""
LOST_IN_WAY = "inputs that require grad get gradients, but {} gets none with {}"
AFTER_INFERENCE = "a call in torch.inference_mode before it"
REFUSED = "{} is refused in {{}}"
IMPRECISE = (
    "under torch.autocast, answers are less precise than in a plain call in {}: no bug as it is claimed; --claims"
    " autocast=true asks for more"
)


@law(
    key_padding=True,
    dropout=True,
    variants=True,
    calls=("way",),
    max_seqlen=LONGEST,
    max_scores=MOST_SCORES,
    place=14,
    on_device=True,
    adds_arguments=True,
)
def calls(trial: Trial) -> None:
    """Judge a call that is made in the way of the case, or a plain call if the case or the kernel has none."""
    way = trial.case.way
    p = problem_of(trial, way)
    if p is None:
        judged(trial, trial.problem, NO_WAY)
        return
    try:
        judged(trial, p, way)
    except LawBroken as broken:
        raise LawBroken(
            told(broken.finding, WAYS[way].told) if holds_in_a_plain_call(trial) else broken.finding
        ) from None
    except Refused:
        judged(trial, trial.problem, NO_WAY)
        trial.note(REFUSED.format(WAYS[way].told), shows=True)
        return
    trial.note(REFUSED.format(WAYS[way].told), shows=False)
    if way == "inference_mode":
        after_inference(trial, p)


def after_inference(trial: Trial, p: Problem) -> None:
    """Judge a training call after one in inference mode: autograd can't use tensors that a kernel has kept of that."""
    try:
        judged(trial, p, NO_WAY)
    except LawBroken as broken:
        raise LawBroken(told(broken.finding, AFTER_INFERENCE)) from None


def told(finding: Finding, way: str) -> Finding:
    """Return the finding of a call that is right if it is not made in a way, given in words, so that it says so."""
    tensor, claim = finding.tensor, finding.claim
    if finding.kind == "exception":
        return replace(finding, claim=claim.replace("a claimed case", f"a claimed case with {way}", 1))
    if finding.kind not in NUMBERS:
        return finding
    of_way = claim.replace(f"{tensor} is", f"{tensor} with {way} is", 1)
    return replace(finding, claim=f"{of_way}, as it is in a plain call")


def holds_in_a_plain_call(trial: Trial) -> bool:
    """Whether a plain call on the case returns what it should."""
    try:
        judge(trial.replayed(trial.family), trial.problem, trial.gradients())
    except (LawBroken, Refused):
        return False
    return True


def problem_of(trial: Trial, way: str) -> Problem | None:
    """Return what the kernel is asked in a way; None if the way is none, or means nothing for the kernel or case."""
    p = trial.problem
    if way not in ways_of(trial.kernel.capabilities):
        return None
    option = WAYS[way].option
    if option and getattr(p.rule, option) is None:
        return None
    changed = {
        "dout_of_sum": lambda: p.dout.new_ones(()).expand(p.dout.shape),
        "dout_transposed": lambda: p.dout.mT.contiguous().mT,
        "dout_strided": lambda: p.dout.repeat_interleave(2, -1)[..., ::2],
    }
    if way in changed:
        return replace(p, dout=changed[way]())
    return replace(p, dlse=of_lse(trial, p)) if way == THROUGH_LSE else p


def of_lse(trial: Trial, p: Problem) -> Tensor:
    """Return random numbers for the gradient of lse, float32 in the form in which the kernel returns lse.

    They are 0 in rows that see no key, whose lse depends on no score.
    """
    empty = unfold(exact_of(trial, p).empty, p.heads_q).cpu()
    chance = torch.Generator().manual_seed(trial.case.seed)
    dlse = torch.randn(empty.shape, generator=chance).masked_fill(empty, 0.0).to(p.q.device)
    return dlse.transpose(1, 2).contiguous() if trial.kernel.capabilities.lse_layout == "bnh" else dlse


def judged(trial: Trial, p: Problem, way: str) -> None:
    """Make a call in a way, and judge what it returns and whether it lacks gradients."""
    outputs = trial.in_way(p, way)
    if way == "autocast" and not trial.kernel.capabilities.autocast:
        judge_under_autocast(trial, p, outputs)
    else:
        judge(trial, p, outputs)
    wanted = gradients_given(trial.kernel, p, way) if trial.calls[outputs.call].backward else ()
    lost = [name for name in wanted if getattr(outputs, name) is None]
    if not lost or may_be_zero(trial, p, outputs, lost):
        return
    if way != NO_WAY and gives_gradients(trial, [trial.problem]):
        inputs = " or ".join(name.removeprefix("d") for name in lost)
        claim = LOST_ALONE if WAYS[way].alone else LOST_IN_WAY.format(inputs, WAYS[way].told)
        trial.fail(claim, kind="contract", call=outputs.call)
    if gives_gradients(trial, ordinary(trial)):
        trial.fail(LOST, kind="contract", call=outputs.call)


def judge_under_autocast(trial: Trial, p: Problem, outputs: Outputs) -> None:
    """Note whether a call is less precise than a plain one: what is rounded then follows from PyTorch's own rules."""
    trial.note(IMPRECISE, shows=not is_right(trial, p, outputs))


def is_right(trial: Trial, p: Problem, outputs: Outputs) -> bool:
    """Whether outputs are within their bounds; nothing is remembered of it."""
    try:
        judge(trial.replayed(trial.family), p, outputs)
    except OutOfBounds:
        return False
    return True


def may_be_zero(trial: Trial, p: Problem, outputs: Outputs, names: Sequence[str]) -> bool:
    """Whether 0 would be right for these gradients, as where each row sees one key: then nothing is lost with them."""
    inputs = {**vars(p), **p.rule.tensors}
    zeros: dict[str, Any] = {name: torch.zeros_like(inputs[name.removeprefix("d")]) for name in names}
    return is_right(trial, p, replace(outputs, **zeros))


def gives_gradients(trial: Trial, problems: Sequence[Problem]) -> bool:
    """Whether the kernel gives gradients in a plain call of one of the problems, or has claimed to do so itself."""
    is_stated = not trial.kernel.capabilities.may_refuse
    return is_stated or any(bool(trial.gradients(p).gradients) for p in problems)


def ordinary(trial: Trial) -> list[Problem]:
    """Return problems of many rows and keys, made of those of the trial, with and without a causal mask."""
    claims, p = trial.kernel.capabilities, trial.problem
    rows = torch.arange(claims.length_from(ORDINARY), device=p.q.device)
    many: dict[str, Any] = {
        name: getattr(p, name)[:, :, rows % getattr(p, name).shape[2]].contiguous() for name in TENSORS
    }
    plain = replace(p, **many, key_padding_mask=None, dropout_p=0.0, rule=PLAIN)
    found = (asked(trial, replace(plain, causal=causal)) for causal in claims.causal)
    return [x for x in found if x is not None]

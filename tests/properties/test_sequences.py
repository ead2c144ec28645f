"""Sequences: a call is answered as if no other had come before it.

A case says which calls come first, up to 300 of them: the same call; a call with other numbers in the same tensors, or
in other tensors in the same memory, which may be gone then, or with other lengths in the same tables; calls with other
lengths, heads, scales, masks or dtypes; a call that raises an exception. Out, lse and gradients of the last call are
within the bound of float64, and what earlier calls returned stays as it was. Catches keys, results, lengths, plans and
tables that are kept for too many calls, workspaces that are not cleared, flags that an exception leaves set, and what
goes wrong at the N-th call. Numbers are written over by PyTorch, which counts such writes in the version of a tensor: a
kernel may keep what it has made of a tensor for as long as that stays. A new tensor may have the memory and the version
of one that is gone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from strategies.case import Case
from strategies.earlier import KINDS, earlier_case
from strategies.layouts import distinct, laid_out
from strategies.values import fill
from tests.harness.device.process_state import put_back
from tests.harness.device.sync import device_answers
from tests.harness.kernel_record import meets
from tests.harness.law import law
from tests.harness.trial.judge import judge, judge_plain_call
from tests.harness.trial.problem import Call, Outputs, Problem, is_same_argument
from tests.harness.trial.ragged_form import KEYWORDS, Prepared
from tests.harness.trial.trial import CannotRun, Check, LawBroken, Refused, Trial, run_kernel
from tests.harness.verdict import NUMBERS, STAYS, Finding

MOST_SCORES = 2**16
"""The most scores of a call, since several are made of each case."""
OWN_NUMBERS = ("same", "scale", "mask")
"""The kinds of calls of the judged call's tensors with their own numbers."""
WRITTEN_OVER = ("values", "keys", "memory", "freed")
"""The kinds of calls of these tensors, or of others in their memory, with other numbers."""
INPUTS = ("q", "k", "v", "dout")
KEPT_TOGETHER = (*((name,) for name in INPUTS), ("k", "v"), ("q", "k"), ("q", "k", "v"), INPUTS)
"""Inputs of which a kernel may keep what they were, the fewest first."""
MOST_ASKED = 4
"""Of so many earlier calls, the last ones, it is asked whether a kernel has kept their inputs or added up results."""


@dataclass(frozen=True)
class Earlier:
    """An earlier call: its kind, its arguments as they were, what it returned, and copies of that.

    Results in ``apart`` share no memory with its inputs.
    """

    kind: str
    call: Call
    outputs: Outputs
    as_returned: Mapping[str, Tensor]
    apart: frozenset[str]


@law(
    earlier=True,
    on_device=True,
    kinds=True,
    key_padding=True,
    max_scores=MOST_SCORES,
    place=12.5,
    compares=("calls",),
)
def sequences(trial: Trial) -> None:
    """Make the calls of a case one after the other, and judge the last of them.

    A case without earlier calls has the call that the basic laws make, which tells whether a failure needs them.
    """
    p, is_replay = trial.problem, bool(trial.answered)
    if not trial.case.earlier:
        judge_plain_call(trial, p)
        return
    prepared = trial.prepared(p)
    made = [*made_before(trial, prepared)]
    judged = trial.prepared(p) if prepared.cache else prepared
    judged = in_new_tensors(judged) if "freed" in trial.case.earlier and not prepared.cache else judged
    try:
        last = trial.call(judged, backward=not trial.case.inference)
        judge(trial, p, last)
        trial.hold(changed_since(made))
    except LawBroken as broken:
        if is_replay:  # it is asked whether the law holds, and not how it does not
            raise
        finding = broken.finding
        raise LawBroken(replace(finding, certificate=certificate(trial, p, made, finding))) from None


def made_before(trial: Trial, prepared: Prepared) -> Iterator[Earlier]:
    """Make the earlier calls of a case, and yield those that were answered; ``prepared`` is the judged call."""
    case = trial.case
    for number in range(case.rounds * len(case.earlier)):
        in_round, kind = number // len(case.earlier), case.earlier[number % len(case.earlier)]
        if kind == "refused":
            attempt_misfit(trial)
            continue
        with given(trial, prepared, kind, in_round, number) as (asked, call):
            if call is None:
                continue
            try:
                outputs = asked.call(call, backward=not case.inference)
            except Refused:
                unanswered(trial, len(trial.calls) - 1)
                continue
            found = outputs.named()
            inputs = {x.untyped_storage().data_ptr() for x in tensors_of(trial.calls[outputs.call].problem)}
            apart = frozenset(
                name for name, x in found.items() if x.untyped_storage().data_ptr() not in inputs
            )
            # Nothing keeps the tensors of the call from being freed, unless the kernel does.
            kept = trial.let_go(outputs.call)
        yield Earlier(kind, kept, outputs, {name: x.clone() for name, x in found.items()}, apart)


@contextmanager
def given(
    trial: Trial, prepared: Prepared, kind: str, in_round: int, number: int
) -> Iterator[tuple[Trial, Prepared | None]]:
    """Yield an earlier call and the trial that makes it. The judged call has its own numbers afterwards.

    The call is None if the kernel does not claim to answer it, or if the kind of calls has none such.
    """
    case = other_case(trial, kind, in_round)
    if case is None:
        yield trial, None
    elif (
        kind in OWN_NUMBERS and not prepared.cache
    ):  # a cache that is appended to is another one in each call
        yield trial, with_options(prepared, case)
    elif kind in WRITTEN_OVER and not prepared.cache:
        with holding(other_numbers(trial, prepared.problem, kind, number)):
            others = {"memory": in_other_tensors, "freed": in_new_tensors}
            yield trial, others[kind](prepared) if kind in others else prepared
    else:
        other = trial.on(case)
        fewer = other.prepared(other.problem)
        shared = {name: x for name, x in prepared.launch.items() if is_table(x, fewer.launch.get(name))}
        if kind != "tables":
            yield other, fewer
            return
        with holding([(x, fewer.launch[name]) for name, x in shared.items()]):
            yield other, replace(fewer, launch={**fewer.launch, **shared}) if shared else None


def other_case(trial: Trial, kind: str, number: int) -> Case | None:
    """Return the case of an earlier call, if the kernel claims to answer it and does not fail in it as is known."""
    case = earlier_case(trial.kernel.capabilities, trial.case, kind, number)
    is_known = case is not None and any(meets(case, known) for known in trial.kernel.known_failures)
    return None if is_known else case


def with_options(prepared: Prepared, case: Case) -> Prepared:
    """Return a call of the same tensors with the mask and the scale of a case."""
    return replace(prepared, problem=replace(prepared.problem, causal=case.causal, sm_scale=case.scale))


@contextmanager
def holding(numbers: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Meanwhile, have tensors hold other numbers, which are written in place, as their own are afterwards."""
    kept = [(x, distinct(x).clone()) for x, _ in numbers]
    try:
        for x, others in numbers:
            distinct(x).copy_(others)
        yield
    finally:
        for x, own in kept:
            distinct(x).copy_(own)


def other_numbers(trial: Trial, p: Problem, kind: str, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs of a problem that have memory of their own, or k and v, each with other numbers for it."""
    keys = (p.k,) if p.v_in_k else (p.k, p.v)
    inputs = keys if kind == "keys" else (p.q, *keys, p.dout)
    generator = Generator().manual_seed(trial.chance(f"other numbers {number}").getrandbits(31))
    shapes: list[Any] = [distinct(x).shape for x in inputs]
    numbers = (fill("normal", shape, x.dtype, generator) for x, shape in zip(inputs, shapes, strict=True))
    return [(x, others.to(x.device)) for x, others in zip(inputs, numbers, strict=True)]


def tensors_of(p: Problem) -> tuple[Tensor, ...]:
    """Return the inputs of a problem, in the order of ``INPUTS``."""
    return p.q, p.k, p.v, p.dout


def in_other_tensors(prepared: Prepared) -> Prepared:
    """Return a call whose inputs are other tensors in the same memory."""
    return with_inputs(prepared, [x.view_as(x) for x in tensors_of(prepared.problem)])


def in_new_tensors(prepared: Prepared) -> Prepared:
    """Return a call whose inputs are as new: in their memory, but PyTorch knows of no write to them.

    So are two tensors of which the second gets the memory of the first when that is freed.
    """
    return with_inputs(prepared, [x.data for x in tensors_of(prepared.problem)])


def with_inputs(prepared: Prepared, inputs: list[Tensor]) -> Prepared:
    """Return a call with other q, k, v and dout; a v that is the first columns of k is those of the new k."""
    p = prepared.problem
    q, k, v, dout = inputs
    v = k[..., : v.shape[3]] if p.v_in_k else v
    return replace(prepared, problem=replace(p, q=q, k=k, v=v, dout=dout))


def is_table(x: Any, other: Any) -> bool:
    """Whether an argument is a tensor of lengths or pages into which that of another call fits."""
    are_tensors = isinstance(x, Tensor) and isinstance(other, Tensor)
    return are_tensors and x.dtype == other.dtype == torch.int32 and x.shape == other.shape


def attempt_misfit(trial: Trial) -> None:
    """Make a call whose v has one key more than its k, as a mistaken user does. Whatever comes of it is right.

    A kernel that reads by the lengths of k, or beyond them by those of v, stays within memory that it may read.
    """
    p = trial.problem
    if trial.case.ragged != "none" or 0 in p.k.shape:
        return
    v = laid_out(torch.cat([p.v, p.v[:, :, :1]], 2), trial.kernel.capabilities.layouts, trial.case.v_layout)
    if v is None:
        return
    misfit = replace(p, v=v)
    call = Prepared(misfit, trial.launch, {}, may_fail=True)
    number = trial.record(call, backward=False)
    with suppress(Exception), put_back(set()):
        run_kernel(trial.kernel, misfit, trial.launch, backward=False)
    unanswered(trial, number)
    if not device_answers(trial.device):
        raise CannotRun("the device was lost in a call that no kernel has to answer")


def unanswered(trial: Trial, number: int) -> None:
    """Note that a call was not answered, since calls are paired with what they returned."""
    trial.given.append(Outputs(out=trial.problem.q, lse=None, call=number))


def changed_since(made: list[Earlier]) -> list[Check]:
    """Return checks for what earlier calls returned and has changed since, but for what lies in memory of inputs."""
    checks = []
    for one in made:
        for name, now in one.outputs.named().items():
            was = one.as_returned[name]
            if name not in one.apart or torch.allclose(now, was, rtol=0.0, atol=0.0, equal_nan=True):
                continue
            checks.append(
                Check(
                    claim=STAYS.format(name),
                    tensor=name,
                    actual=now,
                    expected=was.double(),
                    bound=torch.zeros_like(was, dtype=torch.float64),
                    call=one.outputs.call,
                )
            )
    return checks


def certificate(trial: Trial, p: Problem, made: list[Earlier], finding: Finding) -> str:
    """Say what a kernel does in place of what is right, as far as its earlier calls tell; "" if it had none."""
    last = trial.given[-1] if trial.given else None
    if not made:
        return ""
    if finding.kind not in NUMBERS or last is None or finding.call != last.call:
        return f"is spoilt by {' and '.join(KINDS[kind] for kind in dict.fromkeys(x.kind for x in made))}"
    wrong = {finding.tensor, *finding.tensors} - {""}
    judge = partial(is_right, trial)
    kept = of_option(judge, p, made, last) or of_result(made, last, wrong)
    kept = kept or of_input(judge, p, made, last) or added_up(judge, p, made, last, wrong)
    since = first_wrong(judge, p, made) if len(made) > 1 else 1
    told = [f"wrong from the {ordinal(since + 1)} call on"] if since > 1 else []
    told += [kept] if kept else []
    return "; ".join(told) or f"wrong after {KINDS[made[-1].kind]}"


def is_right(trial: Trial, p: Problem, o: Outputs) -> bool:
    """Whether results are those of a problem, whichever call has returned them."""
    with suppress(LawBroken):
        judge(trial.replayed(trial.family), p, o)
        return True
    return False


def of_result(made: list[Earlier], last: Outputs, wrong: set[str]) -> str:
    """Say that wrong results are those of an earlier call, if they are, bit for bit."""
    for one in made:
        pairs = [(one.as_returned.get(name), last.named()[name]) for name in wrong]
        if all(x is not None and is_same_argument(x, y) for x, y in pairs):
            return "answers with the result of an earlier call"
    return ""


def of_option(
    judge: Callable[[Problem, Outputs], bool], p: Problem, made: list[Earlier], last: Outputs
) -> str:
    """Say that results are those with the scale or the mask of an earlier call, if they are."""
    for before in (one.call.problem for one in made[-MOST_ASKED:]):
        if before.sm_scale != p.sm_scale and judge(replace(p, sm_scale=before.sm_scale), last):
            return "answers with the sm_scale of an earlier call"
        if before.causal != p.causal and judge(replace(p, causal=before.causal), last):
            return "answers with the mask of an earlier call"
    return ""


def of_input(
    judge: Callable[[Problem, Outputs], bool], p: Problem, made: list[Earlier], last: Outputs
) -> str:
    """Say that results are those of some inputs as they were in an earlier call, if they are; the fewest inputs."""
    for one in made[-MOST_ASKED:]:
        before = one.call.problem
        alike = [x for x in INPUTS if getattr(before, x).shape == getattr(p, x).shape]
        alike = alike if before.q.dtype == p.q.dtype and not p.v_in_k else []
        for names in filter(set(alike).issuperset, KEPT_TOGETHER):
            if judge(replace(p, **{name: getattr(before, name) for name in names}), last):
                were = "it was" if len(names) == 1 else "they were"
                return f"answers with {' and '.join(names)} as {were} in an earlier call"
    return ""


def added_up(
    judge: Callable[[Problem, Outputs], bool], p: Problem, made: list[Earlier], last: Outputs, wrong: set[str]
) -> str:
    """Say that wrong results have those of earlier calls in them as a sum, if they do."""
    parts = {name: [x.as_returned[name] for x in made if name in x.as_returned] for name in wrong}
    for number in range(1, 1 + min(MOST_ASKED, max(map(len, parts.values()), default=0))):
        less: dict[str, Any] = {}
        for name, found in parts.items():
            whole = last.named()[name]
            some = [x.double() for x in found[-number:] if x.shape == whole.shape]
            less[name] = (whole.double() - sum(some)).to(whole.dtype)
        if judge(p, replace(last, **less)):
            return f"has the {' and '.join(sorted(wrong))} of earlier calls added to its own"
    return ""


def first_wrong(judge: Callable[[Problem, Outputs], bool], p: Problem, made: list[Earlier]) -> int:
    """Return the number of the first call that was wrong, from 0 on; that of the judged one if none before it was."""
    for number, one in enumerate(made):
        asked = one.call.problem
        is_plain = asked.q.dtype == p.q.dtype and not one.call.launch.keys() & KEYWORDS
        returned: dict[str, Any] = {**one.as_returned}
        if is_plain and not judge(asked, replace(one.outputs, **returned)):
            return number
    return len(made)


def ordinal(number: int) -> str:
    """Return a number as an ordinal: 1st, 2nd, 3rd, 4th, 11th, 21st."""
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"

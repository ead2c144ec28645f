"""Memory: every output element is written, none outside, no input changes, nothing around the inputs is read.

What the launcher allocates is filled with NaN and guarded, and the inputs lie in storages filled with NaN; a
second run with finite poison must give the same result. A call with other numbers must leave the tensors of an
earlier one as they are. On the CPU the memory of one run ends at a fence, beyond which even a read that nothing comes
of ends the process; of Triton kernels such accesses are told before they are made, those before the beginning of a
tensor as well, and reads of what nobody has written are noted. Catches unwritten rows and uninitialised scratch, stores
and loads outside of a tensor, kernels that work in place or return the same storage again.
"""

from dataclasses import replace

from tests.harness.device.poison import (
    FINITE_POISON,
    PoisonedAllocations,
    after_fence,
    behind_fence,
    inputs_copied,
)
from tests.harness.interpreter.installation import telling_unwritten, tells_accesses
from tests.harness.law import law
from tests.harness.trial.problem import Outputs
from tests.harness.trial.ragged_form import Prepared
from tests.harness.trial.relate import (
    Allowed,
    Derived,
    agree,
    allowances,
    asked,
    lies_in_claimed_layout,
    of_a_repeat,
)
from tests.harness.trial.trial import Trial
from tests.harness.verdict import MEMORY


@law(
    on_device=True,
    key_padding=True,
    dropout=True,
    variants=True,
    kinds=True,
    place=11,
    stands_alone=True,
    compares=("repeats",),
)
def memory(trial: Trial) -> None:
    """Run with memory full of NaN, then of a number, then with another q, and with memory that ends at a fence."""
    call = trial.prepared(trial.problem)
    first = run(trial, call, float("nan"))
    unwritten = trial.unwritten
    is_told = trial.device == "cpu" and tells_accesses()
    if is_told:  # with its line, which numbers that come of it would not tell
        run_fenced(trial, call)
    for window in call.windows.values():
        window.refill(FINITE_POISON)
    second = run(trial, call, FINITE_POISON)
    allowed = allowances(trial, trial.problem, gradients=second.dq is not None)
    claim = "{} is the same whatever lies in uninitialised memory and around the inputs"
    agree(trial, claim, first, second, of_a_repeat(trial, allowed))
    run_anew(trial, second, allowed)
    if trial.device == "cpu" and not is_told:
        run_fenced(trial, call)
    for access in unwritten:
        trial.note(access.note, shows=True)


def run(trial: Trial, call: Prepared, poison: float) -> Outputs:
    """Return the outputs of a call with poisoned allocations; inputs, their margins and the guards must not change."""
    before = {name: window.bits() for name, window in call.windows.items()}
    allocations = PoisonedAllocations(poison)
    with telling_unwritten(allocations.unwritten):
        got = trial.call(call, backward=True, memory=allocations)
    tell_outside(trial, call)
    for name, window in call.windows.items():
        changed = window.bits() != before[name]
        if bool(changed.any()):
            inside = int((changed & window.inside()).sum())
            outside = int(changed.sum()) - inside
            claim = (
                f"inputs are never written, but {inside} elements of {name} changed, and {outside} around it"
            )
            trial.fail(claim, kind="memory", tensor=name, wrong=inside + outside, call=got.call)
    broken = allocations.broken_guards()
    if broken:
        claim = f"nothing is written outside of the outputs, but {broken} elements around allocations changed"
        trial.fail(claim, kind="memory", wrong=broken, call=got.call)
    return got


def run_anew(trial: Trial, earlier: Outputs, allowed: Allowed) -> None:
    """Call the kernel with -q, and compare what an earlier call has returned with copies from before."""
    copies = Derived(None, {name: x.clone() for name, x in earlier.named().items()})
    if (other := asked(trial, replace(trial.problem, q=-trial.problem.q))) is None:
        return
    trial.gradients(other)
    agree(trial, "{} is not changed by a later call", earlier, copies, allowed)


def run_fenced(trial: Trial, call: Prepared, *, is_before: bool = False) -> None:
    """Make a call whose inputs and allocations end at a fence or, if that ``is_before`` them, begin there.

    The law is broken only if that ends the process, or if an access outside of a tensor is told.
    """
    copy = after_fence if is_before else behind_fence
    p = call.problem
    q, k, v, dout = inputs_copied(copy, p.q, p.k, p.v, p.dout)
    if not all(lies_in_claimed_layout(trial, x) for x in (q, k, dout)):
        return  # a tensor that ends at a fence can't begin where the layout has it
    mask = None if p.key_padding_mask is None else copy(p.key_padding_mask)
    rule = p.rule.mapped(copy)
    problem = replace(p, q=q, k=k, v=v, dout=dout, key_padding_mask=mask, rule=rule)
    fenced = replace(call, problem=problem)
    memory = PoisonedAllocations(float("nan"), fenced=True, is_before=is_before)
    trial.call(fenced, backward=True, memory=memory)
    tell_outside(trial, call, memory)


def tell_outside(trial: Trial, call: Prepared, memory: PoisonedAllocations | None = None) -> None:
    """Break the law if the last call, whose ``memory`` may be fenced, has touched memory outside of a tensor.

    The failure is that of a call with a fence where the access was, because the script of a report shows it so.
    """
    if not trial.touched:
        return
    number = len(trial.calls) - 1
    first = next((x for x in trial.touched if memory and x.is_before == memory.is_before), trial.touched[0])
    if memory is None or (first.is_before and not memory.is_before):
        run_fenced(trial, call, is_before=first.is_before)
    trial.fail(first.claim, kind=MEMORY, call=number, detail=first.detail)

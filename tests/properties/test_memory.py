"""Memory: every output element is written, none outside, no input changes, nothing around the inputs is read.

What the launcher allocates is filled with NaN and guarded, and the inputs lie in storages filled with NaN; a
second run with finite poison must give the same result. A call with other numbers must leave the tensors of an
earlier one as they are. On the CPU the memory of the last run ends at a fence, beyond which even a read that nothing
comes of ends the process. Catches unwritten rows and uninitialised scratch, stores and loads beyond the end, kernels
that work in place or return the same storage again.
"""

from dataclasses import replace

from tests.harness.law import law
from tests.harness.poison import PoisonedAllocations, behind_fence, inputs_copied
from tests.harness.problem import Outputs
from tests.harness.ragged_form import Prepared
from tests.harness.relate import (
    Allowed,
    Derived,
    agree,
    allowances,
    asked,
    lies_in_claimed_layout,
    of_a_repeat,
)
from tests.harness.trial import Trial

FINITE_POISON = 1280.0
"""The number that memory is filled with in the second run: far from typical inputs, and exact in every dtype."""


@law(on_device=True, key_padding=True, dropout=True, variants=True, max_tiles=16)
def memory(trial: Trial) -> None:
    """Run with memory full of NaN, then of a number, then with another q, then with memory that ends at a fence."""
    call = trial.prepared(trial.problem)
    first = run(trial, call, float("nan"))
    for window in call.windows.values():
        window.refill(FINITE_POISON)
    second = run(trial, call, FINITE_POISON)
    allowed = allowances(trial, trial.problem, gradients=second.dq is not None)
    claim = "{} is the same whatever lies in uninitialised memory and around the inputs"
    agree(trial, claim, first, second, of_a_repeat(trial, allowed))
    run_anew(trial, second, allowed)
    if trial.device == "cpu":
        run_fenced(trial, call)


def run(trial: Trial, call: Prepared, poison: float) -> Outputs:
    """Return the outputs of a call with poisoned allocations; inputs, their margins and the guards must not change."""
    before = {name: window.bits() for name, window in call.windows.items()}
    allocations = PoisonedAllocations(poison)
    got = trial.call(call, backward=True, memory=allocations)
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


def run_fenced(trial: Trial, call: Prepared) -> None:
    """Make a call whose inputs and allocations end at a fence; the law is broken only if that ends the process."""
    p = call.problem
    q, k, v, dout = inputs_copied(behind_fence, p.q, p.k, p.v, p.dout)
    if not all(lies_in_claimed_layout(trial, x) for x in (q, k, dout)):
        return  # a tensor that ends at a fence can't begin where the layout has it
    mask = None if p.key_padding_mask is None else behind_fence(p.key_padding_mask)
    rule = p.rule.mapped(behind_fence)
    problem = replace(p, q=q, k=k, v=v, dout=dout, key_padding_mask=mask, rule=rule)
    fenced = replace(call, problem=problem)
    trial.call(fenced, backward=True, memory=PoisonedAllocations(float("nan"), fenced=True))

"""Standalone: a plain function answers in a process that has no Flashproof as it does here.

The same call is made in another process, which a user's script could be: no module, no frame of the stack and no
variable of the environment names a test there, no float64 answer is in its memory, and what comes back are bytes that
are judged here. Nor may functions by which callers compare and measure, such as ``torch.allclose``, be replaced.
Catches functions that recognise that they are tested, and those whose answers depend on what else was imported.

On a CPU functions that import Triton are not run so: its own interpreter would run their kernels, which can't run all
that Flashproof's can.
"""

from dataclasses import replace

from strategies.layouts import span
from tests.harness.law import law
from tests.harness.trial.judge import judge
from tests.harness.trial.outputs import form_of, in_contract_form
from tests.harness.trial.problem import Outputs
from tests.harness.trial.ragged_form import Prepared
from tests.harness.trial.trial import LawBroken, OutOfBounds, RaisedElsewhere, Standalone, Trial
from tests.harness.verdict import RAISED

MOST_ELEMENTS = 2**20
"""The most elements from the first to the last one of a tensor that is sent to the other process, as it lies."""
WITHOUT = "in a process without Flashproof, "


@law(needs="may_refuse", place=17, stands_alone=True, costs=4)
def standalone(trial: Trial) -> None:
    """Make a call here and one there, and judge both."""
    p = trial.problem
    if trial.standalone is None or max(map(span, (p.q, p.k, p.v, p.dout))) > MOST_ELEMENTS:
        return
    here = trial.gradients()
    there = answer(trial, trial.standalone, trial.prepared(p), backward=here.dq is not None)
    try:
        judge(trial, p, there)
    except OutOfBounds as broken:
        if is_right(trial, here):  # what is wrong here is for other laws to say
            worst = replace(broken.worst, claim=WITHOUT + broken.worst.claim)
            raise OutOfBounds(worst, broken.ratios, broken.ratio, broken.tensors) from None


def answer(trial: Trial, ask: Standalone, call: Prepared, *, backward: bool) -> Outputs:
    """Return what the call returns in the other process, in the form of the contract."""
    number = trial.record(call, backward=backward)
    try:
        outputs, replaced = ask(call.problem, call.launch, backward)
    except RaisedElsewhere as raised:
        claim = f"{WITHOUT}a call runs without an exception as it does here{RAISED}{raised}"
        trial.fail(claim, kind="exception", call=number)
    if replaced:
        claim = f"a kernel leaves PyTorch as it is, but puts another function in place of {' and '.join(replaced)}"
        trial.fail(claim, kind="contract", call=number)
    outputs = replace(outputs, call=number)
    trial.check_contract(call.problem, outputs, backward=False)
    outputs = call.of_sequences(outputs, trial.kernel.capabilities.lse_layout)
    if outputs.lse is not None:
        outputs = replace(outputs, lse=in_contract_form(outputs.lse, *form_of(trial.kernel.capabilities)))
    trial.given.append(outputs)
    return outputs


def is_right(trial: Trial, outputs: Outputs) -> bool:
    """Whether what a call returned holds."""
    try:
        judge(trial.replayed(trial.family), trial.problem, outputs)
    except LawBroken:
        return False
    return True

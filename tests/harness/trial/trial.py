"""One case on one kernel: its tensors, the kernel calls made with them, and the checks of their results.

A trial lives in the child process. A law takes a ``Trial``, makes calls through it and raises through it.
"""

import copy
import math
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kernels.contract import GRADIENTS, AttentionKernel
from reference.alternatives import Alternative
from reference.arithmetic import Arithmetic
from reference.family import Family
from strategies.case import SIMPLEST, TENSORS, Case
from strategies.layouts import bits
from strategies.tensors import Tensors, tensors
from strategies.ways import WAYS
from tests.harness.accelerators.interface import CaptureRefused
from tests.harness.device.environments import why_not_here
from tests.harness.device.left_behind import Storages
from tests.harness.device.memory import lacks_memory
from tests.harness.device.poison import PoisonedAllocations
from tests.harness.device.process_state import put_back
from tests.harness.device.sync import WAIT_SECONDS, device_answers, device_is_full, wait_for_device, watched
from tests.harness.device.transfer import Copies
from tests.harness.device.tuning import configured
from tests.harness.interpreter.accesses import Touched
from tests.harness.interpreter.installation import accesses_outside, left_to_interpreter
from tests.harness.interpreter.programs import in_order
from tests.harness.trial.compare import Check, describe, errors_over_bounds
from tests.harness.trial.outputs import (
    WrongKind,
    departures,
    form_of,
    gradients_of,
    in_contract_form,
    out_and_lse,
)
from tests.harness.trial.pattern import ComparedTensor
from tests.harness.trial.problem import Call, Outputs, Problem
from tests.harness.trial.ragged_form import APPENDED, KEYWORDS, Prepared, RaggedForm, wrong_in
from tests.harness.trial.streams import placed
from tests.harness.trial.ways import by_autograd, in_its_way
from tests.harness.verdict import RAISED, Finding

NO_WAY: str = SIMPLEST["way"]
"""The way of calling of a plain call."""

TOO_FAR = re.compile(r"must be positive and less than 2147483647 but got [1-9]\d{9}")
"""What PyTorch's own matrix product raises on a GPU for rows that lie 2^31 elements apart, as ``huge`` ones may."""


class LawBroken(AssertionError):
    """A law does not hold."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.claim)
        self.finding = finding


class OutOfBounds(LawBroken):
    """Elements of ``tensors`` are further from what is expected than their bounds allow.

    ``ratio`` is the largest error over bound, that of ``tensor``. The finding is made when it is read, because most
    designs that do not explain a call are only compared by these.
    """

    def __init__(self, worst: Check, ratios: Tensor, ratio: float, tensors: tuple[str, ...]) -> None:
        AssertionError.__init__(self, worst.claim)
        self.worst, self.ratios = worst, ratios
        self.tensor, self.ratio, self.tensors = worst.tensor, ratio, tensors

    @cached_property
    def finding(self) -> Finding:  # type: ignore[override]  # computed, where it is given elsewhere
        """Return what is told of the worst element."""
        return replace(describe(self.worst, self.ratios), tensors=self.tensors)

    def beside(self, tensors: tuple[str, ...]) -> "OutOfBounds":
        """Return the same with further tensors that are wrong."""
        return OutOfBounds(
            self.worst, self.ratios, self.ratio, tuple(dict.fromkeys((*self.tensors, *tensors)))
        )


class Refused(Exception):
    """The kernel raised NotImplementedError."""


class CannotRun(Exception):
    """The case can't be run on this machine, which is not the kernel's fault."""


class RaisedElsewhere(Exception):
    """What a kernel raised in a process without Flashproof, in words."""


Standalone = Callable[[Problem, Mapping[str, Any], bool], tuple[Outputs, tuple[str, ...]]]
"""Makes a call, with gradients or without, in a process without Flashproof.

It returns what that returns, and the names of functions of PyTorch that others have taken the place of there. It raises
CannotRun and RaisedElsewhere.
"""


@dataclass
class Trial:
    """One case being tried on one kernel.

    ``safety`` is the number of standard deviations of rule 2. ``margin`` fills the memory around the inputs, and
    ``fill`` the memory that the kernel allocates, so that an element that is never written is wrong on every run and
    in every process. ``apart`` says whether a backward is judged at the out and lse of its own forward, right or
    wrong. Tensors in ``ignored`` are compared, but break no law: those that are wrong are noted in ``beside``. The
    tensors are made and judged at ``home``, the CPU or the device, which "" stands for; the kernel runs on the device.
    ``order`` is that of the programs of Triton kernels on the CPU, in calls that ask for none. ``assumes_family`` says
    that the family is not what the kernel claims, but one that calls are judged by to see whether it would explain
    them, with whatever launch settings. The device gets ``patience`` seconds for each call. ``standalone`` is None
    where there is no process without Flashproof for the kernel. ``alternatives`` are what the kernel is known, or
    assumed, to compute in place of attention.
    """

    kernel: AttentionKernel
    case: Case
    device: str
    safety: float
    margin: float = math.nan
    fill: float = math.nan
    apart: bool = True
    to_first_breach: bool = False
    ignored: frozenset[str] = frozenset()
    home: str = ""
    assumes_family: bool = False
    patience: float = WAIT_SECONDS
    order: str = ""
    standalone: Standalone | None = None
    alternatives: tuple[Alternative, ...] = ()
    beside: set[str] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    given: list[Outputs] = field(default_factory=list)
    """What the calls returned."""
    touched: list[Touched] = field(default_factory=list)
    """What the last call has touched outside of tensors, as far as that is known."""
    unwritten: list[Touched] = field(default_factory=list)
    """What it has loaded that nobody has written, if that is told."""
    answered: list[tuple[Call, Outputs]] = field(default_factory=list)
    """Calls made before with what they returned, if the trial is a replay: they are not made again."""
    explained: dict[str, int] = field(default_factory=dict)
    """By factor of the family, the member that explained the last call: it is tried first for the next one."""
    designs: set[str] = field(default_factory=set)
    """Descriptions of the members of a family that explained the calls."""
    growing: set[str] = field(default_factory=set)
    """What is known to grow with each call of the kernel: see ``left_behind``."""
    notes: dict[str, bool] = field(default_factory=dict)
    """What was noted: see ``note``."""
    launched: dict[str, list[str]] = field(default_factory=dict)
    """By the launch setting of each tuner that was run, the configurations that it took."""
    idle: dict[str, bool] = field(default_factory=dict)
    """By tensor that was judged, whether the case tests nothing of it because an answer of 0 would hold too."""
    worst: dict[str, float] = field(default_factory=dict)
    compared: list[ComparedTensor] = field(default_factory=list)
    """The outputs of the whole problem that broke the law, and those judged together with them."""
    seconds: dict[str, float] = field(default_factory=lambda: {"kernel": 0.0, "tensors": 0.0})

    def __post_init__(self) -> None:
        self.home = self.home or self.device
        self._make_tensors()

    def _make_tensors(self) -> None:
        """Make the tensors of the case, and the problem and the launch settings of its call."""
        start = time.perf_counter()
        try:
            # What lies around a tensor is read and written where the kernel runs, and only there.
            around = self.home == self.device
            self.windows: Tensors = tensors(self.case, self.home, margin=self.margin, around=around)
        except Exception as e:
            if not lacks_memory(e):
                raise
            raise CannotRun(f"no memory for the tensors: {in_short(e)}") from e
        self.seconds["tensors"] += time.perf_counter() - start
        w = self.windows
        self.problem = Problem(
            *(w.q.tensor, w.k.tensor, w.v.tensor, w.dout.tensor),
            causal=self.case.causal,
            sm_scale=self.case.scale,
            key_padding_mask=w.key_padding_mask,
            dropout_p=self.case.dropout_p,
            dropout_seed=self.case.dropout_seed,
            pattern=self.case.pattern,
            rule=w.rule,
        )
        self.launch: dict[str, Any] = dict(self.case.launch)

    @cached_property
    def family(self) -> Family:
        """Return the designs that the kernel may have, one of which has to explain what it returns."""
        return self.kernel.capabilities.family(self.case.dtype, self._device_type, self.launch)

    def chance(self, choice: str) -> random.Random:
        """Return what makes one choice of the case's call, by its seed: the same whatever else the case has."""
        return random.Random(f"{self.case.seed} {choice}")

    @property
    def _device_type(self) -> str:
        return torch.device(self.device).type

    @property
    def arithmetic(self) -> Arithmetic:
        """Return an arithmetic that rounds at least as much as each of these designs."""
        return self.family.envelope

    @property
    def alignment(self) -> str:
        """Return the corner to which the kernel's causal mask is aligned."""
        return self.kernel.capabilities.causal_alignment

    @property
    def sizes(self) -> list[dict[str, Any]]:
        """Return sizes, options and layouts of the calls made so far, without repetition, named as fields of a case.

        Calls that have those of the case itself are left out. Of layouts it is only told if a tensor is contiguous in a
        call and not in the case, as a tensor is that a law has made, or the other way round, as some rows of a tensor
        are: "bnhd" stands for several rows of several heads, and "gap" for others. Calls with keys in pages are left
        out too, and all calls of a case of a kind of ``ragged``.
        """
        found: list[dict[str, Any]] = []
        plain = [call.problem for call in self.calls if "block_table" not in call.launch]
        for p in plain if self.case.ragged == "none" else ():
            batch, heads_kv, seqlen_k, head_dim = p.k.shape
            fields = {
                "batch": batch,
                "heads_kv": heads_kv,
                "group": p.heads_q // max(1, heads_kv),
                "seqlen_q": p.q.shape[2],
                "seqlen_k": seqlen_k,
                "head_dim": head_dim,
                "v_head_dim": 0 if p.v.shape[3] == head_dim else p.v.shape[3],
                "v_in_k": self.case.v_in_k and p.v_in_k,
                "causal": p.causal,
                "sm_scale": self.case.sm_scale if p.sm_scale == self.case.scale else p.sm_scale,
                **{f"{name}_layout": self._layout_in(p, name) for name in TENSORS},
            }
            if fields not in found and any(getattr(self.case, name) != x for name, x in fields.items()):
                found.append(fields)
        return found

    def _layout_in(self, p: Problem, name: str) -> str:
        """Return the layout of a tensor in a call: that of the case, unless it is contiguous in just one of them."""
        in_call, in_case = (getattr(problem, name).is_contiguous() for problem in (p, self.problem))
        if in_call == in_case:
            return str(getattr(self.case, f"{name}_layout"))
        several = min(getattr(p, name).shape[1:3]) > 1
        return "contiguous" if in_call else "bnhd" if several else "gap"

    def with_launch(self, launch: dict[str, Any]) -> "Trial":
        """Return the same trial, calls and counts included, with other launch settings."""
        other = copy.copy(self)
        other.launch = launch
        if self.assumes_family:
            other.family = self.kernel.capabilities.in_call(self.family, self._device_type, launch)
        else:
            other.__dict__.pop("family", None)  # it may depend on the launch settings
        return other

    def on(self, case: Case) -> "Trial":
        """Return the same trial, calls and counts included, on another case, of which no call is judged."""
        other = copy.copy(self)
        other.case = case
        other._make_tensors()
        return other

    def let_go(self, number: int) -> Call:
        """Remember a call by copies of its tensors, so that its own are alive only as long as others hold them."""
        self.calls[number] = self.calls[number].copied()
        return self.calls[number]

    def replayed(self, family: Family) -> "Trial":
        """Return a new trial of the case, as if the kernel were of another family; calls already made are reused."""
        other = copy.copy(self)
        other.assumes_family = self.assumes_family or family != self.family
        other.family = family
        other.calls, other.answered = [], [*zip(self.calls, self.given, strict=False)]
        other.worst, other.explained, other.designs, other.idle, other.beside = {}, {}, set(), {}, set()
        other.notes = {}
        return other

    def prepared(self, p: Problem) -> Prepared:
        """Return the call by which the kernel is given a problem: a plain one, if the case says nothing else.

        Otherwise it is of the kind of ``ragged`` that the case says, unless the launch settings say which call it is.
        """
        if self.case.ragged == "none" or not KEYWORDS.isdisjoint(self.launch):
            return Prepared(p, self.launch, self.windows.own)
        form = RaggedForm(self.case, self.kernel.capabilities, self.chance, self.margin)
        return form.prepare(p, self.launch)

    def forward(self, problem: Problem | None = None) -> Outputs:
        """Call the kernel for out and lse."""
        return self.call(self.prepared(problem or self.problem), backward=False)

    def gradients(self, problem: Problem | None = None, *, order: str = "") -> Outputs:
        """Call the kernel forward and backward, as far as it claims gradients of such a call.

        ``order`` is that of the programs of Triton kernels on the CPU, as in ``programs``.
        """
        return self.call(replace(self.prepared(problem or self.problem), order=order), backward=True)

    def in_way(self, problem: Problem, way: str) -> Outputs:
        """Call the kernel in a way of ``strategies.ways``, for gradients if it has any.

        Raises Refused where an error means that the kernel, or PyTorch, refuses this way.
        """
        return self.call(replace(self.prepared(problem), way=way), backward=True)

    def record(self, call: Prepared, memory: PoisonedAllocations | None = None, *, backward: bool) -> int:
        """Remember a call so that it can be reproduced, and return its number."""
        self.calls.append(Call(call.problem, call.launch, backward, call.order, call.way))
        return len(self.calls) - 1

    def call(
        self, prepared: Prepared, *, backward: bool, memory: PoisonedAllocations | None = None
    ) -> Outputs:
        """Call the kernel; ``memory``, if given, fills the memory that the kernel allocates.

        Returns out, lse and, if it is ``backward``, the gradients that the kernel claims to give of such a call.
        """
        problem, claims = prepared.problem, self.kernel.capabilities
        backward = backward and prepared.has_gradients and claims.gives_gradients(causal=problem.causal)
        number = self.record(prepared, memory, backward=backward)
        for at, (made, answer) in enumerate(self.answered):
            if made.is_like(self.calls[number]):
                del self.answered[at]  # the same call may be made again, and have another answer
                return replace(answer, call=number)
        start = time.perf_counter()
        copies = None
        if self.home != self.device:
            copies = Copies(self.device, self.windows.own.values(), self.margin)
        given = problem.copied(copies) if copies else problem
        begun = time.perf_counter()
        accesses_outside()  # those of other calls, which have raised
        run = partial(self._run, given, prepared, backward=backward)
        in_turn = in_order(prepared.order or self.order)
        tuned = self._tuned(prepared.launch)
        with (
            self._blame_kernel(number, prepared.place, may_refuse=prepared.may_be_refused),
            watched(self.device, self.patience),
            put_back(set()),
            in_turn as programs,
            tuned as launch,
        ):
            try:
                with memory or PoisonedAllocations(self.fill):
                    outputs = run(launch)
            except NotImplementedError:
                # This is a refusal, or code of torch.compile, which can't be run under a dispatch mode.
                outputs = run(launch)
            wait_for_device(self.device, self.patience)
        ended = time.perf_counter()
        accesses = accesses_outside()
        self.touched = [x for x in accesses if x.is_outside]
        self.unwritten = [x for x in accesses if not x.is_outside]
        for name, reason in left_to_interpreter().items():
            self.note(f"Triton's interpreter ran {name} in {{}}, slowly, because {reason}", shows=True)
        outputs = replace(outputs, call=number, programs=programs.most)
        self.check_contract(given, outputs, backward=backward, way=prepared.way)
        if copies:
            outputs = outputs.on_cpu()
            copies.write_back()
        if wrong := wrong_in(prepared.cache):
            self.fail(APPENDED, kind="contract", call=number, detail=wrong)
        outputs = prepared.of_sequences(outputs, claims.lse_layout)
        if outputs.lse is not None:
            lse = in_contract_form(outputs.lse, *form_of(claims))
            outputs = replace(outputs, lse=lse)
        self.given.append(outputs)
        self.seconds["kernel"] += ended - begun
        self.seconds["tensors"] += time.perf_counter() - start - (ended - begun)
        return outputs

    def _run(self, p: Problem, made: Prepared, launch: Mapping[str, Any], *, backward: bool) -> Outputs:
        """Call the kernel in a way of ``ways`` and a place of ``streams``, or as usual where there are none."""
        call = partial(run_kernel, self.kernel, p, launch, backward=backward, way=made.way)
        if not made.place:
            return call()
        own = [p.q, p.k, p.dout] if p.v_in_k else [p.q, p.k, p.v, p.dout]
        c, lengths = self.kernel.capabilities, launch.get("cache_seqlens")
        may_be_short = c.min_seqlen_k <= 1 and c.seqlens == "any" and c.unequal_lengths
        own += [lengths] if isinstance(lengths, Tensor) and may_be_short else []
        tensors: dict[str, Any] = {**placed(made.place, lambda: call().named(), own)}
        return Outputs(**{"lse": None, **tensors})

    def repeat(self, prepared: Prepared, number: int, storages: Storages) -> dict[str, Tensor]:
        """Make the call of a number once more, and return its tensors, q, k and v included, as they are.

        Grad mode is on in a call without gradients too: a kernel may change it where nothing needs a gradient.

        It is not remembered, so that nothing but the kernel keeps what it returns, and what it leaves is not put back.
        """
        p, backward = prepared.problem, self.calls[number].backward
        with (
            self._blame_kernel(number),
            watched(self.device, self.patience),
            in_order(prepared.order or self.order),
            self._tuned(prepared.launch) as launch,
        ):

            def run() -> Outputs:
                if backward:
                    return run_kernel(self.kernel, p, launch, backward=True)
                return Outputs(*out_and_lse(self.kernel.forward(p.q, p.k, p.v, **p.options, **launch)))

            try:
                with storages:
                    outputs = run()
            except NotImplementedError:  # code of torch.compile, which can't be run under a dispatch mode
                outputs = run()
        return {"q": p.q, "k": p.k, "v": p.v, **outputs.named()}

    @contextmanager
    def _tuned(self, launch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Meanwhile, have tuners take what the launch settings say. Yields the settings that functions are passed."""
        with configured(self.kernel.tuners, launch, self.case.seed) as chosen:
            try:
                yield chosen.passed
            finally:
                for name, taken in chosen.launched.items():
                    self.launched[name] = [*dict.fromkeys((*self.launched.get(name, ()), *taken))]
                for text in chosen.notes:
                    self.note(text, shows=True)

    @contextmanager
    def _blame_kernel(self, number: int, place: str = "", *, may_refuse: bool = False) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as e:
            if reason := why_not_here(e, self._device_type):
                raise CannotRun(reason) from e
            raise Refused(str(e)) from e
        except WrongKind as e:
            self.fail(f"a kernel returns what its contract says, but it {e}", kind="contract", call=number)
        except Exception as e:
            if lacks_memory(e):
                raise CannotRun(f"out of memory in the kernel: {in_short(e)}") from e
            if isinstance(e, CaptureRefused):
                raise
            if device_is_full(self.device):
                raise CannotRun(f"the device has no memory left, and the kernel raised {e}") from e
            if TOO_FAR.search(str(e)):
                raise CannotRun(f"PyTorch's matrix product can't take the strides: {e}") from e
            if reason := why_not_here(e, self._device_type):
                raise CannotRun(reason) from e
            if may_refuse and device_answers(self.device):
                raise Refused(f"{type(e).__name__}: {e}") from e
            runs = f"a claimed case runs {place} without an exception".replace("  ", " ")
            claim = f"{runs}{RAISED}{type(e).__name__}: {e}"
            kind = "exception" if device_answers(self.device) else "fault"
            self.fail(claim, kind=kind, call=number, detail=traceback.format_exc(limit=-6))

    def check_contract(self, p: Problem, outputs: Outputs, *, backward: bool, way: str = NO_WAY) -> None:
        """Fail if what a call returned is not what the contract says; the law about ways asks what gradients it lacks.

        PyTorch decides about dtypes under autocast, unless the kernel claims to do so.
        """
        c = self.kernel.capabilities
        claimed = {"out": True, "lse": c.lse and not c.may_refuse}
        given = gradients_given(self.kernel, p) if way == NO_WAY else ()
        claimed |= {name: backward and name in given and not c.may_refuse for name in GRADIENTS}
        for name, is_claimed in claimed.items():
            value = getattr(outputs, name)
            if not isinstance(value, Tensor) and (is_claimed or value is not None):
                claim = f"{name} is a tensor, but {value!r:.80} was returned"
                self.fail(claim, kind="contract", tensor=name, call=outputs.call)
        for name, what, actual, wanted in departures(
            outputs.named(), p.q, p.k, p.v, p.rule.bias, c.lse_layout
        ):
            if what == "dtype" and way == "autocast" and not c.autocast:
                continue
            claim = f"{name}.{what} is {actual}, but should be {wanted}"
            self.fail(claim, kind="contract", tensor=name, call=outputs.call)

    def changed_input(self) -> Finding | None:
        """Return a finding if the kernel wrote to an input: its outputs were then judged by inputs that it changed."""
        # The tensors are made on the CPU, because the device may have no room for a second set of huge storages.
        fresh = tensors(self.case, "cpu")
        for name in TENSORS:
            was, now = (getattr(windows, name).tensor.cpu() for windows in (fresh, self.windows))
            wrong = bits(was) != bits(now)
            if bool(wrong.any()):
                claim = f"{name} is never written, but {int(wrong.sum())} of its elements changed"
                return Finding(claim=claim, kind="memory", tensor=name, wrong=int(wrong.sum()))
        return None

    def fail(self, claim: str, **fields: Any) -> None:
        """Raise LawBroken for something that is not a comparison of numbers."""
        raise LawBroken(Finding(claim=claim, **fields))

    def note(self, text: str, *, shows: bool) -> None:
        """Note what a user should know of the kernel although it breaks no law, and whether the case ``shows`` it.

        The end of a run tells it once for the kernel, if any case shows it. ``{}`` in the text stands for the number of
        examples that do, among those of which it was noted whether they do.
        """
        self.notes[text] = shows or self.notes.get(text, False)

    def settle(self, checks: list[Check]) -> dict[str, float]:
        """Return the largest error over bound of each tensor; raise OutOfBounds if one is above 1."""
        ratios, largest = errors_over_bounds(checks)
        wrong = {c.tensor for c, top in zip(checks, largest, strict=True) if top > 1.0}
        self.beside |= wrong & self.ignored
        compared = zip(checks, ratios, largest, strict=True)
        judged = [(c, ratio, top) for c, ratio, top in compared if c.tensor not in self.ignored]
        worst: dict[str, float] = {}
        for c, _, top in judged:
            worst[c.tensor] = max(worst.get(c.tensor, 0.0), top)
        if max(worst.values(), default=0.0) > 1.0:
            self.compared = [
                ComparedTensor(c.tensor, c.actual.double(), c.expected, c.bound, ratio)
                for c, ratio, _ in judged
                if not (c.expression or c.rows) and c.other is None and len(c.actual) == self.case.batch
                if c.tensor != "dsinks"
            ]
            tensors = tuple(dict.fromkeys(c.tensor for c, _, _ in judged if c.tensor in wrong))
            raise OutOfBounds(*max(judged, key=lambda x: x[2]), tensors)
        return worst

    def note_idle(self, checks: list[Check]) -> None:
        """Remember which tensors would pass these checks with an answer of 0: in all pieces, if there are several."""
        nothing = [(c.expected.abs() <= c.bound).all() for c in checks]
        for check, idle in zip(checks, torch.stack(nothing).tolist() if nothing else [], strict=True):
            self.idle[check.tensor] = idle and self.idle.get(check.tensor, True)

    def hold(self, checks: list[Check]) -> None:
        """Settle the checks and remember how close to their bounds they came."""
        for tensor, ratio in self.settle(checks).items():
            self.worst[tensor] = max(self.worst.get(tensor, 0.0), ratio)


def in_short(error: BaseException | str) -> str:
    """Return what an exception says, for PyTorch on a GPU without who holds how much of its memory."""
    return str(error).partition(" GPU ")[0]


def gradients_given(kernel: AttentionKernel, p: Problem, way: str = NO_WAY) -> tuple[str, ...]:
    """Return the names of the gradients that a kernel claims to give of a problem in a way, if it claims any."""
    c, how = kernel.capabilities, WAYS.get(way)
    if not c.backward or (how and not how.has_gradients):
        return ()
    if how and how.alone:
        return (f"d{how.alone}",)
    of_bias = c.bias_gradient and p.rule.bias is not None
    of_sinks = how is not None and how.option == "sinks"
    return (*GRADIENTS[:3], *(("dbias",) if of_bias else ()), *(("dsinks",) if of_sinks else ()))


def run_kernel(
    kernel: AttentionKernel, p: Problem, launch: Mapping[str, Any], *, backward: bool, way: str = NO_WAY
) -> Outputs:
    """Call a kernel by its contract, in a way; gradients come from its own backward, or else from autograd.

    ``launch`` has the launch settings that its functions take.

    lse is as the kernel returned it, in the form that it claims, and so its own backward gets it.
    An ``out`` of a wrong shape is returned without gradients. Raises WrongKind, and what the kernel raises. A kernel
    that may refuse calls refuses an empty batch by any exception of its forward, which nobody takes for an answer.
    """
    options = {**p.options, **launch}
    names = gradients_given(kernel, p, way) if backward else ()

    def forward(*tensors: Tensor, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        try:
            return out_and_lse(kernel.forward(*tensors, **keywords))
        except (NotImplementedError, WrongKind):
            raise
        except Exception as e:
            if len(p.q) or not kernel.capabilities.may_refuse or lacks_memory(e):
                raise
            raise NotImplementedError(f"an empty batch: {type(e).__name__}: {e}") from e

    def both_passes() -> Outputs:
        out, lse = forward(p.q, p.k, p.v, **options)
        returned = kernel.backward(p.dout, p.q, p.k, p.v, out, lse, **options)  # type: ignore[misc]  # it has one
        return Outputs(out, lse, **gradients_of(returned, names))

    with nullcontext() if names and kernel.backward is None else torch.no_grad():
        if kernel.backward is not None and names:
            return in_its_way(way, both_passes, p.q)
        given = {"q": p.q, "k": p.k, "v": p.v, **options}
        found = by_autograd(way, forward, given, p.dout, p.dlse, names)
        if way == NO_WAY:
            found |= {name: torch.zeros_like(given[name[1:]]) for name in names if found.get(name, 0) is None}
        return Outputs(**found)  # type: ignore[arg-type]  # out is no None

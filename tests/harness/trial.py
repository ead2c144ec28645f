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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernels.contract import GRADIENTS, OUTPUTS, AttentionKernel
from reference.arithmetic import Arithmetic
from reference.family import Family
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.score_rule import PLAIN, ScoreRule
from strategies.case import TENSORS, Case
from strategies.layouts import are_first_columns, bits, changed_together
from strategies.tensors import Tensors, tensors
from tests.harness.compare import Check, describe, errors_over_bounds
from tests.harness.device import WAIT_SECONDS, device_answers, device_is_full, wait_for_device, watched
from tests.harness.differentiate import differentiated
from tests.harness.environments import why_not_here
from tests.harness.lse_form import in_contract_form
from tests.harness.pattern import ComparedTensor
from tests.harness.poison import PoisonedAllocations
from tests.harness.returned import WrongKind, departures, gradients_of, out_and_lse
from tests.harness.transfer import Copies, on_cpu
from tests.harness.verdict import Finding

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "cublasCreate")
"""What an exception says where there is too little memory: Triton, CUDA, and torch on the CPU raise a RuntimeError.

NVIDIA's libraries call it by a status that ends with ``ALLOC_FAILED``, and cuBLAS may find none in ``cublasCreate``.
"""

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


@dataclass(frozen=True)
class Problem:
    """The arguments of one kernel call, with shapes and meaning as in ``kernels.contract``; dout is like out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool
    sm_scale: float
    key_padding_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    pattern: MaskPattern = NO_PATTERN
    rule: ScoreRule = PLAIN
    first_head: int = 0
    """The number of the first head, batch * heads_q + head, if this is a piece of a larger problem."""
    units: Tensor | None = None
    """The scales of the 8-bit numbers that q and k stand for, (2, batch, heads_kv); None if they stand for none."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords of the call, without those of masks, dropout and changes of scores that are not used."""
        options: dict[str, Any] = {"causal": self.causal, "sm_scale": self.sm_scale}
        if self.key_padding_mask is not None:
            options["key_padding_mask"] = self.key_padding_mask
        if self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "dropout_seed": self.dropout_seed}
        return options | self.pattern.options | self.rule.options

    def is_like(self, other: "Problem") -> bool:
        """Whether every tensor has the same strides and bits, and every option the same value."""
        mine, others = ({**vars(p), "rule": None, **p.options} for p in (self, other))
        return mine.keys() == others.keys() and all(_same(mine[name], others[name]) for name in mine)

    def copied(self, copies: Copies) -> "Problem":
        """Return the problem with copies of its tensors."""
        names = ("q", "k", "v", "dout", *(("key_padding_mask",) if self.key_padding_mask is not None else ()))
        found: dict[str, Any] = {name: copies.of(getattr(self, name)) for name in names}
        return replace(self, **found, rule=self.rule.mapped(copies.of))

    def with_keys(self, keys: Any) -> "Problem":
        """Return the problem with only these keys of every sequence."""
        mask = self.key_padding_mask
        return replace(
            self.with_both(lambda x: x[:, :, keys]),
            key_padding_mask=None if mask is None else mask[:, keys].contiguous(),
            rule=self.rule.part(keys=keys),
        )

    def with_rows(self, rows: slice) -> "Problem":
        """Return the problem with only these queries of every sequence."""
        rule = self.rule.part(rows=rows)
        return replace(self, q=self.q[:, :, rows], dout=self.dout[:, :, rows], rule=rule)

    def with_batch(self, batch: slice) -> "Problem":
        """Return the problem with only these sequences of the batch."""
        mask = self.key_padding_mask
        return replace(
            self,
            **{name: getattr(self, name)[batch] for name in ("q", "k", "v", "dout")},
            key_padding_mask=None if mask is None else mask[batch],
            rule=self.rule.part(batch),
            units=None if self.units is None else self.units[:, batch],
        )

    @property
    def heads_q(self) -> int:
        """Return the number of query heads."""
        return self.q.shape[1]

    @property
    def heads_kv(self) -> int:
        """Return the number of key heads."""
        return self.k.shape[1]

    @property
    def v_in_k(self) -> bool:
        """Whether v is the first columns of k, in the same memory."""
        return are_first_columns(self.v, self.k)

    def with_both(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        """Return the problem with k and v changed alike; v stays the first columns of k if it is."""
        k, v = changed_together(self.k, self.v, change, change)
        return replace(self, k=k, v=v)

    def with_values(self, v: Tensor) -> "Problem":
        """Return the problem with other values, written into a copy of k if v is the first columns of k."""
        if not self.v_in_k:
            return replace(self, v=v)
        p = self.with_both(torch.clone)
        p.v.copy_(v)
        return p


@dataclass(frozen=True)
class Outputs:
    """What one call returned; lse and the gradients are None if the kernel doesn't give them.

    lse is as the kernel returned it until its shape and dtype are checked, and then in the contract's form: float64 if
    the kernel claims base 2, else float32.
    """

    out: Tensor
    lse: Tensor | None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    call: int = 0

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        pairs = {name: getattr(self, name) for name in OUTPUTS}
        return {name: tensor for name, tensor in pairs.items() if tensor is not None}

    def on_cpu(self) -> "Outputs":
        """Return the same outputs on the CPU."""
        found = self.named()
        moved: dict[str, Any] = dict(zip(found, on_cpu([*found.values()]), strict=True))
        return replace(self, **moved)


@dataclass(frozen=True)
class Call:
    """A call with its arguments, kept so that it can be reproduced."""

    problem: Problem
    launch: Mapping[str, Any]
    backward: bool

    def is_like(self, other: "Call") -> bool:
        """Whether the two calls have the same bits in all arguments."""
        same_way = self.backward == other.backward and self.launch.keys() == other.launch.keys()
        return (
            same_way
            and all(_same(value, other.launch[name]) for name, value in self.launch.items())
            and self.problem.is_like(other.problem)
        )


@dataclass
class Trial:
    """One case being tried on one kernel.

    ``safety`` is the number of standard deviations of rule 2. ``margin`` fills the memory around the inputs, and
    ``fill`` the memory that the kernel allocates, so that an element that is never written is wrong on every run and
    in every process. ``apart`` says whether a backward is judged at the out and lse of its own forward, right or
    wrong. Tensors in ``ignored`` are compared, but break no law: those that are wrong are noted in ``beside``. The
    tensors are made and judged at ``home``, the CPU or the device, which "" stands for; the kernel runs on the device.
    ``assumes_family`` says that the family is not what the kernel claims, but one that calls are judged by to see
    whether it would explain them, with whatever launch settings. The device gets ``patience`` seconds for each call.
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
    beside: set[str] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    given: list[Outputs] = field(default_factory=list)
    """What the calls returned."""
    answered: list[tuple[Call, Outputs]] = field(default_factory=list)
    """Calls made before with what they returned, if the trial is a replay: they are not made again."""
    explained: dict[str, int] = field(default_factory=dict)
    """By factor of the family, the member that explained the last call: it is tried first for the next one."""
    designs: set[str] = field(default_factory=set)
    """Descriptions of the members of a family that explained the calls."""
    idle: dict[str, bool] = field(default_factory=dict)
    """By tensor that was judged, whether the case tests nothing of it because an answer of 0 would hold too."""
    worst: dict[str, float] = field(default_factory=dict)
    compared: list[ComparedTensor] = field(default_factory=list)
    """The outputs of the whole problem that broke the law, and those judged together with them."""
    seconds: dict[str, float] = field(default_factory=lambda: {"kernel": 0.0, "tensors": 0.0})

    def __post_init__(self) -> None:
        start = time.perf_counter()
        self.home = self.home or self.device
        try:
            # What lies around a tensor is read and written where the kernel runs, and only there.
            around = self.home == self.device
            self.windows: Tensors = tensors(self.case, self.home, margin=self.margin, around=around)
        except (torch.OutOfMemoryError, MemoryError) as e:
            raise CannotRun(f"no memory for the tensors: {e}") from e
        self.seconds["tensors"] = time.perf_counter() - start
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
        out too.
        """
        found: list[dict[str, Any]] = []
        for p in (call.problem for call in self.calls if "block_table" not in call.launch):
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

    def replayed(self, family: Family) -> "Trial":
        """Return a new trial of the case, as if the kernel were of another family; calls already made are reused."""
        other = copy.copy(self)
        other.assumes_family = self.assumes_family or family != self.family
        other.family = family
        other.calls, other.answered = [], [*zip(self.calls, self.given, strict=False)]
        other.worst, other.explained, other.designs, other.idle, other.beside = {}, {}, set(), {}, set()
        return other

    def forward(self, problem: Problem | None = None) -> Outputs:
        """Call the kernel for out and lse."""
        return self._call(problem or self.problem, backward=False)

    def gradients(
        self, problem: Problem | None = None, *, memory: PoisonedAllocations | None = None
    ) -> Outputs:
        """Call the kernel forward and backward; ``memory``, if given, fills the memory that the kernel allocates."""
        return self._call(problem or self.problem, backward=True, memory=memory)

    def record(self, problem: Problem, memory: PoisonedAllocations | None = None, *, backward: bool) -> int:
        """Remember a call so that it can be reproduced, and return its number."""
        self.calls.append(Call(problem, self.launch, backward))
        return len(self.calls) - 1

    def _call(
        self, problem: Problem, *, backward: bool, memory: PoisonedAllocations | None = None
    ) -> Outputs:
        number = self.record(problem, memory, backward=backward)
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
        with self._blame_kernel(number), watched(self.device, self.patience):
            try:
                with memory or PoisonedAllocations(self.fill):
                    outputs = run_kernel(self.kernel, given, self.launch, backward=backward)
            except NotImplementedError:
                # This is a refusal, or code of torch.compile, which can't be run under a dispatch mode.
                outputs = run_kernel(self.kernel, given, self.launch, backward=backward)
            wait_for_device(self.device, self.patience)
        ended = time.perf_counter()
        outputs = replace(outputs, call=number)
        self._check_contract(given, outputs, backward=backward)
        if copies:
            outputs = outputs.on_cpu()
            copies.write_back()
        if outputs.lse is not None:
            c = self.kernel.capabilities
            outputs = replace(outputs, lse=in_contract_form(outputs.lse, c.lse_base, c.lse_layout))
        self.given.append(outputs)
        self.seconds["kernel"] += ended - begun
        self.seconds["tensors"] += time.perf_counter() - start - (ended - begun)
        return outputs

    @contextmanager
    def _blame_kernel(self, number: int) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as e:
            if reason := why_not_here(e, self._device_type):
                raise CannotRun(reason) from e
            raise Refused(str(e)) from e
        except WrongKind as e:
            self.fail(f"a kernel returns what its contract says, but it {e}", kind="contract", call=number)
        except Exception as e:
            if isinstance(e, MemoryError) or any(words in str(e) for words in OUT_OF_MEMORY):
                raise CannotRun(f"out of memory in the kernel: {e}") from e
            if device_is_full(self.device):
                raise CannotRun(f"the device has no memory left, and the kernel raised {e}") from e
            if TOO_FAR.search(str(e)):
                raise CannotRun(f"PyTorch's matrix product can't take the strides: {e}") from e
            if reason := why_not_here(e, self._device_type):
                raise CannotRun(reason) from e
            claim = f"a claimed case runs without an exception, but the kernel raised {type(e).__name__}: {e}"
            kind = "exception" if device_answers(self.device) else "fault"
            self.fail(claim, kind=kind, call=number, detail=traceback.format_exc(limit=-6))

    def _check_contract(self, p: Problem, outputs: Outputs, *, backward: bool) -> None:
        c = self.kernel.capabilities
        claimed = {"out": True, "lse": c.lse and not c.may_refuse}
        given = gradients_given(self.kernel, p)
        claimed |= {name: backward and name in given and not c.may_refuse for name in GRADIENTS}
        for name, is_claimed in claimed.items():
            value = getattr(outputs, name)
            if not isinstance(value, Tensor) and (is_claimed or value is not None):
                claim = f"{name} is a tensor, but {value!r:.80} was returned"
                self.fail(claim, kind="contract", tensor=name, call=outputs.call)
        for name, what, actual, wanted in departures(
            outputs.named(), p.q, p.k, p.v, p.rule.bias, c.lse_layout
        ):
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
                if not c.expression and c.other is None and len(c.actual) == self.case.batch
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


def gradients_given(kernel: AttentionKernel, p: Problem) -> tuple[str, ...]:
    """Return the names of the gradients that a kernel claims to give of a problem."""
    c = kernel.capabilities
    of_bias = c.bias_gradient and p.rule.bias is not None
    return () if not c.backward else GRADIENTS if of_bias else GRADIENTS[:3]


def run_kernel(kernel: AttentionKernel, p: Problem, launch: Mapping[str, Any], *, backward: bool) -> Outputs:
    """Call a kernel by its contract; gradients come from its own backward, or else from autograd.

    lse is as the kernel returned it, in the base and the layout that it claims, and so its own backward gets it.
    An ``out`` of a wrong shape is returned without gradients. Raises WrongKind, and what the kernel raises.
    """
    options = {**p.options, **launch}
    names = gradients_given(kernel, p) if backward else ()
    if names and kernel.backward is None:
        return _through_autograd(kernel, p, options, names)
    with torch.no_grad():
        out, lse = out_and_lse(kernel.forward(p.q, p.k, p.v, **options))
        if kernel.backward is None or not names:
            return Outputs(out, lse)
        returned = kernel.backward(p.dout, p.q, p.k, p.v, out, lse, **options)
        return Outputs(out, lse, **gradients_of(returned, names))


def _through_autograd(
    kernel: AttentionKernel, p: Problem, options: dict[str, Any], names: tuple[str, ...]
) -> Outputs:
    inputs = {name: getattr(p.rule if name == "bias" else p, name) for name in (x[1:] for x in names)}
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    q, k, v = (leaves[name] for name in ("q", "k", "v"))
    of_bias = {name: x for name, x in leaves.items() if name == "bias"}
    out, lse = out_and_lse(kernel.forward(q, k, v, **{**options, **of_bias}))
    lse = None if lse is None else lse.detach()
    if not out.requires_grad or out.shape != (*p.q.shape[:3], p.v.shape[3]):
        return Outputs(out, lse)
    found = differentiated(out, [*leaves.values()], p.dout)
    return Outputs(out.detach(), lse, **gradients_of(found, names))


def _same(x: Any, y: Any) -> bool:
    """Whether two arguments of a call are the same; for tensors, in shape, strides and bits."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y) and x == y
    if x is y:
        return True
    alike = (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    return alike and torch.equal(*(z if z.dtype == torch.bool else bits(z) for z in (x, y)))

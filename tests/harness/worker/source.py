"""Write the calls of a kernel down as Python while a law makes them."""

import base64
import math
import re
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, uint8

from kernels.contract.tuners import is_tuner
from strategies.layouts import distinct, span
from strategies.ways import WAYS
from tests.harness.device.poison import PoisonedAllocations
from tests.harness.interpreter.programs import BACKWARD
from tests.harness.trial.ragged_form import Prepared
from tests.harness.trial.trial import Trial, gradients_given

LITERAL_ELEMENTS = 64
"""Tensors up to this size are written as numbers. Larger ones are written by their few nonzero numbers, or as bytes."""


@dataclass
class Source:
    """Python text that makes the same calls again, with the functions of ``scripted``.

    Attributes:
        function: the one that makes a call.
        tensors: an assignment for each distinct tensor.
        calls: for each call the name of a function, and its arguments.
        is_sequence: whether tensors and tables are written over between the calls, which is written down too.
    """

    function: str
    is_sequence: bool = False
    tensors: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    held: dict[str, tuple[Any, bytes]] = field(default_factory=dict)
    """By name, a reference to the tensor that had it last, and the bytes of its numbers then."""

    def add(
        self,
        call: Prepared,
        memory: PoisonedAllocations | None,
        *,
        gradients: tuple[str, ...],
    ) -> None:
        """Write a call down before it is made, because the kernel may change its inputs.

        If sequences lie end to end in it, their results are taken apart.
        """
        problem = call.problem
        poison = memory.value if memory else None
        arguments = ["kernel"]
        q, k = (self._tensor(role, getattr(problem, role), poison) for role in ("q", "k"))
        v = self._columns(k, problem.v) if problem.v_in_k else self._tensor("v", problem.v, poison)
        arguments += [q, k, v, self._tensor("dout", problem.dout, poison)]
        launch = {name: value for name, value in call.launch.items() if not is_tuner(name)}
        options = {"gradients": gradients, **problem.options, **launch}
        options |= {"way": call.way} if call.way in WAYS else {}
        options |= {"dlse": problem.dlse} if problem.dlse is not None else {}
        if memory and memory.fenced:
            options |= {"fenced": True} | ({"is_before": True} if memory.is_before else {})
        arguments += [f"{name}={self._option(name, value)}" for name, value in options.items()]
        function, *arguments = (
            *(["elsewhere", repr(call.place)] if call.place else []),
            *(["attempted"] if call.may_fail else []),
            *(["last_program_first"] if call.order == BACKWARD else []),
            *(["in_sequences", str(call.packed)] if call.packed else []),
            *(["poisoned", str(poison)] if poison is not None else []),
            *[self.function, *arguments],
        )
        self.calls.append((function, ", ".join(arguments)))

    def only(self, numbers: slice) -> "Source":
        """Return a source with some of the calls, and the tensors that these take."""
        calls = self.calls[numbers]
        taken = set(re.findall(r"\w+", " ".join(arguments for _, arguments in calls)))
        lines = [line for line in self.tensors if line.partition(" ")[0] in taken]
        return Source(self.function, self.is_sequence, lines, calls)

    def _option(self, name: str, value: Any) -> str:
        """Return an option of a call as Python: a table by its name, if it may be written over between calls."""
        if not (self.is_sequence and isinstance(value, Tensor)):
            return _literal(value)
        key = (f"{name}_", value.data_ptr(), tuple(value.shape), value.stride())
        return self._again(value, self._named(key, lambda: _literal(value)), lambda: _literal(value))

    def _tensor(self, role: str, x: Tensor, poison: float | None) -> str:
        key = (role, x.data_ptr(), tuple(x.shape), x.stride(), str(poison))
        name = self._named(key, lambda: written(x, poison))
        if not self.is_sequence:
            return name
        is_new = (
            x._base is None and x._version == 0
        )  # and in the memory of another tensor, which has been written
        expression = self._again(x, name, lambda: written(distinct(x), poison), is_new=is_new)
        return f"{expression}.data" if is_new else expression

    def _again(self, x: Tensor, name: str, numbers: Callable[[], str], *, is_new: bool = False) -> str:
        """Return an expression for a tensor of a name: another tensor in its memory, or with other numbers, if so.

        Of a tensor that ``is_new``, it is that in whose memory it lies.
        """
        entries = distinct(x).detach().cpu().contiguous().view(uint8).numpy().tobytes()
        known = self.held.get(name)
        is_same = is_new or known is None or known[0]() is x
        self.held[name] = weakref.ref(x), entries
        expression = name if is_same else f"{name}[...]"
        return expression if known is None or known[1] == entries else f"holding({expression}, {numbers()})"

    def _columns(self, k: str, v: Tensor) -> str:
        """Return the name of a v that is the first columns of the tensor that is named ``k``."""
        if self.is_sequence:  # k may be an expression that writes to it
            return f"{re.findall(r'k[0-9]+', k)[0]}[..., :{v.shape[3]}]"
        expression = f"{k}[..., :{v.shape[3]}]"
        return self._named(("v", expression), lambda: expression)

    def _named(self, key: tuple[Any, ...], expression: Callable[[], str]) -> str:
        """Return the name of a tensor by its key, which begins with its role; a new name is assigned the expression."""
        if key not in self.names:
            self.names[key] = f"{key[0]}{sum(known[0] == key[0] for known in self.names)}"
            self.tensors.append(f"{self.names[key]} = {expression()}")
        return self.names[key]


@dataclass
class WritingTrial(Trial):
    """A trial that also writes its calls down, with what fills their memory if a law or ``with_memory`` asks for it."""

    with_memory: bool = False
    source: Source = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        function = "through_autograd" if self.kernel.backward is None else "by_kernel"
        self.source = Source(function, bool(self.case.earlier))

    def record(self, call: Prepared, memory: PoisonedAllocations | None = None, *, backward: bool) -> int:
        """Write a call down before it is made, unless an earlier trial of this replay has done so."""
        if memory is None and self.with_memory:
            memory = PoisonedAllocations(self.fill)
        number = super().record(call, memory, backward=backward)
        if number == len(self.source.calls):
            gradients = gradients_given(self.kernel, call.problem, call.way) if backward else ()
            self.source.add(call, memory, gradients=gradients)
        return number


def _literal(option: Any) -> str:
    """Return an option of a call as Python; lengths of sequences and masks of keys become small tensors.

    What lies between the rows of such a tensor is written too, as a kernel that reads it by wrong strides shows so.
    """
    if not isinstance(option, Tensor):
        return repr(option)
    if option.numel() > LITERAL_ELEMENTS and option.is_floating_point():
        return written(option, None)
    if option.is_contiguous():
        return f"torch.tensor({option.tolist()}, dtype={option.dtype}, device=DEVICE)"
    shape, strides = tuple(option.shape), option.stride()
    memory = option.as_strided((span(option),), (1,))
    literal = f"torch.tensor({memory.tolist()}, dtype={option.dtype}, device=DEVICE)"
    return f"{literal}.as_strided({shape}, {strides})"


def written(x: Tensor, poison: float | None) -> str:
    """Return the call of ``window`` that builds a tensor with its strides, and ``poison``, or else NaN, around it."""
    sizes = [1 if step == 0 and size else size for size, step in zip(x.shape, x.stride(), strict=True)]
    flat = x.detach().as_strided(sizes, x.stride()).cpu().contiguous().flatten()
    numbers = flat.float()  # of tensors of 8-bit floats PyTorch does not tell the signs
    places = ((numbers != 0) | numbers.signbit()).nonzero().flatten()
    if flat.numel() <= LITERAL_ELEMENTS:
        data = repr(flat.tolist())
    elif len(places) <= LITERAL_ELEMENTS:
        data = repr(dict(zip(places.tolist(), flat[places].tolist(), strict=True)))
    else:
        data = repr(base64.b64encode(zlib.compress(flat.view(uint8).numpy().tobytes())).decode())
    around = "" if poison is None or math.isnan(poison) else f", around={poison}"
    place = f"{tuple(x.shape)}, {tuple(x.stride())}, {x.storage_offset()}"
    return f"window({x.dtype}, {place}, {data}{around})"

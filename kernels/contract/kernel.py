"""A kernel under verification: its functions, what it claims, and what is known to fail in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernels.contract.capabilities import Capabilities

ANY_LAW = "any law"
"""In ``KnownFailure.laws``, this stands for every law whose cases the kernel claims, so not for ``rejection``."""


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """A bug that is known: cases that meet it are not drawn, and one stored case of it must still fail in each run.

    Attributes:
        what: the bug, in words.
        issue: where it is reported upstream; "" where it is not yet.
        laws: the laws that it breaks; the stored case breaks the first. ``ANY_LAW`` may stand for all others.
        kept: laws that it does not break although ``laws`` has ``ANY_LAW``.
        case: the stored case, as fields of ``strategies.case.Case``; None where a failure comes and goes, or takes
            longer than one would wait for.
        where: the fields of a case, or properties that follow from them, which decide whether it meets the bug, each
            with the values that do; a case meets it if all these do, and every case does if there are none.
        device: "cpu" or "cuda".
        torch: the versions of PyTorch that have it, as beginnings of a version.
    """

    what: str
    issue: str = ""
    laws: tuple[str, ...]
    kept: tuple[str, ...] = ()
    case: Mapping[str, Any] | None
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    device: str
    torch: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} ({self.issue or 'not reported upstream yet'})"

    def breaks(self, law: str) -> bool:
        """Whether this failure breaks a law whose cases the kernel claims, given by its name."""
        return law in self.laws or (ANY_LAW in self.laws and law not in self.kept)

    def is_of(self, device_type: str, torch_version: str) -> bool:
        """Whether the bug is to be expected on this type of device with this version of PyTorch."""
        return device_type == self.device and torch_version.startswith(self.torch)


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """A kernel under verification.

    Attributes:
        name: the kernel's name in reports.
        forward: ``forward(q, k, v, *, causal, sm_scale, **launch) -> (out, lse)``; lse is None where it is
            not claimed. ``launch`` holds launch settings, and keywords that claims add, such as ``window``.
            Without ``backward``, gradients are taken through autograd from ``out``.
        backward: ``backward(dout, q, k, v, out, lse, *, causal, sm_scale, **launch) -> (dq, dk, dv)``, or
            None. With ``bias_gradient``, a call that is passed a ``bias`` returns dbias as the fourth.
        capabilities: what the kernel claims.
        known_failures: bugs that the kernel is known to have in cases that it claims.
        tuners: objects of ``triton.autotune``, by the launch settings that say which configuration they take. These
            settings are passed to no function.

    A kernel refuses a case by raising NotImplementedError.
    """

    name: str
    forward: Callable[..., Any]
    capabilities: Capabilities
    backward: Callable[..., Any] | None = None
    known_failures: tuple[KnownFailure, ...] = ()
    tuners: Mapping[str, Any] = field(default_factory=dict)

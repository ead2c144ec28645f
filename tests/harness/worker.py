"""The child process: reads requests, runs cases, answers with verdicts. Started by ``tests.harness.child``.

One JSON object a line on stdin and stdout; whatever a kernel prints goes to stderr.
"""

import ctypes
import inspect
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from kernels import registry
from kernels.claims import describe as describe_claims
from kernels.contract import AttentionKernel
from reference import safe_softmax
from strategies.case import from_json
from tests.harness import pattern
from tests.harness.device import device_answers
from tests.harness.interpreting import repair_interpreter
from tests.harness.law import law_named
from tests.harness.precision import with_explanations
from tests.harness.probe import probe
from tests.harness.repro import script
from tests.harness.source import WritingTrial
from tests.harness.trial import CannotRun, LawBroken, Refused, Trial
from tests.harness.verdict import Finding, Verdict

PACKAGES = ("torch", "triton", "numpy", "hypothesis")

PR_SET_PDEATHSIG = 1
"""As in linux/prctl.h."""

CACHED_BYTES = 2**31
"""Memory beyond this goes back to the device between cases: a huge storage is gigabytes, and processes share it."""


class Worker:
    """Answers requests on one device. Kernels are loaded once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.kernels: dict[tuple[str, ...], AttentionKernel] = {}
        self.explained: dict[tuple[str, str], dict[str, int]] = {}

    def answer(self, line: str) -> str:
        """Do what a request asks in ``do``; an error of Flashproof itself is an answer too.

        ``fatal`` in an answer says that the process can't be trusted with another request.
        """
        try:
            request = json.loads(line)
            answer = getattr(self, f"do_{request['do']}")(request)
        except Exception:
            answer = {"raised": traceback.format_exc()}
        return json.dumps({**answer, "fatal": not self.is_sound()})

    def is_sound(self) -> bool:
        """Whether the process can be trusted with another request."""
        return device_answers(self.device)

    def kernel(self, request: dict[str, Any]) -> AttentionKernel:
        """The kernel a request names."""
        key = (request["kernel"], *request["claims"])
        if key not in self.kernels:
            self.kernels[key] = registry.load(request["kernel"], request["claims"])
        return self.kernels[key]

    def do_environment(self, request: dict[str, Any]) -> dict[str, Any]:
        """Device and versions."""
        name = platform.machine() if self.device == "cpu" else torch.cuda.get_device_name()
        versions = {package: _version(package) for package in PACKAGES}
        return {"device": self.device, "device_name": name, "python": platform.python_version(), **versions}

    def do_describe(self, request: dict[str, Any]) -> dict[str, Any]:
        """A kernel's name and claims, or why it can't be had."""
        device_type = torch.device(self.device).type
        reason = registry.unavailable_reason(request["kernel"], device_type)
        if reason is not None:
            return {"unavailable": reason}
        try:
            kernel = self.kernel(request)
        except ValueError as e:
            return {"error": str(e)}
        c = kernel.capabilities
        claims = {
            name: getattr(c, name) for name in c.__dataclass_fields__ if name not in ("arithmetic", "designs")
        }
        return {
            "name": kernel.name,
            "claims": {**claims, "launch": dict(c.launch)},
            "printed": describe_claims(c, device_type),
            "known_failures": [
                asdict(known)
                for known in kernel.known_failures
                if known.is_of(device_type, torch.__version__)
            ],
        }

    def do_probe(self, request: dict[str, Any]) -> dict[str, Any]:
        """Why a plain function does not fit the contract, as far as one call tells; None where nothing is told."""
        return {"told": probe(self.kernel(request), self.device)}

    def do_run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Try one case under one law."""
        verdict, _ = self.attempt(request, self.kernel(request), Trial)
        return verdict.to_dict()

    def do_look(self, request: dict[str, Any]) -> dict[str, Any]:
        """Try one case under one law, and tell what its wrong elements look like."""
        verdict, trial = self.attempt(request, self.kernel(request), Trial)
        compared = trial.compared if trial else []
        case = from_json(json.dumps(request["case"]))
        numbers = pattern.known_numbers(case.scale, case.group, case.dropout_p)
        return {
            **verdict.to_dict(),
            "sentences": pattern.sentences(compared, case.blocks, numbers),
            "pictures": [pattern.picture(c) for c in compared if bool(c.wrong.any())],
        }

    def do_repro(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the case once more and write the stand-alone script of the calls that were made.

        A kernel that takes the process down is not called: the reference answers in its place.
        """
        finding = Finding(**request["finding"])
        kernel = self.kernel(request)
        guarded = False
        if finding.ends_process:
            _, recorder = self.attempt(request, _stand_in(kernel), WritingTrial)
        else:
            tells = self.depends_on_memory(request, kernel, finding.tensor)
            _, recorder = self.attempt(request, kernel, partial(WritingTrial, with_memory=tells))
            finding = self.from_outside(request, kernel, finding)
            memory, _ = self.attempt({**request, "law": "memory"}, kernel, Trial)
            # What is written elsewhere may end the process.
            guarded = memory.finding is not None and memory.finding.kind == "memory"
        if not isinstance(recorder, WritingTrial):
            return {"text": None}
        if len(recorder.source.calls) <= max(finding.call, finding.other or 0):
            return {"text": None}  # it did not fail where it had failed
        named = {name: request[name] for name in ("law", "title", "seconds")}
        return {"text": script(recorder, finding, guarded=guarded, spec=request["kernel"], **named)}

    def from_outside(self, request: dict[str, Any], kernel: AttentionKernel, finding: Finding) -> Finding:
        """What is wrong beside exact results: a gradient, else the out or lse by which it had been judged.

        At an out and lse that are wrong themselves, right is what the kernel without the bug does not give.
        """
        laws = ("backward", "forward") if request["law"] == "backward" else (request["law"],)
        trial_of = partial(Trial, apart=False)
        found = (self.attempt({**request, "law": law}, kernel, trial_of)[0].finding for law in laws)
        return next(filter(None, found), finding)

    def depends_on_memory(self, request: dict[str, Any], kernel: AttentionKernel, tensor: str) -> bool:
        """Whether ``tensor`` is wrong by what is in fresh memory: no longer where that is 0.

        A new process finds other things there than NaN.
        """
        verdict, _ = self.attempt(request, kernel, partial(Trial, fill=0.0))
        return verdict.finding is None or verdict.finding.tensor != tensor

    def attempt(
        self, request: dict[str, Any], kernel: AttentionKernel, trial_of: Callable[..., Trial]
    ) -> tuple[Verdict, Trial | None]:
        """Run a law on a case; the trial is None where not even its tensors could be had."""
        law = law_named(request["law"])
        if self.device != "cpu" and torch.cuda.memory_reserved() > CACHED_BYTES:
            torch.cuda.empty_cache()
        start = time.perf_counter()
        trial = None
        outcome: dict[str, Any]
        try:
            trial = trial_of(kernel, from_json(json.dumps(request["case"])), self.device, request["safety"])
            trial.explained = self.explained.setdefault((kernel.name, trial.case.dtype), {})
            trial.ignored = frozenset(request.get("ignored", ()))
            law(trial)
            outcome = {"status": "held", "worst": trial.worst}
        except LawBroken as broken:
            changed = trial.changed_input() if trial and broken.finding.expected is not None else None
            outcome = {
                "status": "broken",
                "finding": changed or with_explanations(broken.finding, trial, law),
                "sizes": trial.sizes if trial else [],
            }
        except Refused as refused:
            outcome = {"status": "refused", "reason": str(refused)}
        except CannotRun as reason:
            outcome = {"status": "skipped", "reason": str(reason)}
        except (torch.OutOfMemoryError, MemoryError) as e:
            outcome = {"status": "skipped", "reason": f"no memory for the references: {e}"}
        if trial is not None:
            check = time.perf_counter() - start - sum(trial.seconds.values())
            outcome["seconds"] = {**trial.seconds, "check": check}
            outcome |= {"designs": sorted(trial.designs), "idle": trial.idle}
            outcome["beside"] = tuple(sorted(trial.beside))
        return Verdict(**outcome), trial


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _stand_in(kernel: AttentionKernel) -> AttentionKernel:
    """The reference in the place of a kernel."""
    backward = None if kernel.backward is None else partial(_reference_backward, kernel)
    return replace(kernel, forward=partial(_reference_forward, kernel), backward=backward)


def _reference_forward(kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The float64 answer in the kernel's formats."""
    out, lse = safe_softmax.forward(q, k, v, **_masked(kernel, options))
    return out.to(q.dtype), lse.float()


def _reference_backward(
    kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *stored: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    return tuple(x.to(q.dtype) for x in safe_softmax.backward(dout, q, k, v, **_masked(kernel, options)))


def _masked(kernel: AttentionKernel, options: dict[str, Any]) -> dict[str, Any]:
    """What the reference takes of a call's options."""
    taken = inspect.signature(safe_softmax.forward).parameters.keys() - kernel.capabilities.launch.keys()
    known = {name: value for name, value in options.items() if name in taken}
    return {**known, "alignment": kernel.capabilities.causal_alignment}


def serve(worker: Worker) -> None:
    """Answer requests until stdin closes."""
    # Kernels may print and read: what they find is stderr and the end of a file, not our two pipes.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in requests:
        answers.write(worker.answer(line) + "\n")


def main(device: str) -> None:
    """Serve on a device, and end with the parent: killed in the middle of a hang, it can't end this process itself."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    if device == "cpu":
        repair_interpreter()
    else:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    serve(Worker(device))


if __name__ == "__main__":
    main(sys.argv[1])

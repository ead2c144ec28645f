"""The program of the child process that runs kernels: it reads requests and answers each, a case with a verdict.

``running.child`` starts it. A request is a line of JSON on stdin, an answer a line of JSON on stdout. Whatever a
kernel prints goes to stderr.
"""

import ctypes
import faulthandler
import inspect
import json
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # torch does so, with sympy, as it first computes a gradient
from torch import Tensor

from kernels import registry
from kernels.contract import AttentionKernel
from kernels.contract.parsing import describe as describe_claims
from reference import safe_softmax
from reference.alternatives import Alternative, named
from reference.mask_pattern import MaskPattern
from reference.score_rule import ScoreRule
from strategies.case import TENSORS, Case, from_record
from tests.harness.accelerators.lookup import accelerator_of
from tests.harness.designs.explanations import with_explanations
from tests.harness.device.environments import why_not_here
from tests.harness.device.left_behind import is_used_up
from tests.harness.device.memory import (
    gpu_to_itself,
    growth,
    held_bytes,
    lacks_memory,
    leave_memory_to_others,
    offer_to_be_killed,
)
from tests.harness.device.poison import FINITE_POISON
from tests.harness.device.specialisation import (
    compiled,
    has_kernels_of_users,
    keep_variants_apart,
    may_compile,
)
from tests.harness.device.sync import ASKS_WHERE, device_answers
from tests.harness.device.transfer import home_of
from tests.harness.device.tuning import take_over
from tests.harness.fitting.widening import Asked, certificate
from tests.harness.interpreter.accesses import with_accesses
from tests.harness.interpreter.installation import makes_code, repair_interpreter
from tests.harness.interpreter.programs import FORWARD
from tests.harness.kernel_record import described
from tests.harness.law import basic_laws, law_named
from tests.harness.run import Run, run_of
from tests.harness.symptoms import wrong_tensors
from tests.harness.trial import pattern
from tests.harness.trial.outputs import form_of, in_claimed_form
from tests.harness.trial.trial import CannotRun, LawBroken, Refused, Trial, in_short
from tests.harness.verdict import INTERMITTENT, LEAK, STATE, Finding, Verdict
from tests.harness.worker.outside import read_outside
from tests.harness.worker.probe import probe
from tests.harness.worker.repro import script
from tests.harness.worker.script_process import ScriptProcess
from tests.harness.worker.source import WritingTrial
from tests.harness.worker.written import written

PACKAGES = ("torch", "triton", "numpy", "hypothesis")

PR_SET_PDEATHSIG = 1
"""The number of this operation of prctl(2), as linux/prctl.h defines it."""

MUCH = 2**28
"""A case with a tensor of more elements than this, or with more scores, needs gigabytes."""
CACHED_BYTES = 2**31
"""If torch keeps more memory than this, it goes back to the device after a request, as other processes may need it."""

if os.environ.get("TRITON_INTERPRET") == "1":
    repair_interpreter()  # copies of a process that has imported this module need not import Triton


class Worker:
    """Answers requests on one device; a request named X in ``do`` is answered by the method ``do_X``."""

    def __init__(self, device: str) -> None:
        self.device, self.accelerator = device, accelerator_of(device)
        self.kernel = cache(registry.load)
        self.script_process = cache(partial(ScriptProcess, device=device))
        self.growing: dict[str, set[str]] = {}
        self.explained: dict[tuple[str, str], dict[str, int]] = {}

    def answer(self, line: str) -> str:
        """Return the answer to a request, both as lines of JSON.

        An error of Flashproof itself is an answer too, with its traceback as ``raised``. If ``fatal`` is true, the
        process can't be trusted with another request: its device is lost, or its files or threads are used up.
        """
        try:
            request = json.loads(line)
            alone = gpu_to_itself(self.device) if self._needs_much(request) else nullcontext()
            with alone, compiled(for_any_values=request.get("general", False)):
                answer = getattr(self, f"do_{request['do']}")(request)
        except Exception:
            answer = {"raised": traceback.format_exc()}
        is_lost = not device_answers(self.device)
        if not is_lost and (self.accelerator.held("reserved") or 0) > CACHED_BYTES:
            self.accelerator.empty_cache()
        is_lost |= is_used_up()
        return json.dumps({**answer, "fatal": is_lost, "held": held_bytes()})

    def _needs_much(self, request: dict[str, Any]) -> bool:
        """Whether a request is about a case that needs gigabytes of a GPU."""
        if self.device == "cpu" or "case" not in request:
            return False
        case = run_of(request).case
        elements = max(math.prod(case.shape(tensor)) for tensor in TENSORS)
        return case.scores > MUCH or elements > MUCH

    def do_environment(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the name of the device's hardware and the versions of the packages."""
        versions = {package: _version(package) for package in PACKAGES}
        return {"device_name": self.accelerator.name(), "python": platform.python_version(), **versions}

    def do_left_out(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what a run leaves out on the device, in words."""
        return {"left_out": self.accelerator.left_out()}

    def do_describe(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a kernel's name, claims and known failures, or why it can't be loaded or run here."""
        device_type = torch.device(self.device).type
        reason = registry.unavailable_reason(request["kernel"], device_type)
        if reason is not None:
            return {"unavailable": reason}
        try:
            kernel = self.kernel(request["kernel"], tuple(request["claims"]))
        except ValueError as e:
            told = why_not_here(e.__cause__, device_type) if e.__cause__ else None
            return {"error": f"{e}; {told}" if told else str(e)}
        known = [x for x in kernel.known_failures if x.is_of(device_type, torch.__version__)]
        printed = describe_claims(kernel.capabilities, device_type)
        return described(kernel.name, kernel.capabilities, printed, known)

    def do_probe(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return why a kernel can't be run here or does not fit the contract, as far as a few calls show, or None."""
        return {"told": probe(self.kernel(request["kernel"], tuple(request["claims"])), self.device)}

    def do_run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the verdict on one case under one law."""
        return self.attempt(run_of(request), partial(Trial, patience=request["patience"]))[0].to_dict()

    def do_compiled(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return whether a kernel may be compiled here, and whether Triton does it for the values of its arguments."""
        self.kernel(request["kernel"], tuple(request["claims"]))  # to have its module imported
        if self.device == "cpu":
            return {"at_all": makes_code(), "by_value": False}
        return {"at_all": may_compile(), "by_value": has_kernels_of_users()}

    def do_leak(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return how many bytes stay behind after each repeat of a case, 0 if memory does not grow on and on.

        The reference is called in the kernel's place as well: what grows then is no fault of the kernel.
        """
        run = run_of(request)
        stand_in = _stand_in(self.kernel(run.spec, run.claims))
        left = growth(lambda: self.attempt(run), request["seconds"])
        return {"left": left if left > 2 * growth(lambda: self.attempt(run, Trial, stand_in), 1.0) else 0}

    def do_look(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the verdict on one case under one law, and what its wrong elements look like."""
        run = run_of(request)
        verdict, trial = self.attempt(run)
        compared = trial.compared if trial else []
        numbers = pattern.known_numbers(run.case.scale, run.case.group, run.case.dropout_p)
        sentences = pattern.sentences(compared, run.case.blocks, numbers)
        pictures = [pattern.picture(c) for c in compared if bool(c.wrong.any())]
        return {**verdict.to_dict(), "sentences": sentences, "pictures": pictures}

    def do_certificate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what explains a wrong ``tensor``, beside what the kernel is taken to compute already.

        It is looked for in so many ``seconds``. ``kinds`` are the calls, as pairs of cases and further ones;
        ``of_some`` is whether it is known of some kinds alone.
        """
        run = run_of(request)
        known = tuple(named(json.loads(x)) for x in run.alternatives)
        trial_of = self._trials(run, known)
        kinds = [Asked(*(list(map(from_record, cases)) for cases in kind)) for kind in request["kinds"]]
        told, is_of_all = certificate(kinds, trial_of, request["seconds"], request["tensor"])
        records = [json.dumps(x.record) for x in told.alternatives]
        before = {(x.name, x.values) for x in known}  # what is known of the forward may concern gradients too
        new = [x for x in told.alternatives if (x.name, x.values) not in before]
        words = replace(told, alternatives=new).words
        return {"words": words, "alternatives": records if new else [], "of_some": not is_of_all}

    def _trials(self, run: Run, known: tuple[Alternative, ...] = ()) -> Callable[[Case], Trial]:
        """Return what makes a trial of a case on a run's kernel, judged against what is ``known`` to be computed."""
        kernel = self.kernel(run.spec, run.claims)

        def trial_of(case: Case) -> Trial:
            home = home_of(case, self.device)
            return Trial(kernel, case, self.device, run.safety, home=home, alternatives=known)

        return trial_of

    def do_outside(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the places around the inputs of a case from which NaN reaches a ``tensor`` of its results."""
        run, places = run_of(request), list[str]()
        kernel = self.kernel(run.spec, run.claims)
        with suppress(LawBroken, Refused, CannotRun):
            trial = Trial(kernel, run.case, self.device, run.safety, margin=FINITE_POISON, home=self.device)
            places = read_outside(trial, request["tensor"])
        return {"places": places}

    def do_written(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what a kernel writes over an input, a ``tensor``, in all ``cases`` that show it, in words."""
        trial_of = self._trials(run_of(request))
        return {"words": written(map(from_record, request["cases"]), trial_of, request["tensor"])}

    def do_in_turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return whether a case holds if the programs of each launch run one after the other, as in a script."""
        verdict, _ = self.attempt(run_of(request), partial(Trial, order=FORWARD))
        return {"holds": verdict.status == "held"}

    def do_repro(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a failing case once more, and return a stand-alone script that makes the same calls; None if it holds.

        With it comes whether the wrong tensor ``depends`` on memory that nobody has written. A kernel that ends its
        process is not called; the reference is called in its place.
        """
        run, finding = run_of(request), Finding(**request["finding"])
        guarded, depends = finding.ends_process, False
        if guarded:
            stand_in = _stand_in(self.kernel(run.spec, run.claims))
            _, recorder = self.attempt(run, WritingTrial, stand_in)
        elif finding.kind in (INTERMITTENT, LEAK, STATE):  # that a case holds once tells nothing of these
            _, recorder = self.attempt(run, WritingTrial)
        else:
            depends = self.depends_on_memory(run, finding.tensor)
            _, recorder = self.attempt(run, partial(WritingTrial, with_memory=depends))
            finding = self.from_outside(run, finding)
            memory, _ = self.attempt(replace(run, law="memory"))
            # A kernel that writes outside its tensors may end the process of the script.
            writes_outside = memory.finding is not None and memory.finding.kind == "memory"
            guarded = writes_outside or finding.ends_process
        if not isinstance(recorder, WritingTrial):
            return {"text": None, "depends": depends}
        if len(recorder.source.calls) <= max(finding.call, finding.other or 0):
            return {
                "text": None,
                "depends": depends,
            }  # the law was not broken at the call at which it had been
        seconds = request["seconds"] if guarded else None
        text = script(run, recorder, finding, request["title"], seconds)
        return {"text": text, "depends": depends}

    def from_outside(self, run: Run, finding: Finding) -> Finding:
        """Return a finding with expected values that a sound kernel would return; else the finding as it is.

        Gradients are judged at the kernel's own out and lse. If these are wrong, the gradients expected from them are
        not the true ones, so they are computed from the exact out and lse instead. If no gradient is wrong then, the
        finding is that of out or lse.
        """
        laws = (run.law, *basic_laws(gradients=False)) if law_named(run.law).judges_gradients else (run.law,)
        trial_of = partial(Trial, apart=False)
        found = (self.attempt(replace(run, law=law), trial_of)[0].finding for law in laws)
        return next(filter(None, found), finding)

    def depends_on_memory(self, run: Run, tensor: str) -> bool:
        """Whether ``tensor`` is right if fresh memory is full of zeros, so that the script has to fill it with NaN.

        A trial fills fresh memory with NaN; a new process would find other things there. Nothing is concluded from a
        trial that could not be judged, as where the device lacks memory, or if the tensor is right with NaN as well.
        """

        def is_wrong(trial_of: Callable[..., Trial]) -> bool | None:
            verdict, _ = self.attempt(run, trial_of)
            judged = verdict.status in ("held", "broken")
            return tensor in (wrong_tensors(verdict.finding) if verdict.finding else ()) if judged else None

        return is_wrong(partial(Trial, fill=0.0)) is False and is_wrong(Trial) is True

    def attempt(
        self, run: Run, trial_of: Callable[..., Trial] = Trial, stand_in: AttentionKernel | None = None
    ) -> tuple[Verdict, Trial | None]:
        """Run a law on a case and return the verdict with the trial, which is None if its tensors could not be made.

        The kernel is that of the run, or ``stand_in`` in its place.
        """
        law, kernel = law_named(run.law), stand_in or self.kernel(run.spec, run.claims)
        start = time.perf_counter()
        trial = None
        outcome: dict[str, Any]
        try:
            is_here = law.on_device or run.case.ragged != "none"
            if is_here and not self.accelerator.has_float64:
                raise CannotRun(f"{self.accelerator.type} lacks float64, by which results are judged there")
            home = self.device if is_here else home_of(run.case, self.device)
            trial = trial_of(kernel, run.case, self.device, run.safety, ignored=run.ignored, home=home)
            trial.alternatives = tuple(named(json.loads(x)) for x in run.alternatives)
            trial.growing = self.growing.setdefault(kernel.name, set())
            trial.explained = self.explained.setdefault((kernel.name, run.case.dtype), {})
            if isinstance(kernel.forward, registry.PlainFunction):
                trial.standalone = self.script_process(run.spec).call
            law(trial)
            outcome = {"status": "held", "worst": trial.worst}
        except LawBroken as broken:
            changed = trial.changed_input() if trial and broken.finding.expected is not None else None
            told = changed or with_explanations(broken.finding, trial, law, run.designs)
            outcome = {
                "status": "broken",
                "finding": with_accesses(told, trial.touched if trial else ()),
                "sizes": trial.sizes if trial else [],
            }
        except Refused as refused:
            outcome = {"status": "refused", "reason": str(refused)}
        except CannotRun as reason:
            outcome = {"status": "skipped", "reason": str(reason)}
        except Exception as e:
            if not lacks_memory(e):
                raise
            outcome = {"status": "skipped", "reason": f"no memory for the references: {in_short(e)}"}
        if trial is not None:
            check = time.perf_counter() - start - sum(trial.seconds.values())
            outcome["seconds"] = {**trial.seconds, "check": check}
            outcome["launched"] = trial.launched
            outcome |= {"designs": sorted(trial.designs), "idle": trial.idle, "notes": trial.notes}
            outcome["beside"] = tuple(sorted(trial.beside))
        return Verdict(**outcome), trial


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _stand_in(kernel: AttentionKernel) -> AttentionKernel:
    """Return the kernel with its functions replaced by the float64 reference, in the dtypes of the kernel's results."""
    taken = inspect.signature(safe_softmax.forward).parameters.keys() - kernel.capabilities.launch.keys()
    alignment = kernel.capabilities.causal_alignment
    lse_form = form_of(kernel.capabilities)

    def answer(reference: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
        known = {name: value for name, value in options.items() if name in {*taken, "bias_gradient"}}
        pattern, rule = (
            record(**{x.name: options[x.name] for x in fields(record) if x.name in options})
            for record in (MaskPattern, ScoreRule)
        )
        return reference(*tensors, **known, pattern=pattern, rule=rule, alignment=alignment)

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = answer(safe_softmax.forward, q, k, v, **options)
        return out.to(q.dtype), in_claimed_form(lse, *lse_form).float()

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *stored: Tensor, **options: Any) -> Any:
        of_bias = {"bias_gradient": True} if kernel.capabilities.bias_gradient and "bias" in options else {}
        return tuple(
            x.to(q.dtype) for x in answer(safe_softmax.backward, dout, q, k, v, **options, **of_bias)
        )

    return replace(kernel, forward=forward, backward=kernel.backward and backward)


def serve(worker: Worker) -> None:
    """Answer requests until stdin is closed."""
    # A kernel may print and read, but not on our two pipes: it prints to stderr, and reads from an empty file.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in requests:
        answer = answer_of_copy if json.loads(line).get("copied") else Worker.answer
        answers.write(answer(worker, line) + "\n")


def answer_of_copy(worker: Worker, line: str) -> str:
    """Return the answer of a copy of this process, whose end is that of what its kernels have kept.

    What the copy has imported is imported here as well, so that not each copy has to do it. If the copy ends without an
    answer, this process ends in the same way.
    """
    read, write = os.pipe()
    copy = os.fork()
    if not copy:
        end_with_parent()
        before = {*sys.modules}
        answer = worker.answer(line)
        with os.fdopen(write, "w") as pipe:
            json.dump([answer, sorted({*sys.modules} - before)], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    _, status = os.waitpid(copy, 0)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        signal.raise_signal(os.WTERMSIG(status))
    if not told:
        os._exit(os.WEXITSTATUS(status))
    answer, imported = json.loads(told)
    for name in imported:
        with suppress(Exception):
            import_module(name)
    return str(answer)


def end_with_parent() -> None:
    """Have this process killed when its parent ends, which may be killed while a kernel hangs here."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def begin(device: str) -> None:
    """Prepare this process to run kernels on a device, as a child of another one."""
    end_with_parent()
    offer_to_be_killed()
    faulthandler.enable()  # a process that ends by a fault prints where it was
    faulthandler.register(ASKS_WHERE)
    torch.set_num_threads(1)
    take_over()
    if device != "cpu":
        keep_variants_apart()
        accelerator_of(device).use(device)
        leave_memory_to_others(device)


def main(device: str, worker_of: type[Worker] = Worker) -> None:
    """Answer requests on a device."""
    begin(device)
    serve(worker_of(device))


if __name__ == "__main__":
    main(sys.argv[1])

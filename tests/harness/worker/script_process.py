"""A process that calls a plain function as a user's script would: it knows torch and the function, and no Flashproof.

A function can look at the modules that are imported, at the stack, at the environment and at what else is in memory,
and answer otherwise where it finds a test. It finds none of these there. What it returns comes back as bytes, and is
judged by the process that asked.
"""

import os
import pickle
import selectors
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kernels.contract.tuners import is_tuner
from kernels.registry import locate
from tests.harness.device.memory import lacks_memory
from tests.harness.device.sync import device_is_full
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.trial import CannotRun, RaisedElsewhere, in_short

PROGRAM = Path(__file__).with_name("user_script.py")
"""The program of the process, which is given to it as a text, so that no path in it names a test."""
OF_TESTS = ("PYTEST", "HYPOTHESIS", "FLASHPROOF", "TOX")
"""Variables of the environment whose names begin so are those of tests."""
SECONDS = 60.0
"""The seconds after which an answer is given up."""


class ScriptProcess:
    """The process for one plain function on one device. It is started by the first call, and ends with this one."""

    def __init__(self, spec: str, device: str) -> None:
        self.spec, self.device = spec, device

    def call(self, p: Problem, launch: Mapping[str, Any], backward: bool) -> tuple[Outputs, tuple[str, ...]]:
        """Return what a call returns there: out, lse if there is one, and the gradients of q, k and v if asked for.

        With it come the names of functions such as "torch.allclose" that others have taken the place of there. Raises
        CannotRun if the function can't be imported there, finds no memory, ends the process, or does not answer in
        time, and RaisedElsewhere with anything else that it raises.
        """
        tensors = {"q": p.q, "k": p.k, "v": p.v, "dout": p.dout}
        settings = {name: x for name, x in launch.items() if not is_tuner(name)}
        options = {
            name: sent(x) if isinstance(x, Tensor) else x for name, x in {**p.options, **settings}.items()
        }
        answer = self._ask(
            {**{name: sent(x) for name, x in tensors.items()}, "options": options, "backward": backward}
        )
        if "raised" in answer:
            raised = answer["raised"]
            if lacks_memory(answer["said"]) or device_is_full(self.device):
                self.close()  # what it keeps of the memory may be what others lack
                raise CannotRun(f"out of memory in a process without Flashproof: {in_short(raised)}")
            raise RaisedElsewhere(raised)
        given: dict[str, Any] = {name: x.to(p.q.device) for name, x in answer["tensors"].items()}
        return Outputs(**{"lse": None, **given}), tuple(answer["replaced"])

    @cached_property
    def process(self) -> "subprocess.Popen[bytes]":
        """The process, which has read what it is to import."""
        environment = {name: x for name, x in os.environ.items() if not name.startswith(OF_TESTS)}
        started = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.read_text()],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._send(started, {"location": locate(self.spec), "device": self.device})
        return started

    def _ask(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            self._send(self.process, call)
            answer = self._receive()
        except BaseException as error:
            self.close()  # the rest of an answer must not be taken for that to a later call
            if not isinstance(error, (OSError, EOFError, pickle.UnpicklingError)):
                raise
            raise CannotRun(
                f"a process without Flashproof ended, or did not answer: {type(error).__name__}"
            ) from error
        if "missing" in answer:
            raise CannotRun(f"in a process without Flashproof, {answer['missing']}")
        return answer

    def _send(self, process: "subprocess.Popen[bytes]", message: dict[str, Any]) -> None:
        assert process.stdin is not None
        pickle.dump(message, process.stdin)
        process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(SECONDS):
                raise TimeoutError
        found: dict[str, Any] = pickle.load(self.process.stdout)
        return found

    def close(self) -> None:
        """End the process; a later call starts a new one."""
        with suppress(KeyError):
            self.__dict__.pop("process").kill()


def sent(x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return the elements of a tensor as they lie in memory, without what lies around them, its shape and strides."""
    extent = (
        1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if x.numel()
        else 0
    )
    flat = x.as_strided((extent,), (1,), x.storage_offset()).cpu().clone()
    return flat, tuple(x.shape), x.stride()

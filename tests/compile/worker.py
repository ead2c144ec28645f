"""The child process that compiles. Triton is not interpreted in it, and a compiler that crashes ends it alone."""

import math
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from strategies.score_rules import bias_shape
from tests.compile.items import Item
from tests.compile.limits import declared
from tests.compile.targets import TARGETS, compiling_for
from tests.harness.worker.main import Worker, serve

BATCH, HEADS_KV = 2, 2
SEQLENS = (512, 384)
"""The lengths of the calls: a launcher may choose among kernels by the length, as that of ``flash_v3_gluon`` does."""


@dataclass(frozen=True)
class Function:
    """What one compiled function takes: registers of a thread, bytes that it spills, shared memory of a program.

    ``spills_declared`` is what it may spill; ``problem`` says why it doesn't fit, if so.
    """

    name: str
    registers: int
    spills: int
    shared: int
    spills_declared: int
    problem: str = ""


class Compiler(Worker):
    """Answers ``compile`` requests."""

    def do_compile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the compiled functions that an item launches, or why the kernel makes no claim there.

        The request has the tables of ``tests.compile.limits`` for the kernel, ``spills`` and ``unclaimed``.
        """
        fields = request["item"]
        item = Item(**{**fields, "launch": tuple(map(tuple, fields["launch"]))})
        reason = declared(request["unclaimed"], item.words)
        if reason is not None:
            return {"unclaimed": reason, "functions": []}
        with compiling_for(item.target) as compiled:
            try:
                for seqlen in SEQLENS:
                    self.call(item, seqlen)
            except NotImplementedError as refusal:
                return {"unclaimed": str(refusal), "functions": []}
        distinct = {kernel.hash: kernel for kernel in compiled}
        functions = [_function(kernel, item, request["spills"]) for kernel in distinct.values()]
        return {"unclaimed": "", "functions": [asdict(function) for function in functions]}

    def call(self, item: Item, seqlen: int) -> None:
        """Call the kernel's own launcher on tensors without memory, once for each shape of a bias that is claimed."""
        kernel = self.kernel(item.kernel, ())
        group = 2 if kernel.capabilities.grouped_heads else 1

        def tensor(heads: int) -> Tensor:
            row = item.head_dim if item.aligned else item.head_dim + 1
            strides = (heads * seqlen * row, seqlen * row, row, 1)
            shape = (BATCH, heads, seqlen, item.head_dim)
            return torch.empty_strided(shape, strides, dtype=getattr(torch, item.dtype), device="meta")

        q, k, v = tensor(HEADS_KV * group), tensor(HEADS_KV), tensor(HEADS_KV)
        options = {"causal": item.causal, "sm_scale": 1 / math.sqrt(item.head_dim), **dict(item.launch)}
        if item.masked and kernel.capabilities.key_padding:
            options["key_padding_mask"] = torch.empty(BATCH, seqlen, dtype=torch.bool, device="meta")
        if item.masked and any(kernel.capabilities.dropout):
            options["dropout_p"] = max(kernel.capabilities.dropout)
        for name in ("window", "window_right", "chunk", "softcap"):
            if item.masked and any(getattr(kernel.capabilities, name)):
                options[name] = max(getattr(kernel.capabilities, name))
        for name in ("alibi_slopes", "sinks"):
            if item.masked and getattr(kernel.capabilities, name):
                options[name] = torch.empty(q.shape[1], dtype=torch.float32, device="meta")
        shapes = kernel.capabilities.bias if item.masked else ()
        biases = [
            torch.empty(bias_shape(name, (*q.shape[:3], seqlen)), dtype=q.dtype, device="meta")
            for name in shapes
        ]
        for given in [{"bias": bias} for bias in biases] or [{}]:
            out, lse = kernel.forward(q, k, v, **options, **given)
            if kernel.backward is not None:
                kernel.backward(tensor(HEADS_KV * group), q, k, v, out, lse, **options, **given)


def _function(kernel: Any, item: Item, granted: dict[str, int]) -> Function:
    target = TARGETS[item.target]
    registers, spills = _resources(kernel.asm)
    shared = kernel.metadata.shared
    tensor_columns = getattr(kernel.metadata, "tmem_size", None) or 0
    allowed = declared(granted, (*item.words, kernel.name)) or 0
    problems = []
    if shared > target.shared:
        problems.append(f"shared memory: {shared} bytes, and {item.target} has {target.shared}")
    if tensor_columns > target.tensor:
        problems.append(f"tensor memory: {tensor_columns} columns, and {item.target} has {target.tensor}")
    if spills > allowed:
        problems.append(f"spills: {spills} bytes, and it may spill {allowed}")
    return Function(kernel.name, registers, spills, shared, allowed, "; ".join(problems))


def _resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Return the registers of a thread and the bytes of its stack, which are spills: our kernels have no arrays."""
    if "cubin" not in asm:
        text = asm["amdgcn"]
        return _number(r"\.vgpr_count:\s+(\d+)", text), _number(
            r"\.private_segment_fixed_size:\s+(\d+)", text
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern!r} is not in what the compiler says:\n{text[-2000:]}")
    return int(found[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Compiler("none"))

"""Run programs and keep the bits that they leave: ``python -m tests.unit.support.programs OUT.npz SEED...``.

A seed may be a range, ``0-199``. With ``--exact`` those that a GPU may compute otherwise are left out. The kernels run
compiled on a GPU where there is one, and else as ``TRITON_INTERPRET`` says.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.unit.support.programs.drawing import program
from tests.unit.support.programs.running import Array, module_of, run


def seeds_of(texts: list[str]) -> list[int]:
    """Return the seeds of arguments such as 3 or 10-19."""
    ends = [(int(x.split("-")[0]), int(x.split("-")[-1])) for x in texts]
    return [seed for low, high in ends for seed in range(low, high + 1)]


def main(out: str, *seeds: str) -> int:
    """Run the programs of some seeds; return how many raised an exception, which is told."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        import triton

        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    else:
        from tests.harness.interpreter.installation import repair_interpreter

        os.environ.setdefault("TRITON_INTERPRET", "1")
        repair_interpreter()
    programs = [program(seed) for seed in seeds_of([x for x in seeds if x != "--exact"])]
    programs = [x for x in programs if x.exact or "--exact" not in seeds]
    kept: dict[str, Array] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        module = module_of(programs, Path(folder) / "drawn_programs.py")
        for x in programs:
            try:
                found = run(x, getattr(module, x.name), device)
            except Exception as error:
                print(f"{x.name}: {type(error).__name__}: {error}", file=sys.stderr)
                failed += 1
                continue
            kept.update({f"{x.seed}.{name}": bits for name, bits in found.items()})
    np.savez_compressed(out, allow_pickle=False, **kept)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)

"""A private backend of PyTorch, built as a package that torch imports by itself, as those of vendors are."""

import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("backend.cpp")
NAME = "standin"
"""The name under which the backend is registered: that of its type of device."""
PACKAGE = f"torch_{NAME}"
AUTOLOAD = f'''"""Registers a type of device with PyTorch."""

from pathlib import Path
from types import ModuleType

import torch


def autoload():
    """Register the type; torch calls this at the end of its import."""
    torch.ops.load_library(Path(__file__).with_name("backend.so"))
    torch.utils.rename_privateuse1_backend("{NAME}")
    module = ModuleType("torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    torch._register_device_module("{NAME}", module)
    torch.utils.generate_methods_for_privateuse1_backend()
'''
METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n"
ENTRY_POINTS = f"[torch.backends]\n{NAME} = {PACKAGE}:autoload\n"


def build(site: Path, compiler: str) -> None:
    """Write the package into a folder that is to be on the path of Python."""
    folders = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    options = ["-shared", "-fPIC", "-O0", "-std=c++20", abi]
    package = site / PACKAGE
    package.mkdir()
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]
    target = ["-o", str(package / "backend.so")]
    subprocess.run([compiler, *options, *folders, str(SOURCE), *libraries, *target], check=True)
    (package / "__init__.py").write_text(AUTOLOAD)
    metadata = site / f"{PACKAGE}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)

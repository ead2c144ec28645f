"""Getting a kernel's TTIR from Triton's front end, which needs no GPU: what a GPU's compiler would be given."""

import ast
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITCallable, JITFunction, mangle_type

TARGET = GPUTarget("cuda", 90, 32)
"""The GPU that kernels are read for, a Hopper: which target it is decides on 8-bit formats, say."""

CONSTANT = "constexpr"

Path = tuple[int, ...]
"""Where a value is among the arguments: the number of the argument, and positions in tuples below it."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a launch: what the front end has to know of them, and the values that the code is called with.

    Attributes:
        kinds: by parameter, the type of its argument as Triton's signatures have it, a tuple for a tuple.
        constants: by path, the values that are compiled in.
        given: all other values, in the order of the kernel's IR.
        names: the parameter of each of these.
    """

    kinds: dict[str, Any]
    constants: dict[Path, Any]
    given: list[Any]
    names: list[str]

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what the IR depends on, of this launch. Equal numbers of different types are not the same."""
        told = [(path, type(x), x) for path, x in self.constants.items()]
        return (*self.kinds.values(), *told)


def parsed_once(function: JITCallable) -> ast.AST:
    """Return the syntax tree of a function, which Triton's front end would parse anew at each call in a kernel."""
    tree: ast.AST | None = vars(function).get("_tree")
    if tree is None:
        tree = _parse(function)
        vars(function)["_tree"] = tree
    return tree


_parse = JITCallable.parse


def arguments_of(fn: JITFunction[Any], values: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a launch. Numbers are not compiled in, so that they compile nothing anew."""
    kinds: dict[str, Any] = {}
    constants: dict[Path, Any] = {}
    given: list[Any] = []
    names: list[str] = []
    for number, (name, is_constant, annotated) in enumerate(_parameters(fn)):
        value = values[name]
        if is_constant:
            constants[(number,)] = value
            kinds[name] = CONSTANT
            continue
        if annotated and not hasattr(value, "data_ptr"):
            kinds[name] = annotated
            given.append(value)
        else:
            kinds[name] = _kind((number,), value, constants, given)
        names += [name] * (len(given) - len(names))
    return Arguments(kinds, constants, given, names)


@cache
def _parameters(fn: JITFunction[Any]) -> list[tuple[str, bool, str]]:
    """Return the parameters of a kernel: name, whether it is a constant, and the type that it is annotated with."""
    return [(x.name, x.is_constexpr, x.annotation_type) for x in fn.params]


def _kind(path: Path, value: Any, constants: dict[Path, Any], given: list[Any]) -> Any:
    """Return the type of a value, and enter it among the constants or those that are given to the code."""
    if isinstance(value, Tensor):
        given.append(value)
        return _kind_of_tensors(value.dtype)
    if isinstance(value, tuple | tl.tuple):
        return tuple(_kind((*path, i), x, constants, given) for i, x in enumerate(value))
    if value is None or isinstance(value, tl.constexpr | tl.dtype | JITCallable | str):
        constants[path] = value
        return CONSTANT
    given.append(value)
    return mangle_type(value)


@cache
def _kind_of_tensors(dtype: torch.dtype) -> Any:
    return mangle_type(torch.empty(0, dtype=dtype))


def ir_of(fn: JITFunction[Any], arguments: Arguments, *, debug: bool) -> str:
    """Return the TTIR of a kernel with the places of its operations; raises what Triton's front end raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = make_backend(TARGET)
        options = backend.parse_options({"debug": debug})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        implementations = backend.get_codegen_implementation(options)
        # A GPU's matrix unit needs larger tiles. Here they may have any size, as in Triton's interpreter.
        implementations["min_dot_size"] = lambda *_: (1, 1, 1)
        source = ASTSource(fn, arguments.kinds, arguments.constants)
        module = source.make_ir(TARGET, options, implementations, backend.get_module_map(), context)
        _simplify(module)
    return str(module)


def _simplify(module: Any) -> None:
    """Inline functions, turn block pointers and tensor descriptors into pointers, and move work out of loops."""
    manager = ir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    if hasattr(passes.ttir, "add_rewrite_tensor_pointer"):  # to Triton 3.8
        passes.ttir.add_rewrite_tensor_pointer(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.common.add_cse(manager)
    passes.ttir.add_triton_licm(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "simplify")

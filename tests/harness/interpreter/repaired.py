"""Triton's interpreter, repaired: it computes what a GPU computes, within what PTX allows.

Triton's own interpreter keeps bfloat16 and 8-bit numbers as bit patterns, and adds, multiplies and compares the
patterns; its casts truncate, lose carries and misread subnormals. ``repair`` replaces the methods that are wrong, for
every kernel of the process. It works for Triton 3.6 to 3.9, and needs nothing but NumPy, Triton and ``formats``, whose
source a stand-alone script contains before that of this file.
"""

import ast
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, TensorHandle

from tests.harness.interpreter.formats import (
    FIRST_NOT_FINITE,
    Array,
    decode,
    float_toward_zero,
    fused_to_odd,
    matrix_product,
    to_8_bits,
    to_bfloat16,
    to_integers,
)

DEVICE_LIBRARIES = ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice")


PATTERNS = {"bf16", *FIRST_NOT_FINITE}
"""Formats that NumPy does not have: the interpreter keeps their numbers as unsigned integers."""


REDUCTIONS = {
    "_sum_combine": np.add.reduce,
    "_elementwise_max": np.fmax.reduce,
    "_elementwise_min": np.fmin.reduce,
}
"""NumPy's reductions by the names of those functions in ``triton.language.standard`` that they stand for."""

programs = types.SimpleNamespace(order="", most=0, kernel=None)
"""How the programs of launches run, of which a GPU promises no order.

``order`` is "forward" for one after the other by their numbers, "backward" for one after the other from the last one,
and "" for the quickest way, which here is "forward". ``most`` is the number of programs of the largest launch so far
whose order may be chosen. ``kernel`` is the one that is interpreted.
"""

waiting = set[Any]()
"""Kernels that have come to a ``while`` loop: they may wait for a program before them, so these always come first."""


def values_of(handle: TensorHandle) -> Array:
    """Return the numbers of a tensor: as float32 if it holds patterns, else as its own array."""
    name = handle.dtype.scalar.name
    return decode(handle.data, name) if name in PATTERNS else handle.data


def terms_of(handle: TensorHandle) -> Array:
    """Return a tensor's numbers for arithmetic: those of patterns in float64, so that only the last step rounds."""
    values = values_of(handle)
    return values if values is handle.data else values.astype(np.float64)


def handle_of(values: Array, dtype: tl.dtype, *, toward_zero: bool = False) -> TensorHandle:
    """Return a tensor of ``dtype`` with these numbers, rounded to nearest even or toward zero."""
    dtype = dtype.scalar
    if dtype.name == "bf16":
        return TensorHandle(to_bfloat16(values, toward_zero), dtype)
    if dtype.name in PATTERNS:
        return TensorHandle(to_8_bits(values, dtype.name, toward_zero), dtype)
    expected = numpy_dtype(dtype)
    if expected.kind == "f" and toward_zero:
        return TensorHandle(float_toward_zero(values, expected), dtype)
    return TensorHandle(values if values.dtype == expected else values.astype(expected), dtype)


@functools.cache
def _numpy_dtype_by_name(name: str) -> np.dtype[Any]:
    return _original_numpy_dtype(tl.dtype(name))


def numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """Return the type of an array's elements: patterns are unsigned integers, and pointers uint64."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_dtype_by_name(scalar.name)


_original_numpy_dtype = interpreter._get_np_dtype


class Builder(InterpreterBuilder):
    """Methods that replace those of ``InterpreterBuilder``."""

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        """Apply an operation to two tensors of one type; comparisons give int1, whatever type they compare."""
        x, y = terms_of(lhs), terms_of(rhs)
        if x.dtype == np.bool_ and y.dtype == np.bool_:
            # Triton's int1 wraps around, as all its integers do; NumPy's bool has no subtraction.
            return TensorHandle((op(x.astype(np.int8), y.astype(np.int8)) & 1).astype(np.bool_), tl.int1)
        result = op(x, y)
        return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else handle_of(result, lhs.dtype)

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        """Apply an operation to one tensor."""
        return handle_of(op(terms_of(arg)), arg.dtype)

    def create_fneg(self, arg: TensorHandle) -> TensorHandle:
        """Return the tensor with the opposite sign."""
        return self.unary_op(arg, np.negative)

    def create_fabs(self, arg: TensorHandle) -> TensorHandle:
        """Return the tensor without its sign."""
        return self.unary_op(arg, np.abs)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        """Return the smaller number, or the one that is not NaN."""
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        """Return the larger number, or the one that is not NaN."""
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(
        self, arg: TensorHandle, low: TensorHandle, high: TensorHandle, propagate_nans: Any
    ) -> TensorHandle:
        """Return the tensor limited to a range; NaN stays, or becomes the lower limit."""
        stays = propagate_nans == interpreter._ir.PROPAGATE_NAN.ALL
        at_least, at_most = (np.maximum, np.minimum) if stays else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, low, at_least), high, at_most)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        """Return the product and sum with one rounding (two for float64, for which Triton itself rounds twice)."""
        if z.dtype.scalar.name == "fp64":
            return _original_fma(self, x, y, z)
        return handle_of(fused_to_odd(values_of(x), values_of(y), values_of(z)), z.dtype)

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, *_: Any
    ) -> TensorHandle:
        """Return ``d + a @ b``, summed in the wider of float32 and d's format; sums of integers are exact."""
        wide = np.float64 if d.data.dtype.kind in "iu" or d.data.dtype == np.float64 else np.float32
        precision = input_precision.name.lower() if a.dtype.scalar.name == "fp32" else "ieee"
        of_a, of_b = (values_of(x).astype(wide, copy=False) for x in (a, b))
        product = matrix_product(of_a, of_b, precision)
        if d.data.dtype.kind in "iu":
            return TensorHandle(product.astype(np.int64).astype(d.data.dtype) + d.data, d.dtype.scalar)
        return handle_of(product + values_of(d), d.dtype)

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        """Return the numbers in another type, rounded to nearest even; numbers that become integers are cut off."""
        values, to = values_of(src), numpy_dtype(dst_type)
        if dst_type.scalar.name in PATTERNS:
            return handle_of(values, dst_type)
        if values.dtype.kind == "f" and to.kind in "iu":
            return TensorHandle(to_integers(values, to), dst_type.scalar)
        return TensorHandle(values.astype(to), dst_type.scalar)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        """Return the numbers in another format, rounded as asked."""
        toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
        return handle_of(values_of(src), dst_type, toward_zero=toward_zero)

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        """Begin a launch of so many programs."""
        _original_set_grid_dim(self, nx, ny, nz)
        if programs.kernel not in waiting:
            programs.most = max(programs.most, nx * ny * nz)

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        """Begin a program: that of these numbers or, backward, the one that is as far from the end."""
        if programs.order == "backward" and programs.kernel not in waiting:
            x, y, z = (count - 1 - i for count, i in zip(self.grid_dim, (x, y, z), strict=True))
        _original_set_grid_idx(self, x, y, z)

    def get_bf16(self, value: float) -> TensorHandle:
        """Return a bfloat16 constant."""
        return handle_of(np.array([value], np.float64), tl.bfloat16)

    def create_atomic_rmw(
        self, op: Any, ptr: TensorHandle, val: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        """Change memory and return what it held before. bfloat16 is summed here, as Triton's sums refuse patterns."""
        if op != interpreter._ir.ATOMIC_OP.FADD or val.dtype.scalar.name != "bf16":
            return _original_atomic_rmw(self, op, ptr, val, mask, sem, scope)
        pointers, patterns, chosen = (
            np.ascontiguousarray(np.broadcast_to(x.data, val.data.shape)).ravel() for x in (ptr, val, mask)
        )
        before = np.zeros_like(patterns)
        waiting = np.flatnonzero(chosen)
        while len(waiting):  # where two threads add to one place, one after the other
            _, first = np.unique(pointers[waiting], return_index=True)
            some = waiting[first]
            everyone = np.ones(len(some), bool)
            held = interpreter._interpreter.load(pointers[some], everyone, patterns[some], patterns.dtype)
            old, added = (TensorHandle(x, val.dtype.scalar) for x in (held, patterns[some]))
            interpreter._interpreter.store(pointers[some], self.binary_op(old, added, np.add).data, everyone)
            before[some] = held
            waiting = np.delete(waiting, first)
        return TensorHandle(before.reshape(val.data.shape), val.dtype.scalar)

    def create_descriptor_reduce(
        self, kind: Any, desc: Any, value: TensorHandle, indices: list[TensorHandle]
    ) -> None:
        """Add a tile to memory, or combine it otherwise, through a tensor descriptor."""
        ptrs, mask = desc.materialize_pointers(indices)
        name = kind.name
        is_float, is_unsigned = value.dtype.scalar.is_floating(), value.data.dtype.kind == "u"
        if name == "ADD" and is_float:
            name = "FADD"
        elif name in ("MIN", "MAX") and is_unsigned:
            name = f"U{name}"
        inside = mask if isinstance(mask, TensorHandle) else TensorHandle(mask, tl.int1)
        op, sem = getattr(interpreter._ir.ATOMIC_OP, name), interpreter._ir.MEM_SEMANTIC.RELAXED
        self.create_atomic_rmw(op, ptrs, value, inside, sem, None)


_original_fma = InterpreterBuilder.create_fma
_original_atomic_rmw = InterpreterBuilder.create_atomic_rmw
_original_set_grid_dim = InterpreterBuilder.set_grid_dim
_original_set_grid_idx = InterpreterBuilder.set_grid_idx


def fused_float64(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z of float64 as Triton's own interpreter has it."""
    handles = (TensorHandle(value, tl.float64) for value in np.broadcast_arrays(x, y, z))
    return _original_fma(interpreter.interpreter_builder, *handles).data


class Reduction(ReduceOps):
    """Methods that replace those of ``ReduceOps``."""

    def apply_impl(self, input: tuple[Any, ...]) -> Any:  # noqa: A002
        """Reduce one or more tensors: by NumPy if it has a function for their numbers, else by the reduction's own."""
        reduce = self._of_numpy(input[0].dtype)
        if reduce is None:
            return self.generic_reduce(input)
        data = reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, input[0].dtype)

    def _of_numpy(self, dtype: tl.dtype) -> Any:
        name = getattr(self.combine_fn, "__name__", "")
        is_triton_s = getattr(tl.standard, name, None) is self.combine_fn
        return REDUCTIONS.get(name) if is_triton_s and dtype.name not in PATTERNS else None

    def generic_reduce(self, input: tuple[Any, ...]) -> list[Any]:  # noqa: A002
        """Reduce by the function itself, called on every second entry and its neighbour until one entry is left."""
        axis = 0 if self.axis is None else self.axis
        dtypes, shape = [x.dtype for x in input], input[0].handle.data.shape
        parts = [x.handle.data.ravel() if self.axis is None else x.handle.data for x in input]
        parts = [np.moveaxis(x, axis, 0) for x in parts]
        while len(parts[0]) > 1:
            last = [x[-1:] for x in parts] if len(parts[0]) % 2 else None
            pairs = [x[first : len(x) // 2 * 2 : 2] for first in (0, 1) for x in parts]
            result = self.combine_fn(*map(self.to_tensor, pairs, dtypes * 2))
            results = result if isinstance(result, tuple | tl.tuple) else (result,)
            halves = [
                np.broadcast_to(self._data(r, dtype), pairs[0].shape)
                for r, dtype in zip(results, dtypes, strict=True)
            ]
            parts = halves if last is None else [np.concatenate(x) for x in zip(halves, last, strict=True)]
        kept = [1] * len(shape) if self.axis is None else [*shape[:axis], 1, *shape[axis + 1 :]]
        left = [x[0].reshape(kept) if self.keep_dims else x[0] for x in parts]
        return [self.to_tensor(x, dtype) for x, dtype in zip(left, dtypes, strict=True)]

    def _data(self, result: Any, dtype: tl.dtype) -> Array:
        if isinstance(result, tl.tensor):
            return result.handle.data
        return handle_of(np.asarray(getattr(result, "value", result)), dtype).data


def broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Broadcast two tensors; mostly they have the same shape from the start, which is quick."""
    x, y = lhs.type, rhs.type
    if x.is_block() and y.is_block() and list(x.shape) == list(y.shape):
        return lhs, rhs
    return _original_broadcast(self, lhs, rhs)


_original_broadcast = TritonSemantic.broadcast_impl_value


def block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """Initialise a type; what depends on its shape is worked out only once, since the same types come up often."""
    key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
    if key not in _block_types:
        _original_block_type(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    self.__dict__.update(_block_types[key], element_ty=element_ty)


_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_original_block_type = tl.block_type.__init__


def tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:  # noqa: A002
    """Initialise a tensor; what depends on its type is worked out only once, since the same types come up often."""
    if type.name not in _tensors:
        _original_tensor(self, handle, type)
        _tensors[type.name] = {**vars(self), "handle": None}
    self.__dict__.update(_tensors[type.name], handle=handle, type=type, dtype=type.scalar)


_tensors: dict[str, dict[str, Any]] = {}
_original_tensor = tl.tensor.__init__


Change = tuple[object, str, object, object]
"""The owner of an attribute, its name, what it was, and what it is while a kernel is interpreted."""


def changes_of(scope: Any) -> list[Change]:
    """Return what Triton's own patch changed, each attribute once, although it patches some of them twice."""
    changes: dict[tuple[int, str], Change] = {}
    for owner, name, original in scope._changes:
        changes.setdefault((id(owner), name), (owner, name, original, vars(owner)[name]))
    return list(changes.values())


def one_integer(value: tl.tensor) -> int:
    """Return the number of a tensor of one element, as a loop's bound is. NumPy 2.4 has no ``int`` of an array."""
    return int(value.handle.data.item())


class LanguagePatch:
    """A patch of ``triton.language`` while a kernel is interpreted; only the outermost call applies and removes it."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.is_patched = False

    def enter(self, fn: Any) -> "LanguagePatch | types.SimpleNamespace":
        """Patch for a kernel or a jitted function that it calls; return an object whose ``restore`` undoes that."""
        if self.is_patched:
            return types.SimpleNamespace(restore=lambda: None)
        if self.changes:
            for owner, name, _, patched in self.changes:
                setattr(owner, name, patched)
        else:
            scope = _original_patch(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            scope.set_attr(tl.tensor, "__index__", one_integer)
            self.changes = changes_of(scope)
        self.is_patched = True
        return self

    def restore(self) -> None:
        """Restore the language as it was."""
        self.is_patched = False
        for owner, name, original, _ in self.changes:
            if original is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


_original_patch = interpreter._patch_lang


class Operators(ast.NodeTransformer):
    """Rewrites ``and``, ``or`` and ``not``, which Python reduces to one bool, so that they work on tiles.

    It also has kernels noted as ``waiting`` where they come to a ``while`` loop.
    """

    def visit_While(self, node: ast.While) -> ast.AST:
        """``while a`` becomes ``while _noted(a)``."""
        self.generic_visit(node)
        node.test = ast.copy_location(ast.Call(ast.Name("_noted", ast.Load()), [node.test], []), node.test)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """``a and b`` becomes ``_both(a, lambda: b)``."""
        self.generic_visit(node)
        name = "_both" if isinstance(node.op, ast.And) else "_either"
        first, *rest = node.values
        for value in rest:
            later = ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)
            first = ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [first, later], []), node)
        return first

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """``not a`` becomes ``_inverse(a)``."""
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(ast.Call(ast.Name("_inverse", ast.Load()), [node.operand], []), node)


class Rewriter:
    """Rewrites a kernel's source before it is interpreted."""

    def visit(self, tree: ast.AST) -> ast.AST:
        """Rewrite operators and loops first, then do what Triton does."""
        return _original_rewriter.visit(Operators().visit(tree))


_original_rewriter = interpreter.FunctionRewriter.ast_transformer


def both(first: Any, second: Callable[[], Any]) -> Any:
    """Return ``first and second()``, element by element if first is a tile."""
    return first.logical_and(second()) if is_tile(first) else first and second()


def either(first: Any, second: Callable[[], Any]) -> Any:
    """Return ``first or second()``, element by element if first is a tile."""
    return first.logical_or(second()) if is_tile(first) else first or second()


def inverse(value: Any) -> Any:
    """Return ``not value``, element by element if it is a tile."""
    return value == 0 if is_tile(value) else not value


def noted(condition: Any) -> Any:
    """Return the condition of a ``while`` loop, and note that the kernel has one."""
    waiting.add(programs.kernel)
    return condition


def is_tile(value: Any) -> bool:
    """Whether a value is a tensor of more than one element."""
    return isinstance(value, tl.tensor) and value.handle.data.size > 1


def converted(argument: Any) -> Any:
    """Return an argument of a launch as kernels get it; Triton 3.6 takes Python's bools for integers of 32 bits."""
    if isinstance(argument, bool):
        return tl.tensor(TensorHandle(np.array([argument]), tl.int1), tl.int1)
    return _original_conversion(argument)


_original_conversion = interpreter._implicit_cvt


def run_quietly(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Launch a kernel without NumPy's warnings of overflow and NaN, which a GPU does not give either."""
    programs.kernel = self.fn
    with np.errstate(all="ignore"):
        _original_launch(self, *args, **kwargs)


_original_launch = GridExecutor.__call__


def run_once(self: Autotuner, call: Callable[[], object], **options: Any) -> list[float]:
    """Run a configuration of ``@triton.autotune`` once, and return a time: the same for all, so the first is taken."""
    call()
    return [0.0, 0.0, 0.0]


def device_library_function(name: str, original: Any) -> Any:
    """Return a function of a device library as the NumPy function of that name, if that gives numbers.

    Triton's compiler, which says for whom it calls a function, gets the original one.
    """
    op: Any = getattr(np, name.removeprefix("fast_").removesuffix("f"), None) or getattr(np, name, None)

    is_known = isinstance(op, np.ufunc) and not op.types[0].endswith("?")

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> tl.tensor:
        if "_semantic" in options:
            return original(*args, **options)
        if not is_known or op.nin != len(args):
            raise NotImplementedError(f"libdevice.{name} not supported in interpreter mode")
        tensors = [interpreter.interpreter_semantic.to_tensor(x) for x in args]
        shaped = max(tensors, key=lambda x: x.handle.data.size)
        result = op(*(x.handle.data for x in tensors))
        return tl.tensor(handle_of(result, shaped.dtype), shaped.type)

    return call


def repair() -> None:
    """Repair the interpreter of this process, once. Kernels may be imported before or after that."""
    for mended, replaced in ((Builder, InterpreterBuilder), (Reduction, ReduceOps)):
        for name, method in vars(mended).items():
            if callable(method):
                setattr(replaced, name, method)
    interpreter._get_np_dtype = numpy_dtype
    interpreter.FunctionRewriter.ast_transformer = Rewriter()
    # Rewritten kernels find these names among their globals.
    interpreter._both, interpreter._either, interpreter._inverse = both, either, inverse
    interpreter._noted = noted
    interpreter._patch_lang = LanguagePatch().enter
    interpreter._implicit_cvt = converted
    GridExecutor.__call__ = run_quietly
    Autotuner.do_bench = run_once
    TritonSemantic.broadcast_impl_value = broadcast
    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor
    for library in DEVICE_LIBRARIES:
        module = importlib.import_module(library)
        for name in dir(module):
            if inspect.isfunction(getattr(module, name)):
                setattr(module, name, device_library_function(name, getattr(module, name)))

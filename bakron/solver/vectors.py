"""Vectors of `LANES` floats for numba kernels: loads, stores and lane-wise arithmetic that compile to the machine's vector instructions.

Numba leaves vectors to LLVM's loop vectoriser, which gives up on the short, skewed loops of the tile kernel. These few intrinsics emit
LLVM's own vector types instead; LLVM splits them into whatever registers the machine has, so the same kernel runs everywhere.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8  # rows that the tile kernel rounds at once
Codegen = Any


class Vector(types.Type):
    """Numba type of a vector of `LANES` floats."""

    def __init__(self, dtype: types.Type) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype} x {LANES})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _llvm(vector.dtype))


def _llvm(dtype: types.Type) -> ir.VectorType:
    return ir.VectorType(ir.FloatType() if dtype == types.float32 else ir.DoubleType(), LANES)


def _lanes(indices: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), LANES), indices)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, indices: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    item = cgutils.get_item_pointer(context, builder, array_type, view, indices, wraparound=False)
    return builder.bitcast(item, _llvm(array_type.dtype).as_pointer())


@intrinsic
def load(typingctx: Any, array: Any, i: Any, j: Any) -> tuple[Any, Codegen]:
    """`array[i, j : j + LANES]`, unaligned, unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = builder.load(_pointer(context, builder, array, args[0], args[1:]))
        loaded.align = array.dtype.bitwidth // 8
        return loaded

    return Vector(array.dtype)(array, types.intp, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, i: Any, j: Any, vector: Any) -> tuple[Any, Codegen]:
    """`array[i, j : j + LANES] = vector`, unaligned, unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.store(args[3], _pointer(context, builder, array, args[0], args[1:3]))
        stored.align = array.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, vector), codegen


@intrinsic
def splat(typingctx: Any, x: Any) -> tuple[Any, Codegen]:
    """The scalar in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        undefined = ir.Constant(_llvm(x), ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, undefined, _lanes([0] * LANES))

    return Vector(x)(x), codegen


@intrinsic
def shift(typingctx: Any, a: Any) -> tuple[Any, Codegen]:
    """Lane i takes lane i - 1; lane 0 takes 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shuffle_vector(args[0], ir.Constant(_llvm(a.dtype), None), _lanes([LANES, *range(LANES - 1)]))

    return a(a), codegen


@intrinsic
def where_above(typingctx: Any, x: Any, threshold: Any, yes: Any, no: Any) -> tuple[Any, Codegen]:
    """`yes` in the lanes where `x > threshold`, else `no`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], args[3])

    return x(x, x, x, x), codegen


def _instruction(name: str) -> Any:
    @intrinsic
    def lanewise(typingctx: Any, a: Any, b: Any) -> tuple[Any, Codegen]:
        return a(a, a), lambda context, builder, signature, args: getattr(builder, name)(*args)

    return lanewise


def _call(builder: Any, name: str, dtype: types.Type, args: Any) -> Any:
    vector = _llvm(dtype)
    suffix = f"v{LANES}f{32 if dtype == types.float32 else 64}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * len(args)), f"llvm.{name}.{suffix}")
    return builder.call(function, args)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> tuple[Any, Codegen]:
    """`a * b + c`, fused where the machine can."""
    return a(a, a, a), lambda context, builder, signature, args: _call(builder, "fmuladd", a.dtype, args)


@intrinsic
def rint(typingctx: Any, a: Any) -> tuple[Any, Codegen]:
    """Nearest integer, half to even."""
    return a(a), lambda context, builder, signature, args: _call(builder, "rint", a.dtype, args)


@intrinsic
def clamp(typingctx: Any, a: Any, low: Any, high: Any) -> tuple[Any, Codegen]:
    """`min(max(a, low), high)`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "minnum", a.dtype, [_call(builder, "maxnum", a.dtype, args[:2]), args[2]])

    return a(a, a, a), codegen


add, sub, mul, div = _instruction("fadd"), _instruction("fsub"), _instruction("fmul"), _instruction("fdiv")

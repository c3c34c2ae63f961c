"""Sums that stay in registers: of a few rows with vectors, over a loop whose length is known when it runs.

Factors times vectors of floats, or of int8 that become floats; bytes times words of four bytes, in whole numbers.
Called by the kernel of attention.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from roost.numba_kernels.simd import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    Bytes,
    Codegen,
    Floats,
    Ints,
    call,
    constant,
    dot4,
    load_from,
    operation,
    splat,
    store_to,
)


def _moved(builder: Any, address: ir.Value, by: int) -> ir.Value:
    return builder.add(address, ir.Constant(address.type, by))


def _sums(num_rows: int, num_vectors: int, *, are_apart: bool, are_bytes: bool = False) -> Codegen:
    """(target, bytes between its rows, factors, bytes between their rows, vectors, bytes between them, count).

    Row r of the target is the sum over n < count of factor n of row r times the vectors n, in this order. Vectors that
    lie apart are found by a list of addresses, `vectors`, and an offset instead of the bytes between them; their sums
    are added to what the target holds; they may be of int8. All sums stay in registers.
    """

    def emit(builder: Any, a: list[ir.Value]) -> None:
        target, target_stride, factors, factor_stride, vectors, offset, count = a

        rows = [builder.add(target, builder.mul(target_stride, ir.Constant(target.type, r))) for r in range(num_rows)]
        lines = [builder.add(factors, builder.mul(factor_stride, ir.Constant(target.type, r))) for r in range(num_rows)]
        places = [[_moved(builder, row, 4 * LANES * v) for v in range(num_vectors)] for row in rows]
        none = constant(Floats, 0.0)
        sums = [
            [
                cgutils.alloca_once_value(builder, load_from(builder, at, Floats.llvm) if are_apart else none)
                for at in row
            ]
            for row in places
        ]
        with cgutils.for_range(builder, count) as loop:
            if are_apart:
                entry = builder.add(vectors, builder.mul(loop.index, ir.Constant(target.type, 8)))
                source = builder.add(load_from(builder, entry, I64), offset)
            else:
                source = builder.add(vectors, builder.mul(loop.index, offset))
            if are_bytes:
                codes = [
                    load_from(builder, _moved(builder, source, LANES * v), ir.VectorType(I8, LANES))
                    for v in range(num_vectors)
                ]
                loaded = [builder.sitofp(each, Floats.llvm) for each in codes]
            else:
                loaded = [
                    load_from(builder, _moved(builder, source, 4 * LANES * v), Floats.llvm) for v in range(num_vectors)
                ]
            step = builder.mul(loop.index, ir.Constant(target.type, 4))
            for row, line in zip(sums, lines, strict=True):
                factor = splat(builder, load_from(builder, builder.add(line, step), F32), LANES)
                for each, vector in zip(row, loaded, strict=True):
                    more = call(builder, "llvm.fma.v16f32", Floats.llvm, [factor, vector, builder.load(each)])
                    builder.store(more, each)
        for row, line in zip(places, sums, strict=True):
            for at, each in zip(row, line, strict=True):
                store_to(builder, builder.load(each), at)

    return emit


def sums_of(num_rows: int, num_vectors: int) -> Any:
    """The operation for vectors that follow one another."""
    return operation(types.void, (types.intp,) * 7, _sums(num_rows, num_vectors, are_apart=False))


def sums_apart(num_rows: int, num_vectors: int, *, are_bytes: bool = False) -> Any:
    """The operation for vectors that lie apart."""
    emit = _sums(num_rows, num_vectors, are_apart=True, are_bytes=are_bytes)
    return operation(types.void, (types.intp,) * 7, emit)


def _byte_sums(num_rows: int, num_vectors: int) -> Codegen:
    """(target, bytes between its rows, factors, bytes of a plane, words, bytes between them, count).

    Row r of the target is the product of row r's factors, two planes of bytes of which the first counts 128 times, and
    `count` words of each lane, as floats times the row's scale. A row has the room of four planes: behind two are what
    both sums begin with, and its scale. Sums are whole numbers, so that they have no order.
    """

    def emit(builder: Any, a: list[ir.Value]) -> None:
        target, target_stride, factors, plane, words, word_stride, count = a
        dot = dot4(are_nibbles=False)

        def splat_word(address: ir.Value) -> ir.Value:
            return splat(builder, load_from(builder, address, I32), LANES)

        lines = [builder.add(factors, builder.mul(plane, ir.Constant(plane.type, 4 * r))) for r in range(num_rows)]
        ends = [builder.add(line, builder.shl(plane, ir.Constant(plane.type, 1))) for line in lines]
        sums = [
            [
                [cgutils.alloca_once_value(builder, splat_word(_moved(builder, end, 4 * part))) for part in range(2)]
                for _ in range(num_vectors)
            ]
            for end in ends
        ]
        with cgutils.for_range(builder, count) as loop:
            source = builder.add(words, builder.mul(loop.index, word_stride))
            loaded = [
                load_from(builder, _moved(builder, source, 4 * LANES * v), Bytes.llvm) for v in range(num_vectors)
            ]
            step = builder.mul(loop.index, ir.Constant(plane.type, 4))
            for line, row in zip(lines, sums, strict=True):
                high = splat_word(builder.add(line, step))
                low = splat_word(builder.add(builder.add(line, plane), step))
                for pair, vector in zip(row, loaded, strict=True):
                    for each, factor in zip(pair, (high, low), strict=True):
                        builder.store(dot(builder, [builder.load(each), vector, factor]), each)
        for r, (end, row) in enumerate(zip(ends, sums, strict=True)):
            scale = splat(builder, load_from(builder, _moved(builder, end, 8), F32), LANES)
            place = builder.add(target, builder.mul(target_stride, ir.Constant(plane.type, r)))
            for v, (high, low) in enumerate(row):
                whole = builder.add(builder.shl(builder.load(high), constant(Ints, 7)), builder.load(low))
                store_to(
                    builder,
                    builder.fmul(builder.sitofp(whole, Floats.llvm), scale),
                    _moved(builder, place, 4 * LANES * v),
                )

    return emit


def byte_sums(num_rows: int, num_vectors: int) -> Any:
    """The operation for so many rows at a time, and so many vectors of lanes."""
    return operation(types.void, (types.intp,) * 7, _byte_sums(num_rows, num_vectors))

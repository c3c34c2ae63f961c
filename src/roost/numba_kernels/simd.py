"""SIMD vectors as values inside compiled functions: what Numba's own types cannot say.

A vector has 16 lanes of 32 bits, or 64 bytes; on a CPU with shorter registers LLVM makes several of each. Addresses are
plain integers. All operations are the same on every CPU but `dot4_nibbles` and `dot4_bytes`, which have a form for each
instruction set that multiplies bytes (`DOT`): all of them give the same whole numbers. Used by the kernels beside it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
I8, _I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, F32 = ir.HalfType(), ir.FloatType()


class Vector(types.Type):
    """The type of a vector, as Numba knows it."""

    def __init__(self, name: str, lane: ir.Type, num_lanes: int) -> None:
        super().__init__(name=f"{name}({num_lanes})")
        self.llvm = ir.VectorType(lane, num_lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: object, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


Bytes = Vector("Bytes", I8, 4 * LANES)
Ints = Vector("Ints", I32, LANES)
Floats = Vector("Floats", F32, LANES)
Codegen = Callable[[Any, list[ir.Value]], ir.Value | None]


def operation(result: types.Type, arguments: tuple[types.Type, ...], emit: Codegen) -> Any:
    """A function for compiled code, whose instructions `emit(builder, arguments)` writes."""

    def codegen(context: Any, builder: Any, signature: object, values: list[ir.Value]) -> ir.Value:
        made = emit(builder, values)
        return context.get_dummy_value() if made is None else made

    typed = result(*arguments)
    if len(arguments) == 0:
        return intrinsic(lambda typing_context: (typed, codegen))
    if len(arguments) == 1:
        return intrinsic(lambda typing_context, a: (typed, codegen))
    if len(arguments) == 2:
        return intrinsic(lambda typing_context, a, b: (typed, codegen))
    if len(arguments) == 3:
        return intrinsic(lambda typing_context, a, b, c: (typed, codegen))
    if len(arguments) == 4:
        return intrinsic(lambda typing_context, a, b, c, d: (typed, codegen))
    return intrinsic(lambda typing_context, a, b, c, d, e, f, g: (typed, codegen))


def constant(vector: Vector, value: float) -> ir.Constant:
    """The same number in every lane."""
    return ir.Constant(vector.llvm, [value] * vector.llvm.count)


def call(builder: Any, name: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
    """Call an operation of LLVM or a function of the C library."""
    signature = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def splat(builder: Any, value: ir.Value, num_lanes: int) -> ir.Value:
    """A value in every lane."""
    vector = ir.VectorType(value.type, num_lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    lanes = ir.Constant(ir.VectorType(I32, num_lanes), [0] * num_lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), lanes)


def _shuffled(builder: Any, first: ir.Value, second: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def load_from(builder: Any, address: ir.Value, kind: ir.Type) -> ir.Value:
    """What lies at an address, aligned or not."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _nth(builder: Any, a: list[ir.Value], kind: ir.IntType) -> ir.Value:
    return load_from(builder, builder.add(a[0], builder.mul(a[1], ir.Constant(a[1].type, kind.width // 8))), kind)


# --- memory -----------------------------------------------------------------------------------------------------

load_bytes = operation(Bytes, (types.intp,), lambda b, a: load_from(b, a[0], Bytes.llvm))
load_floats = operation(Floats, (types.intp,), lambda b, a: load_from(b, a[0], Floats.llvm))
load_halfs = operation(  # 16 float16, widened
    Floats, (types.intp,), lambda b, a: b.fpext(load_from(b, a[0], ir.VectorType(_F16, LANES)), Floats.llvm)
)
load_int8s = operation(  # 16 int8, widened
    Floats, (types.intp,), lambda b, a: b.sitofp(load_from(b, a[0], ir.VectorType(I8, LANES)), Floats.llvm)
)
load_float = operation(types.float32, (types.intp,), lambda b, a: load_from(b, a[0], F32))
load_half = operation(types.float32, (types.intp,), lambda b, a: b.fpext(load_from(b, a[0], _F16), F32))
load_int = operation(types.int32, (types.intp,), lambda b, a: load_from(b, a[0], I32))
load_int8 = operation(types.int32, (types.intp,), lambda b, a: b.sext(load_from(b, a[0], I8), I32))
load_byte = operation(types.int32, (types.intp,), lambda b, a: b.zext(load_from(b, a[0], I8), I32))
load_long = operation(types.int64, (types.intp,), lambda b, a: load_from(b, a[0], I64))
float_of_bits = operation(types.float64, (types.int64,), lambda b, a: b.bitcast(a[0], ir.DoubleType()))
load_nth_long = operation(types.int64, (types.intp, types.intp), lambda b, a: _nth(b, a, I64))  # (address, number)
load_nth_int = operation(types.int64, (types.intp, types.intp), lambda b, a: b.sext(_nth(b, a, I32), I64))
splat_four_bytes = operation(Ints, (types.intp,), lambda b, a: splat(b, load_from(b, a[0], I32), LANES))  # in each lane


def store_to(builder: Any, value: ir.Value, address: ir.Value) -> None:
    """Put a value at an address, aligned or not."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


store_floats = operation(types.void, (types.intp, Floats), lambda b, a: store_to(b, a[1], a[0]))
store_ints = operation(types.void, (types.intp, Ints), lambda b, a: store_to(b, a[1], a[0]))
store_float = operation(types.void, (types.intp, types.float32), lambda b, a: store_to(b, a[1], a[0]))
store_int = operation(types.void, (types.intp, types.int32), lambda b, a: store_to(b, a[1], a[0]))
store_long = operation(types.void, (types.intp, types.int64), lambda b, a: store_to(b, a[1], a[0]))
store_half = operation(types.void, (types.intp, types.float32), lambda b, a: store_to(b, b.fptrunc(a[1], _F16), a[0]))
store_int8 = operation(types.void, (types.intp, types.int64), lambda b, a: store_to(b, b.trunc(a[1], I8), a[0]))
store_halfs = operation(
    types.void, (types.intp, Floats), lambda b, a: store_to(b, b.fptrunc(a[1], ir.VectorType(_F16, LANES)), a[0])
)


def _store_int8s(builder: Any, a: list[ir.Value]) -> None:
    whole = call(builder, "llvm.rint.v16f32", Floats.llvm, [a[1]])
    store_to(builder, builder.trunc(builder.fptosi(whole, Ints.llvm), ir.VectorType(I8, LANES)), a[0])


store_int8s = operation(types.void, (types.intp, Floats), _store_int8s)  # rounded to even; within int8, or undefined


def _prefetch(builder: Any, a: list[ir.Value]) -> None:
    """Have a cache line brought near, without waiting for it."""
    line = builder.inttoptr(a[0], I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [line, I32(0), I32(2), I32(1)])  # to read; the second cache; data


prefetch = operation(types.void, (types.intp,), _prefetch)

# --- arithmetic -------------------------------------------------------------------------------------------------

zero_ints = operation(Ints, (), lambda b, a: constant(Ints, 0))
zero_floats = operation(Floats, (), lambda b, a: constant(Floats, 0.0))
splat_float = operation(Floats, (types.float32,), lambda b, a: splat(b, a[0], LANES))
splat_int = operation(Ints, (types.int32,), lambda b, a: splat(b, a[0], LANES))
add_ints = operation(Ints, (Ints, Ints), lambda b, a: b.add(*a))
to_floats = operation(Floats, (Ints,), lambda b, a: b.sitofp(a[0], Floats.llvm))
to_ints = operation(Ints, (Floats,), lambda b, a: b.fptosi(a[0], Ints.llvm))  # towards zero
add = operation(Floats, (Floats, Floats), lambda b, a: b.fadd(*a))
sub = operation(Floats, (Floats, Floats), lambda b, a: b.fsub(*a))
mul = operation(Floats, (Floats, Floats), lambda b, a: b.fmul(*a))
div = operation(Floats, (Floats, Floats), lambda b, a: b.fdiv(*a))
fma = operation(Floats, (Floats, Floats, Floats), lambda b, a: call(b, "llvm.fma.v16f32", Floats.llvm, a))  # a*b + c
maximum = operation(Floats, (Floats, Floats), lambda b, a: call(b, "llvm.maxnum.v16f32", Floats.llvm, a))
minimum = operation(Floats, (Floats, Floats), lambda b, a: call(b, "llvm.minnum.v16f32", Floats.llvm, a))
absolute = operation(Floats, (Floats,), lambda b, a: call(b, "llvm.fabs.v16f32", Floats.llvm, a))
rounded = operation(Floats, (Floats,), lambda b, a: call(b, "llvm.rint.v16f32", Floats.llvm, a))  # halves to even
where_between = (
    operation(  # (first, last, values): lanes whose number is in [first, last), and minus infinity elsewhere
        Floats,
        (types.int32, types.int32, Floats),
        lambda b, a: b.select(
            b.and_(
                b.icmp_signed(">=", ir.Constant(Ints.llvm, list(range(LANES))), splat(b, a[0], LANES)),
                b.icmp_signed("<", ir.Constant(Ints.llvm, list(range(LANES))), splat(b, a[1], LANES)),
            ),
            a[2],
            constant(Floats, float("-inf")),
        ),
    )
)
any_above = operation(  # (values, limit): whether a lane is above it, or either is not a number
    types.boolean,
    (Floats, types.float32),
    lambda b, a: b.icmp_unsigned(
        "!=",
        b.bitcast(b.fcmp_unordered(">", a[0], splat(b, a[1], LANES)), ir.IntType(LANES)),
        ir.Constant(ir.IntType(LANES), 0),
    ),
)
or_no_number = operation(  # (source, values): values, but where the source is not a number
    Floats, (Floats, Floats), lambda b, a: b.select(b.fcmp_unordered("uno", a[0], a[0]), a[0], a[1])
)
first_of = operation(types.float32, (Floats,), lambda b, a: b.extract_element(a[0], I32(0)))


def _reduced(combine: Callable[[Any, ir.Value, ir.Value], ir.Value]) -> Codegen:
    """Halves combined lane by lane until one lane is left: one order on every CPU."""

    def emit(builder: Any, a: list[ir.Value]) -> ir.Value:
        left = a[0]
        while left.type.count > 1:
            half = left.type.count // 2
            low = _shuffled(builder, left, left, list(range(half)))
            left = combine(builder, low, _shuffled(builder, left, left, list(range(half, 2 * half))))
        return builder.extract_element(left, I32(0))

    return emit


sum_of = operation(types.float32, (Floats,), _reduced(lambda b, x, y: b.fadd(x, y)))
largest_of = operation(types.float32, (Floats,), _reduced(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y)))
sum_of_ints = operation(types.int32, (Ints,), _reduced(lambda b, x, y: b.add(x, y)))


def _exp2(builder: Any, a: list[ir.Value]) -> ir.Value:
    """2 to the power of each lane, at most 0: a polynomial of the fraction, and the exponent put together by bits.

    What is no number stays none.
    """
    least = call(builder, "llvm.maxnum.v16f32", Floats.llvm, [a[0], constant(Floats, _EXPONENT_LEAST)])
    whole = call(builder, "llvm.rint.v16f32", Floats.llvm, [least])
    fraction = builder.fsub(least, whole)  # [-0.5, 0.5]
    power = constant(Floats, _EXP2_TERMS[0])
    for term in _EXP2_TERMS[1:]:
        power = call(builder, "llvm.fma.v16f32", Floats.llvm, [power, fraction, constant(Floats, term)])
    exponent = builder.shl(builder.fptosi(whole, Ints.llvm), constant(Ints, 23))
    made = builder.bitcast(builder.add(builder.bitcast(power, Ints.llvm), exponent), Floats.llvm)
    is_nothing = builder.fcmp_ordered("<", a[0], constant(Floats, _EXPONENT_LEAST))
    made = builder.select(is_nothing, constant(Floats, 0.0), made)
    return builder.select(builder.fcmp_unordered("uno", a[0], a[0]), a[0], made)


_EXPONENT_LEAST = -125.0  # below it the result is 0: no denormal numbers
_EXP2_TERMS = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)  # Taylor's
exp2 = operation(Floats, (Floats,), _exp2)


def _transpose(builder: Any, a: list[ir.Value]) -> None:
    """16 rows of 16 numbers, `stride` bytes apart, become 16 columns: pairs of rows are woven into each other."""
    target, source, stride = a
    rows = [
        load_from(builder, builder.add(source, builder.mul(stride, ir.Constant(stride.type, number))), Floats.llvm)
        for number in range(LANES)
    ]
    for row, column in enumerate(woven(builder, rows)):
        store_to(builder, column, builder.add(target, ir.Constant(target.type, 4 * LANES * row)))


def woven(builder: Any, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of 16 vectors."""
    half = LANES // 2
    low = [lane for pair in zip(range(half), range(LANES, LANES + half), strict=True) for lane in pair]
    high = [lane + half for lane in low]
    for _ in range(4):  # log2 of LANES
        rows = [
            _shuffled(builder, rows[number], rows[number + half], lanes)
            for number in range(half)
            for lanes in (low, high)
        ]
    return rows


transpose = operation(types.void, (types.intp,) * 3, _transpose)  # (target, source, bytes between rows)


def _transposed_from(kind: ir.Type, widen: Callable[[Any, ir.Value], ir.Value]) -> Codegen:
    """(target, bytes between its rows, addresses, offset): 16 rows that lie apart become 16 columns of floats."""

    def emit(builder: Any, a: list[ir.Value]) -> None:
        target, stride, addresses, offset = a
        rows = []
        for number in range(LANES):
            address = load_from(builder, builder.add(addresses, ir.Constant(addresses.type, 8 * number)), I64)
            rows.append(load_from(builder, builder.add(address, offset), ir.VectorType(kind, LANES)))
        for column in woven(builder, rows):  # as short as they are: then they are fewer registers
            store_to(builder, widen(builder, column), target)
            target = builder.add(target, stride)

    return emit


transpose_floats_from = operation(types.void, (types.intp,) * 4, _transposed_from(F32, lambda b, x: x))
transpose_halfs_from = operation(
    types.void, (types.intp,) * 4, _transposed_from(_F16, lambda b, x: b.fpext(x, Floats.llvm))
)

# --- products of bytes ------------------------------------------------------------------------------------------


def low_nibbles_of(builder: Any, a: list[ir.Value]) -> ir.Value:
    """The lower half of each byte."""
    return builder.and_(a[0], constant(Bytes, 15))


def high_nibbles_of(builder: Any, a: list[ir.Value]) -> ir.Value:
    """The upper half of each byte; shifted as words, since few CPUs shift bytes."""
    words = builder.lshr(builder.bitcast(a[0], Ints.llvm), constant(Ints, 4))
    return builder.and_(builder.bitcast(words, Bytes.llvm), constant(Bytes, 15))


low_nibbles = operation(Bytes, (Bytes,), low_nibbles_of)
high_nibbles = operation(Bytes, (Bytes,), high_nibbles_of)


def _dot_of(features: Mapping[str, bool]) -> str | None:
    """The instruction set that multiplies bytes; None where there is none of those below, or no float16."""
    if features.get("avx2") and features.get("fma") and features.get("f16c"):
        if features.get("avx512vnni") and features.get("avx512bw"):
            return "vnni512"
        return "vnni256" if features.get("avxvnni") else "avx2"
    return "neon" if features.get("dotprod") else None


def _features() -> Mapping[str, bool]:
    """What the CPU that Numba compiles for can do."""
    named = numba.config.CPU_FEATURES
    if named is None and numba.config.CPU_NAME is None:
        return dict(llvmlite.binding.get_host_cpu_features())
    return {each[1:]: each.startswith("+") for each in (named or "").split(",") if each}


DOT = _dot_of(_features())
HAS_WIDE_REGISTERS = bool(_features().get("avx512f"))  # 32 of them, each as long as a vector
BYTE_OFFSET = 128 if DOT in ("vnni512", "vnni256") else 0  # added to the bytes of weights: such products want no sign


def _parts(builder: Any, vector: ir.Value, num_parts: int) -> list[ir.Value]:
    size = vector.type.count // num_parts
    return [_shuffled(builder, vector, vector, list(range(n * size, (n + 1) * size))) for n in range(num_parts)]


def _joined(builder: Any, parts: list[ir.Value]) -> ir.Value:
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        parts = [_shuffled(builder, parts[n], parts[n + 1], lanes) for n in range(0, len(parts), 2)]
    return parts[0]


def dot4(are_nibbles: bool) -> Codegen:
    """(sums, weights, four bytes of a token in each lane): each lane adds its four products to its sum."""

    def emit(builder: Any, a: list[ir.Value]) -> ir.Value:
        sums, weights, tokens = a[0], a[1], builder.bitcast(a[2], Bytes.llvm)
        if DOT == "vnni512":
            return call(builder, "llvm.x86.avx512.vpdpbusd.512", Ints.llvm, [sums, weights, tokens])
        num_parts = 4 if DOT == "neon" else 2
        parts = [_parts(builder, each, num_parts) for each in (sums, weights, tokens)]
        return _joined(builder, [_part_dot4(builder, each, are_nibbles) for each in zip(*parts, strict=True)])

    return emit


def _part_dot4(builder: Any, a: tuple[ir.Value, ...], are_nibbles: bool) -> ir.Value:
    sums, weights, tokens = a
    if DOT == "neon":
        return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, list(a))
    if DOT == "vnni256":
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", sums.type, list(a))  # the name of either encoding
    words = ir.VectorType(_I16, 16)
    if not are_nibbles:  # one factor must be unsigned: the sign goes over to the other
        negative = builder.icmp_signed("<", weights, ir.Constant(weights.type, [0] * 32))
        tokens = builder.select(negative, builder.neg(tokens), tokens)
        weights = builder.select(negative, builder.neg(weights), weights)
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", words, [weights, tokens])  # 2 * 127 * 128 at most: they fit
    fours = call(builder, "llvm.x86.avx2.pmadd.wd", sums.type, [pairs, ir.Constant(words, [1] * 16)])
    return builder.add(sums, fours)


dot4_nibbles = operation(Ints, (Ints, Bytes, Ints), dot4(are_nibbles=True))  # weights are 0 to 15
# weights are int8 plus BYTE_OFFSET: whoever adds up takes BYTE_OFFSET times the sum of the token's bytes off again;
# a token's bytes are -127 to 127
dot4_bytes = operation(Ints, (Ints, Bytes, Ints), dot4(are_nibbles=False))

_SIGNS = -0x7F7F7F80 if BYTE_OFFSET else 0  # the highest bit of each byte of a word
# words of four int8 become columns, as `dot4_bytes` takes weights
transpose_bytes_from = operation(
    types.void, (types.intp,) * 4, _transposed_from(I32, lambda b, x: b.xor(x, constant(Ints, _SIGNS)))
)

# --- threads ----------------------------------------------------------------------------------------------------


def _atomic(builder: Any, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I64.as_pointer())


atomic_add = operation(  # what was there before
    types.int64,
    (types.intp, types.int64),
    lambda b, a: b.atomic_rmw("add", _atomic(b, a[0]), a[1], "seq_cst"),
)
atomic_swap = operation(  # what was there before
    types.int64,
    (types.intp, types.int64),
    lambda b, a: b.atomic_rmw("xchg", _atomic(b, a[0]), a[1], "seq_cst"),
)
atomic_change = operation(  # (address, from, to): whether it was `from`, and is `to` now
    types.boolean,
    (types.intp, types.int64, types.int64),
    lambda b, a: b.extract_value(b.cmpxchg(_atomic(b, a[0]), a[1], a[2], "seq_cst", "seq_cst"), 1),
)
atomic_load = operation(types.int64, (types.intp,), lambda b, a: b.load_atomic(_atomic(b, a[0]), "acquire", 8))


def _atomic_store(builder: Any, a: list[ir.Value]) -> None:
    builder.store_atomic(a[1], _atomic(builder, a[0]), "release", 8)


atomic_store = operation(types.void, (types.intp, types.int64), _atomic_store)


def _relax(builder: Any, a: list[ir.Value]) -> None:
    """Tell the core that its thread only waits."""
    if DOT == "neon":
        call(builder, "llvm.aarch64.hint", ir.VoidType(), [I32(1)])
    elif llvmlite.binding.get_process_triple().startswith(("x86", "i686")):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


relax = operation(types.void, (), _relax)

"""Vectors in compiled code: the same numbers as numpy's, by every instruction set that this machine can run."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import njit

from roost.numba_kernels import simd
from roost.numba_kernels.simd import (
    dot4_bytes,
    dot4_nibbles,
    exp2,
    high_nibbles,
    largest_of,
    load_bytes,
    load_floats,
    load_halfs,
    load_int8s,
    low_nibbles,
    splat_four_bytes,
    store_float,
    store_floats,
    store_halfs,
    store_int8s,
    store_ints,
    sum_of,
    transpose,
    zero_ints,
)

HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"}


def address(array: np.ndarray) -> int:
    """Where an array lies."""
    return array.ctypes.data


@njit
def products(weights, tokens, output):
    """Products of four bytes in each lane: of bytes, of low halves, of high halves."""
    both, token = load_bytes(weights), splat_four_bytes(tokens)
    store_ints(output, dot4_bytes(zero_ints(), both, token))
    store_ints(output + 64, dot4_nibbles(zero_ints(), low_nibbles(both), token))
    store_ints(output + 128, dot4_nibbles(zero_ints(), high_nibbles(both), token))


@njit
def numbers(source, output):
    """Sixteen floats: their powers of two, their sum, the largest, and what float16 and int8 make of them."""
    floats = load_floats(source)
    store_floats(output, exp2(floats))
    store_float(output + 64, sum_of(floats))
    store_float(output + 68, largest_of(floats))
    store_halfs(output + 128, floats)
    store_int8s(output + 192, floats)
    store_floats(output + 256, load_halfs(output + 128))
    store_floats(output + 320, load_int8s(output + 192))


@njit
def transposed(source, target):
    """Sixteen rows of sixteen."""
    transpose(target, source, 64)


def test_products_of_bytes_are_whole_numbers() -> None:
    random = np.random.default_rng(0)
    for kind in range(20):
        weights = random.integers(-127, 128, 64, dtype=np.int8) if kind else np.full(64, -127, dtype=np.int8)
        tokens = random.integers(-127, 128, 4, dtype=np.int8) if kind else np.full(4, -127, dtype=np.int8)
        kept = (weights.astype(np.int32) + simd.BYTE_OFFSET).astype(np.uint8)
        output, token = np.zeros(48, dtype=np.int32), tokens.astype(np.int32)
        products(address(kept), address(tokens), address(output))
        fours, offset = kept.reshape(16, 4).astype(np.int32), simd.BYTE_OFFSET * token.sum()
        assert (output[:16] - offset == (weights.reshape(16, 4).astype(np.int32) * token).sum(1)).all()
        assert (output[16:32] == ((fours & 15) * token).sum(1)).all()
        assert (output[32:] == ((fours >> 4) * token).sum(1)).all()


def test_numbers_are_numpys() -> None:
    floats = -np.abs(np.random.default_rng(1).standard_normal(16)).astype(np.float32) * 30
    floats[3], output = -np.inf, np.zeros(96, dtype=np.float32)
    numbers(address(floats), address(output))
    np.testing.assert_allclose(output[:16], np.exp2(floats), rtol=3e-7)
    floats[3] = -1.5
    numbers(address(floats), address(output))
    np.testing.assert_allclose(output[16], floats.sum(), rtol=1e-6)
    assert output[17] == floats.max()
    assert (output[64:80] == floats.astype(np.float16)).all()
    assert (output[80:96] == np.rint(floats)).all()


def test_columns_become_rows() -> None:
    rows, columns = np.arange(256, dtype=np.float32).reshape(16, 16), np.zeros((16, 16), dtype=np.float32)
    transposed(address(rows), address(columns))
    assert (columns == rows.T).all()


@pytest.mark.skipif(simd.DOT not in ("vnni512", "vnni256"), reason="needs a CPU that has more than AVX2")
@pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="it runs itself")
def test_a_cpu_with_avx2_alone_computes_the_same() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, **HASWELL},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout

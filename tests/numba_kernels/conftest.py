"""Tests of the CPU kernels in Numba: skipped where it is not installed."""

import pytest

pytest.importorskip("numba")

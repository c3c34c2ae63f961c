"""Where the kernels cannot run, one line says why, and nothing is raised."""

import sys
from pathlib import Path

import numpy as np
import pytest

from roost.numba_kernels import execution, simd, support
from roost.numba_kernels.team import Team


def test_a_machine_that_has_everything_has_nothing_against_it() -> None:
    assert support.why_not() is None


def test_a_broken_numba_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "roost.numba_kernels.simd", None)
    assert (support.why_not() or "").startswith("needs the package numba, which cannot be imported here (")


def test_a_cpu_without_the_instructions_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simd, "DOT", None)
    assert support.why_not() == "needs a CPU with AVX2, FMA and F16C, or with NEON's dot product"


def test_a_cache_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ROOST_CACHE", str(tmp_path / "file"))
    said = support.why_not() or ""
    assert said.startswith(f"keeps compiled kernels in {tmp_path / 'file'}") and "which cannot be written (" in said


def test_compiled_kernels_that_cannot_be_read_are_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROOST_CACHE", str(tmp_path))
    kept = support.compiled_folder() / "program.nbc"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"cut o")

    class ReadsThem(Team):
        """Fails as numba does while the file is there."""

        def run(self, records: np.ndarray) -> None:
            if kept.exists():
                raise EOFError("ran out of input\nand more")
            super().run(records)

    monkeypatch.setattr(execution, "Team", ReadsThem)
    execution.prepare()
    assert not kept.exists()
    (said,) = (each.message for each in caplog.records)
    assert said == f"compiled kernels in {kept.parent} cannot be used (ran out of input): compiling again"


def test_compiled_kernels_are_kept_by_what_they_were_compiled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    here = support.compiled_folder()
    assert support.compiled_folder() == here
    monkeypatch.setattr(sys, "version", "another Python")
    assert support.compiled_folder() != here


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        (("avx2", "fma", "f16c", "avx512vnni", "avx512bw"), "vnni512"),
        (("avx2", "fma", "f16c", "avxvnni"), "vnni256"),
        (("avx2", "fma", "f16c"), "avx2"),
        (("avx2", "fma"), None),
        (("neon", "dotprod"), "neon"),
        ((), None),
    ],
)
def test_the_products_of_bytes_are_those_that_the_cpu_has(features: tuple[str, ...], chosen: str | None) -> None:
    assert simd._dot_of(dict.fromkeys(features, True)) == chosen

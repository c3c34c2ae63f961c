"""Where the kernels cannot run, one line says why, and nothing is raised."""

import pickle
import sys
from pathlib import Path

import pytest

from roost.numba_kernels import simd, support


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


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps("0.61") + pickle.dumps(b"x" * 99)[:-9]])
def test_compiled_kernels_that_cannot_be_read_are_discarded_and_others_stay(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROOST_CACHE", str(tmp_path))
    good, bad = (support.compiled_folder() / name / "program.nbi" for name in ("good", "bad"))
    for path, held in ((good, pickle.dumps("0.61") + pickle.dumps(b"overloads")), (bad, content)):
        path.parent.mkdir(parents=True)
        path.write_bytes(held)
    assert support.why_not() is None
    assert good.exists() and not bad.exists()
    assert [each.message.startswith(f"compiled kernels in {bad} cannot be read (") for each in caplog.records] == [True]


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

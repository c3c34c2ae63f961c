"""Bare `make` says what can be made and makes nothing; what is built is nothing that git sees."""

import os
import re
import subprocess

import pytest

from tests.install.resolve import ROOT


def make(*args: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *args], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_bare_make_lists_every_target_with_one_line_and_makes_nothing() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = [re.fullmatch(r"make ([a-z-]+) +(\S.*)", line) for line in make().splitlines()]
    assert all(listed), "each line is a target and what it does"
    assert sorted(line[1] for line in listed if line) == sorted(phony.split())


def test_a_server_is_built_without_the_packages_of_tests() -> None:
    steps = make("--dry-run", "--always-make", "serve")
    assert "[server]" in steps and "[test]" not in steps
    assert "[test]" in make("--dry-run", "--always-make", "check")


def test_hooks_before_a_commit_run_what_make_check_runs() -> None:
    hooks = re.findall(r"^ *entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    steps = make("--dry-run", "--assume-old=.venv/.ready", "check").splitlines()
    assert steps == hooks


@pytest.mark.parametrize("path", [".venv", "build/lib", "dist/any.whl", "src/roost.egg-info/PKG-INFO"])
def test_git_does_not_see_what_is_built(path: str) -> None:
    ignored = subprocess.run(["git", "check-ignore", "--no-index", "--quiet", path], cwd=ROOT, check=False)
    if ignored.returncode == 128:
        pytest.skip("not a checkout of git")
    assert ignored.returncode == 0

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Just enough of the project for the script to start, away from the real one's environment."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def _setup(project: Path, python: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", project / "scripts" / "setup.sh"],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )


def _interpreter(project: Path, *, refuses: str) -> Path:
    """A Python that fails on code which contains ``refuses``."""
    script = project / "python"
    script.write_text(f'#!/bin/sh\ncase "$*" in *"{refuses}"*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def test_an_old_or_missing_python_is_one_line(project: Path) -> None:
    for python in ("no-such-python", _interpreter(project, refuses="version_info")):
        ran = _setup(project, python)
        assert ran.returncode == 1
        assert ran.stderr == f"setup: Python 3.10 or later is needed ({python} is none); set PYTHON to one\n"
    assert not (project / ".venv").exists()


def test_a_python_without_venv_says_what_to_install(project: Path) -> None:
    ran = _setup(project, _interpreter(project, refuses="ensurepip"))
    assert ran.returncode == 1
    assert "apt install python3-venv" in ran.stderr
    assert not (project / ".venv").exists()

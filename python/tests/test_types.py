"""Types and version of the package."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import pointsman

ROOT = pathlib.Path(__file__).parent.parent.parent


def mypy(*arguments):
    package = pathlib.Path(pointsman.__file__).parent
    # In the directory of the package, because `pointsman` beside it is the source without the native module.
    checked = subprocess.run([sys.executable, "-m", *arguments], cwd=package.parent, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_package_is_typed(tmp_path):
    mypy("mypy", "--strict", "--ignore-missing-imports", f"--cache-dir={tmp_path}", "pointsman")


TYPED = pathlib.Path(__file__).parent / "typed.py"


def test_mypy_finds_misspelled_names_and_nothing_else(tmp_path):
    mypy("mypy", "--strict", f"--cache-dir={tmp_path}", str(TYPED))


def test_pyright_finds_misspelled_names_and_nothing_else(tmp_path):
    settings = {"include": [str(TYPED)], "typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error"}
    settings["extraPaths"] = [str(pathlib.Path(pointsman.__file__).parent.parent)]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    pyright = [sys.executable, "-m", "pyright"]
    if subprocess.run([*pyright, "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("pyright could not be downloaded: its check of the types was NOT run")
    checked = subprocess.run([*pyright, "-p", str(tmp_path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_stub_is_that_of_the_native_module():
    mypy("mypy.stubtest", "pointsman._native")


def test_module_and_command_have_the_version_of_the_workspace():
    manifest = (ROOT / "Cargo.toml").read_text()
    version = re.search(r'\[workspace\.package\]\nversion = "(.+)"', manifest).group(1)
    assert pointsman.__version__ == version
    command = subprocess.run([os.environ["POINTSMAN"], "version"], capture_output=True, text=True, check=True)
    assert command.stdout == f"pointsman {version}\n"
    project = (ROOT / "python/pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and version not in project

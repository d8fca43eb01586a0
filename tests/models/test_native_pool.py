"""The threads of the kernels: all of a job is done once, whoever takes pieces from whom."""

import subprocess
from pathlib import Path

import pytest

from outrider.models.native.compiler import SOURCE

pytestmark = pytest.mark.native

PROGRAM = Path(__file__).with_name("native_pool.cpp")


def test_every_item_is_done_once_and_told_by_who_did_it(tmp_path):
    path, pool = tmp_path / "pool", SOURCE.with_name("pool.h")
    flags = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", f'-DPOOL="{pool}"']
    subprocess.run(["g++", *flags, str(PROGRAM), "-o", str(path)], check=True)
    ran = subprocess.run([str(path)], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout) == (0, "")

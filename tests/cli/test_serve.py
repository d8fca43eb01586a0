"""`outrider serve` with options that do not go together: one line, before anything starts. And where it can start."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["x", "--model-id", "y"], "leave out one"),
        (["x", "--draft", "ngram", "--speculative-tokens", "3"], "leave out one"),
        (["x", "--draft", "teapot"], "unknown drafter"),
        (["x", "--log-level", "loud"], "unknown log level"),
        (["x", "--speculative-tokens", "-1"], "at least 0"),
        (["x", "--api-key", "K", "--tenant-key", ""], "--tenant-key is empty"),
        (["x", "--api-key", ""], "--api-key is empty; give a key, or leave it out"),
        (["./nowhere"], "no such file or folder"),
        (["nosuch"], "unknown model 'nosuch'"),
    ],
)
def test_what_cannot_be_served_is_one_line(outrider, monkeypatch, args, reason):
    monkeypatch.setenv("COLUMNS", "200")
    done = outrider("serve", *args, "--port", 0)
    assert done.code == 2
    assert reason in done.err.strip().splitlines()[-1]
    assert "Traceback" not in done.err


def test_it_runs_out_of_a_folder_where_no_package_is_installed():
    """On a rented machine only src/ is there: the version is the code's own."""
    code = (
        "import importlib.metadata as m\n"
        "def none(name): raise m.PackageNotFoundError(name)\n"
        "known = m.distribution\n"
        "m.distribution = lambda name: none(name) if name == 'outrider' else known(name)\n"
        "import outrider.server.context as c, outrider\n"
        "assert c.VERSION == outrider.__version__"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""`outrider serve` with options that do not go together: one line, before anything starts. And where it can start."""

import subprocess
import sys

import pytest

from outrider.cli.serve import LaunchOptions, _draft
from outrider.server.access import Access
from outrider.server.options import ServerOptions


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
        (["x", "--allow-folder", "/no/such/folder"], "--allow-folder takes a folder, and /no/such/folder does not ex"),
        (["x", "--allow-folder", __file__], f"and {__file__} is a file; check the path"),
        (["x", "--allow-folder", ""], "--allow-folder is empty; give a folder, or leave it out"),
        (["x", "--allow-folder", "~nosuchuser/models"], "--allow-folder: Could not determine home directory"),
        (["x", "--cors", "nonsense"], "not 'nonsense'"),
        (["x", "--cors", "https://example.org", "--cors", "https://example.org/"], "not 'https://example.org/'"),
        (["x", "--cors", "https://Example.org"], "not 'https://Example.org'"),
        (["x", "--cors", "https://example.org:443"], "not 'https://example.org:443'"),
        (["x", "--cors", ""], "not ''"),
        (["x", "--draft", "ngram", "--speculative-tokens", "0"], "leave out one"),
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


@pytest.mark.parametrize("origin", ["https://a.example:8443", "http://[::1]:3000", "*", "null", "tauri://localhost"])
def test_origins_as_browsers_send_them(origin):
    assert ServerOptions(cors=(origin,)).cors == (origin,)


def test_no_speculative_tokens_mean_plain_decoding():
    assert _draft("auto", LaunchOptions(speculative_tokens=0), Access()) == "none"
    assert _draft("auto", LaunchOptions(), Access()) == "auto"


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

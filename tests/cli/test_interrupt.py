"""Ctrl-C before and while a command runs: no trace, exit code 130. Real processes, interrupted at a known import."""

import re
import signal
import subprocess
import sys
import threading

import pytest

# Modules in the order in which a command imports them; the last ones while a model is being loaded.
MOMENTS = ("typer", "numpy", "torch.types", "torch.nn", "outrider.core.sampling", "outrider.cli.options")
LOADING = ("rich.text", "outrider.models.llama")


def interrupted_at(module, *args):
    """Start the command, send SIGINT when the module has been imported; what it printed, and its exit code."""
    command = [sys.executable, "-X", "importtime", "-m", "outrider", *map(str, args)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)  # a chat waits for its first line
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    said, sent = [], False
    for line in process.stderr:
        imported = re.match(r"import time:.*\|\s*(\S.*)$", line)
        if imported is None:
            said.append(line)
        elif imported[1] == module and not sent:
            process.send_signal(signal.SIGINT)
            sent = True
    watchdog.cancel()
    process.stdin.close()
    process.stderr.close()
    return "".join(said), process.wait(), sent


@pytest.mark.parametrize("module", MOMENTS)
def test_ctrl_c_while_it_starts(module):
    said, code, sent = interrupted_at(module, "generate", "x", "--model", "./nowhere")
    assert sent, f"{module} was never imported"
    assert (said, code) == ("\ninterrupted\n", 130)


@pytest.mark.parametrize("module", LOADING)
def test_ctrl_c_while_it_loads(module, tiny_folder):
    said, code, sent = interrupted_at(module, "chat", "--model", tiny_folder)
    assert sent, f"{module} was never imported"
    assert (said, code) == ("\ninterrupted\n", 130)

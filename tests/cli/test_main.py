"""The command as a whole: help, version, mistakes, interruptions."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import outrider as package
from outrider import cli

COMMANDS = ("generate", "chat", "audit", "pull", "models", "demo")
NO_HOME = "this user has no home folder; set OUTRIDER_CACHE to a folder of yours"
RUN = [sys.executable, "-c", "import sys; from outrider.cli import main; sys.exit(main())"]


def test_version(outrider):
    done = outrider("--version")
    assert (done.code, done.out) == (0, f"outrider {package.__version__}\n")


def test_without_arguments_it_helps(outrider):
    done = outrider()
    assert done.code == 0
    assert all(command in done.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_plain_and_has_examples(outrider, command):
    done = outrider(command, "--help")
    assert done.code == 0
    assert f"$ outrider {command}" in done.out
    assert "\x1b" not in done.out


WITHOUT_TORCH = """
import sys
import typer
from outrider import Client, OutriderError, Request, Result, SamplingParams, Settings, Stats
from outrider.cli import app, main

def commands(group, path):
    yield path
    for name, each in getattr(group, "commands", {}).items():
        yield from commands(each, [*path, *name.split()])

for path in commands(typer.main.get_command(app), []):
    assert main([*path, "--help"]) == 0
    print("of", *path, file=sys.stderr)
assert main(["--version"]) == 0
assert main(["models", "--nosuch"]) == main(["config", "check", "nosuch"]) == main(["serve", "--port", "-1"]) == 2
print(*{"torch", "transformers"} & set(sys.modules))
"""


def test_help_does_not_import_torch():
    """Which takes a second or more."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    helped = {line.removeprefix("of ") for line in done.stderr.splitlines()}
    assert {"train lora", "bench matrix", "config check", *COMMANDS} <= helped
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generat"], "generate"),
        (["generate"], "prompt"),
        (["generate", "x", "--temprature", "1"], "--temperature"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "0"], "at least 1"),
        (["generate", "x", "--temperature", "-1"], "0 (greedy) or more"),
        (["generate", "x", "--top-p", "2"], "at most 1"),
        (["generate", "x", "--top-k", "-1"], "0 (off) or more"),
        (["generate", "x", "--device", "toaster"], "cpu"),
        (["generate", "x", "--dtype", "int3"], "float32"),
        (["generate", "x", "--draft", "crystal_ball"], "ngram"),
        (["generate", "x", "--draft", "ngram:depth=3"], "max_n"),
        (["generate", "x", "--draft", "ngram:length=long"], "whole number"),
        (["generate", "x", "--draft", "ngram:store=cloud"], "recent"),
        (["generate", "x", "--draft", "draft_model"], "draft_model:model="),
        (["generate", "x", "--draft", "prediction"], "--prediction"),
        (["generate", "x", "--model", "gpt-17"], "smollm2-135m"),
        (["generate", "x", "--model", "./no/such/folder"], "check the path"),
        (["chat", "--min-p", "3"], "between 0 and 1"),
        (["audit", "--draft", "crystal_ball"], "ngram"),
        (["audit", "--max-tokens", "0"], "at least 1"),
        (["audit", "--samples", "0"], "--samples"),
        (["audit", "--prompts", "no/such/file"], "text file"),
        (["pull", "gpt-17"], "smollm2-135m"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_with_a_remedy(outrider, args, says):
    assert_refused(outrider(*args), says)


def test_a_mistake_leaves_no_trace_in_a_real_shell():
    done = subprocess.run([*RUN, "generate", "x", "--top-p", "2"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: top_p must be above 0 and at most 1, not 2.0\n"


def test_ctrl_c(outrider, monkeypatch):
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.options, "pull", interrupted)
    done = outrider("pull", "smollm2-135m")
    assert (done.code, done.err.strip()) == (130, "interrupted")


@pytest.mark.parametrize("args", [["serve", "--no-model"], ["bench", "serve"]])
@pytest.mark.parametrize("package", ["uvicorn", "httptools"])  # without the latter, headers had no bound of time
def test_without_the_servers_packages_one_line_says_what_to_install(outrider, monkeypatch, args, package):
    monkeypatch.setitem(sys.modules, package, None)
    needs = f"a server needs {package}, not installed for this Python: pip install '.[server]' in a checkout"
    assert_refused(outrider(*args), needs)


def test_the_extra_brings_the_servers_packages():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w-]", line)[0] for line in project["optional-dependencies"]["server"]}
    assert names == set(cli.serve.PACKAGES)


@pytest.mark.parametrize("args", [["--help"], ["models", "--json"], ["serve", "--help"]])
def test_the_rest_works_without_the_servers_packages(args):
    block = "import sys; sys.modules.update(dict.fromkeys(('fastapi', 'starlette', 'uvicorn', 'prometheus_client')))"
    code = f"{block}; import outrider; outrider.LLM, outrider.Client; from outrider.cli import main; main({args!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("args", [["--help"], ["models"], ["models", "--json"]])
def test_without_a_home_there_is_no_trace(args, tmp_path):
    """As an arbitrary user in a container has it: no HOME, and no entry in the list of users."""
    code = (
        "import os, pwd\ndef nobody(*_):\n    raise KeyError('uid not found')\npwd.getpwuid = pwd.getpwnam = nobody\n"
    )
    code += f"import sys; from outrider.cli import main; sys.exit(main({args!r}))"
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "USERPROFILE")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    refused = args[0] == "models"  # its list says what is in the cache
    assert (done.returncode, done.stderr) == ((2, f"error: {NO_HOME}\n") if refused else (0, ""))
    env["OUTRIDER_CACHE"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early_is_no_error():
    code = f"import subprocess as s; p = s.Popen({[*RUN, 'models', '--json']!r}, stdout=s.PIPE, stderr=s.PIPE)"
    code += "; p.stdout.close(); err = p.stderr.read(); p.wait(); print(err.decode(), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("command", "said", "code"),
    [
        ("generate - <&-", "error: nothing came on standard input; pipe a text into it, or give the prompt ", 2),
        ("models --json >&-", "", 0),
        ("models --json 2>&-", "", 0),
        ("models --json >/dev/full", "error: cannot write the output: No space left on device\n", 2),
        ("models >/dev/full", "error: cannot write the output: No space left on device\n", 2),
    ],
)
def test_standard_streams_that_are_closed_or_full(command, said, code):
    shell = f"{sys.executable} -m outrider {command}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == (1 if said else 0)


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["generate", "x", "--nope"], "outrider generate"),
        (["bench", "serve", "--nope"], "outrider bench serve"),
        (["train", "lora", "--nope"], "outrider train lora"),
        (["nope"], "outrider"),
    ],
)
def test_a_misused_command_names_its_own_help(outrider, args, command):
    assert_refused(outrider(*args), f"; see {command} --help\n")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_not_text_are_one_line(tiny_folder, locale):
    command = [sys.executable, "-m", "outrider", "chat", "-m", str(tiny_folder), "--max-tokens", "2"]
    env = {**os.environ, "LC_ALL": locale}
    done = subprocess.run(command, input=b"caf\xe9\n/draft\n", env=env, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"draft: auto\n")
    assert done.stderr == b"error: the line is not valid UTF-8 text; convert it first\n"


def test_a_group_of_commands_alone_helps(outrider):
    done = outrider("config")
    assert (done.code, done.err) == (0, "")
    assert "check" in done.out


def test_two_words_name_the_training_of_an_adapter(outrider):
    assert "Usage: outrider train lora [OPTIONS]" in outrider("train", "lora", "--help").out


def test_models(outrider, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert "outrider pull smollm2-135m" in outrider("models").out
    rows = json.loads(outrider("models", "--json").out)["models"]
    assert {"name", "size", "path"} == set(rows[0])


def assert_refused(done, says):
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert says in done.err

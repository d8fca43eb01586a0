"""What README and guides show is run."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny import Markov, outputs, plainly, prompts, run

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Parts

ROOT = Path(__file__).parents[1]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.S)


def commands():
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("outrider ")]


def outrider(*args, **more):
    return subprocess.run(
        [str(Path(sys.executable).with_name("outrider")), *args], capture_output=True, text=True, **more
    )


@pytest.mark.real
def test_the_python_of_the_readme_runs(capsys):
    (block,) = blocks("README.md", "python")
    exec(compile(block, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert len(said.split()) > 10
    assert "tokens in" in said


@pytest.mark.real
def test_the_first_command_of_the_readme_runs():
    done = outrider(*shlex.split(commands()[0])[1:])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_readme_exists_with_its_options(line):
    words = shlex.split(line, comments=True)
    names = [word for word in words[1:3] if word in ("bench", "serve", "config", "check") or word == words[1]]
    done = outrider(*names, "--help", env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "TERM": "dumb"})
    assert done.returncode == 0, done.stderr
    for word in words[2:]:
        if word.startswith("--"):
            assert word in done.stdout


@pytest.mark.real
def test_the_curl_lines_of_the_readme_work_as_printed():
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line.startswith("curl ")]
    assert len(lines) == 2
    with serving("smollm2-135m") as url:
        for line in lines:
            words = shlex.split(line.replace("localhost:8000", url.removeprefix("http://")))
            said = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout)
            written = said["choices"][0]["message"]["content"] if "choices" in said else said["generated_text"]
            assert len(written.split()) > 3


@contextmanager
def serving(model):
    """A server of ours on a free port, as a user starts it."""
    command = [str(Path(sys.executable).with_name("outrider")), "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = ""
        for line in server.stdout:
            said += line
            if found := re.match(r"listening on (http\S+)", line):
                break
        else:
            pytest.fail(f"the server ended before it was ready: {said}")
        yield found[1]
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_files_that_the_readme_names_are_there():
    for place in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert place.startswith("http") or (ROOT / place).exists(), place


def test_the_drafter_of_the_guide_is_exact():
    scope = {}
    (block,) = blocks("docs/guides/drafters.md", "python")
    exec(compile(block, "docs/guides/drafters.md", "exec"), scope)
    echo, model = scope["Echo"], Markov(seed=4)
    seqs = [Sequence(i, tokens, SamplingParams(max_tokens=20)) for i, tokens in enumerate(prompts(8, vocab=6))]
    engine = run(model, echo(echo.Options(), Parts(model, load=None)), seqs)
    assert engine.stats.drafted > 0
    assert outputs(seqs) == outputs([plainly(model, seq.tokens[: seq.prompt], seq.params) for seq in seqs])

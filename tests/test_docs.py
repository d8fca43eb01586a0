"""What README and guides show is run."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny import Markov, outputs, plainly, prompts, run

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext

ROOT = Path(__file__).parents[1]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.S)


def commands(program="outrider"):
    """The shell commands of the README that run this program; one may go over several lines."""
    found = [each for block in blocks("README.md", "sh") for each in re.split(r"\n(?=\S)", block)]
    return [each.strip().replace("\\\n", "") for each in found if each.startswith(f"{program} ")]


def outrider(*args, **more):
    return subprocess.run(
        [str(Path(sys.executable).with_name("outrider")), *args], capture_output=True, text=True, **more
    )


@functools.cache
def described(*names):
    return outrider(*names, "--help", env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "TERM": "dumb"})


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
    done = described(*names)
    assert done.returncode == 0, done.stderr
    for word in words[2:]:
        if word.startswith("--"):
            assert word in done.stdout


@pytest.mark.real
def test_the_curl_lines_of_the_readme_work_as_printed():
    assert len(commands("curl")) == 2
    with serving("smollm2-135m") as url:
        for line in commands("curl"):
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


@pytest.mark.real
def test_the_python_of_the_guide_to_structured_output_runs(capsys):
    block, *clients = blocks("docs/guides/structured_output.md", "python")
    for client in clients:  # tests/server/test_structured.py and test_tools.py run the like over HTTP
        compile(client, "docs/guides/structured_output.md", "exec")
    exec(compile(block, "docs/guides/structured_output.md", "exec"), {})
    *person, answer = capsys.readouterr().out.splitlines()  # JSON may go over several lines
    text, ended = "\n".join(person).rsplit(maxsplit=1)
    assert ended == "length" or (ended == "stop" and json.loads(text).keys() == {"name", "age"})
    assert answer in ("yes", "no")


def test_the_drafter_of_the_guide_is_exact():
    scope = {}
    (block,) = blocks("docs/guides/drafters.md", "python")
    exec(compile(block, "docs/guides/drafters.md", "exec"), scope)
    echo, model = scope["Echo"], Markov(seed=4)
    seqs = [Sequence(i, tokens, SamplingParams(max_tokens=20)) for i, tokens in enumerate(prompts(8, vocab=6))]
    engine = run(model, echo(echo.Options(), BuildContext(model, load=None)), seqs)
    assert engine.stats.drafted > 0
    assert outputs(seqs) == outputs([plainly(model, seq.tokens[: seq.prompt], seq.params) for seq in seqs])


GUIDE = "docs/guides/new_drafter.md"


@pytest.fixture(scope="module")
def plug_in(tmp_path_factory):
    """The drafter of the guide, installed as its pyproject.toml says; and the guide's tests beside it."""
    folder = tmp_path_factory.mktemp("plug-in")
    drafter, tests = blocks(GUIDE, "python")
    (project,) = blocks(GUIDE, "toml")
    told = tomllib.loads(project)["project"]
    points = told["entry-points"]["outrider.drafters"]
    info = folder / f"{told['name'].replace('-', '_')}-{told['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n")
    (info / "entry_points.txt").write_text(
        "[outrider.drafters]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
    )
    (folder / "bigram.py").write_text(drafter)
    (folder / "test_bigram.py").write_text(tests)
    return folder


def with_plug_in(folder):
    """The environment in which the plug-in is installed."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def guide_tests(folder, *more):
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command = [sys.executable, "-m", "pytest", *options, *more, str(folder / "test_bigram.py")]
    return subprocess.run(command, capture_output=True, text=True, env=with_plug_in(folder), cwd=ROOT)


def test_the_drafter_of_the_guide_passes_conformance(plug_in):
    done = guide_tests(plug_in)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed == 1 + 3 + 3 * 2 + 2


def test_the_tests_of_the_guide_have_teeth(plug_in, tmp_path):
    """A guessed token that brings a law it was not drawn from, the mistake that the guide warns of."""
    broken = shutil.copytree(plug_in, tmp_path / "broken")
    code = (broken / "bigram.py").read_text()
    law = "import torch\n        law = torch.full((len(tokens), 6), 1 / 6)\n        "
    wrong = code.replace("return Draft.chain(tokens,", law + "return Draft.chain(tokens, law,")
    assert wrong != code
    (broken / "bigram.py").write_text(wrong)
    done = guide_tests(broken, "-k", "law and temperature and rejection")
    assert done.returncode == 1
    assert re.search(r"1 failed", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("program", ["generate", "audit", "bench"])
def test_the_commands_of_the_guide_run(program, plug_in, tiny_folder, tmp_path):
    (line,) = [line for block in blocks(GUIDE, "sh") for line in block.splitlines() if line.split()[1] == program]
    small = {"bench": ["--kind", "chat", "--output", str(tmp_path)], "audit": ["--samples", "60"]}
    done = outrider(
        *shlex.split(line)[1:],
        *("--model", str(tiny_folder), "--threads", "1"),
        *small.get(program, []),
        env=with_plug_in(plug_in),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


MADE_BY_COMMANDS = {"report.md", "profile.md", "host-a.md", "host-b.md"}  # under docs/benchmarks, as they were written


def written_pages():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [page for page in pages if not (page.name in MADE_BY_COMMANDS and "benchmarks" in page.parts)]


def test_lines_of_the_docs_fit_a_screen():
    found = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in written_pages()
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert found == []


def test_links_of_the_docs_lead_somewhere():
    for page in written_pages():
        for place in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            assert place.startswith("http") or (page.parent / place).exists(), f"{page.name}: {place}"

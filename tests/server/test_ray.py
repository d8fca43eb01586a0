"""`outrider serve --ray`: replicas behind the same faces, on a Ray that each test file starts and stops by itself."""

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import requires, version
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli import app
from outrider.core.errors import OutriderError
from outrider.server.ray.scale import Scale
from outrider.settings import Settings

ENDLESS = {"prompt": "the red fox", "max_tokens": 8000, "ignore_eos": True, "temperature": 0, "stream": True}
MANIFEST = Path(__file__).parents[2] / "deploy" / "kuberay.yaml"


class OnRay:
    """`outrider serve --ray` as a user runs it: its address, and its processes."""

    def __init__(self, folder: Path, *args: object) -> None:
        command = [sys.executable, "-m", "outrider", "serve", "--ray", "--port", "0", *map(str, args)]
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**environment, "OMP_NUM_THREADS": "1"}
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), self.errors.read_text()[-3000:]
        self.url = line.split()[2]

    def post(self, path, body, **more):
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def health(self):
        return httpx.get(f"{self.url}/health", timeout=30).json()

    def metric(self, name):
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.M))

    def descendants(self, name=""):
        """Processes below ours, by what they are called."""
        parents, found = {}, []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(folder.name)
                parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found += [pid] if name in (folder / "cmdline").read_text() else []
        return [pid for pid in found if self._ours(pid, parents)]

    def _ours(self, pid, parents):
        while pid > 1:
            pid = parents.get(pid, 0)
            if pid == self.process.pid:
                return True
        return False

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.errors.read_text()[-3000:]

    def close(self):
        left = self.descendants()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        for pid in left:  # only if a test failed before the end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for(what, seconds=60):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def on_ray(quick, tmp_path_factory):
    args = [quick, "--uid", "quick", "--replicas", 2, "--cpus-per-replica", 0.5, "--cache-memory", 0.1]
    server = OnRay(tmp_path_factory.mktemp("ray"), *args, "--max-queue", 40)
    try:
        yield server
        server.stop()
    finally:
        server.close()


@pytest.mark.ray
class TestOnRay:
    def test_every_face_answers_and_the_text_is_the_engines_own(self, on_ray, quick):
        expected = LLM(str(quick), draft="none", threads=1, cache_memory=0.1).generate(
            "the red fox", SamplingParams(max_tokens=24, temperature=0)
        )
        body = {"prompt": "the red fox", "max_tokens": 24, "temperature": 0, "logprobs": 1}
        answer = on_ray.post("/v1/completions", body)
        assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]
        said = answer.json()
        assert said["choices"][0]["text"] == expected.text
        tokens = said["choices"][0]["logprobs"]["tokens"]
        assert (len(tokens), all(tokens)) == (24, True)
        lorax = on_ray.post("/generate", {"inputs": "the red fox", "parameters": {"max_new_tokens": 24}}).json()
        assert lorax["generated_text"] == expected.text
        assert httpx.get(f"{on_ray.url}/v1/models").json()["data"][0]["id"] == "quick"
        wait_for(lambda: on_ray.health()["models"]["quick"]["replicas"] == 2)  # one is enough to be ready
        assert on_ray.health() == {
            "status": "ok",
            "models": {"quick": {"status": "ready", "restarts": 0, "reason": "", "replicas": 2}},
        }

    def test_streams_carry_tokens_and_who_wrote_them(self, on_ray):
        body = {"prompt": "abc abc abc abc", "max_tokens": 16, "temperature": 0, "stream": True}
        body |= {"outrider": {"tokens": True}, "speculative": {"method": "ngram", "length": 4}}
        lines = on_ray.post("/v1/completions", body).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        tokens = [t for event in events for choice in event["choices"] for t in choice["outrider"]["tokens"]]
        texts = "".join(choice["text"] for event in events for choice in event["choices"])
        assert len(tokens) == 16
        assert "".join(token["text"] for token in tokens).startswith(texts[:8])

    @pytest.mark.parametrize(
        ("path", "body", "status", "says"),
        [
            ("/v1/completions", {"prompt": "a", "max_tokens": 99999}, 400, "tokens"),
            ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "no model 'other' is launched"),
            ("/v1/models", {"model_name": "smollm2-135m"}, 400, "runs on Ray"),
        ],
    )
    def test_what_cannot_be_is_refused_with_the_reason(self, on_ray, path, body, status, says):
        answer = on_ray.post(path, body)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text

    def test_a_client_that_goes_away_stops_its_sequence(self, on_ray):
        with httpx.stream("POST", f"{on_ray.url}/v1/completions", json=ENDLESS, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            wait_for(lambda: on_ray.metric("outrider_num_requests_running") == 1)
        wait_for(lambda: on_ray.metric("outrider_num_requests_running") == 0)
        before = busy(on_ray)
        time.sleep(1.5)
        assert busy(on_ray) - before < 0.75, "a replica goes on writing for nobody"

    def test_a_killed_replica_loses_nothing_in_silence_and_comes_back(self, on_ray):
        """Streams that had begun end with an error; whole answers, of which nobody has seen a word, are begun anew."""
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            ends = [pool.submit(outcome, on_ray, i, stream=i < 8) for i in range(16)]
            wait_for(lambda: on_ray.metric("outrider_num_requests_running") >= 12)
            victim, other = sorted(on_ray.descendants("ray::ServeReplica:outrider:Model"))
            os.kill(victim, signal.SIGKILL)
            ended = [each.result() for each in ends]
        assert set(ended[:8]) == {"done", "its replica is gone"}
        assert set(ended[8:]) == {"done"}
        wait_for(lambda: len(set(on_ray.descendants("ray::ServeReplica:outrider:Model")) - {victim}) == 2)
        wait_for(lambda: on_ray.health()["models"]["quick"]["replicas"] == 2)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert set(pool.map(lambda i: outcome(on_ray, i, 50), range(16))) == {"done"}
        assert os.path.exists(f"/proc/{other}")

    def test_sigterm_lets_running_requests_end(self, on_ray):
        """The last test: it ends the server."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            last = pool.submit(outcome, on_ray, 0, 3000)
            wait_for(lambda: on_ray.metric("outrider_num_requests_running") == 1)
            left = on_ray.descendants()
            on_ray.process.send_signal(signal.SIGTERM)
            wait_for(lambda: on_ray.health()["status"] == "draining", 20)
            refused = on_ray.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
            assert last.result() == "done"
        on_ray.stop()
        wait_for(lambda: not [pid for pid in left if os.path.exists(f"/proc/{pid}")])


def outcome(server, i, tokens=1500, stream=True):
    """How a request ended; a connection that breaks off is raised."""
    body = {**ENDLESS, "prompt": f"{i} foxes", "max_tokens": tokens, "stream": stream}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line]
    if lines[-1] == "data: [DONE]" or (answer.status_code == 200 and not stream):
        return "done"
    assert re.match(r'(data: )?\{"error"', lines[-1]), lines[-1]
    return re.search("its replica is gone|shutting down", lines[-1])[0]


def busy(server):
    """Seconds of a CPU that the replicas have used."""
    ticks = 0
    for pid in server.descendants("ray::ServeReplica:outrider:Model"):
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def refusal(*args):
    result = CliRunner().invoke(app, ["serve", *map(str, args)])
    assert isinstance(result.exception, OutriderError | SystemExit), result.exception
    return " ".join(f"{result.output} {result.exception}".split())


@pytest.mark.ray
def test_the_extra_installs_what_runs_here():
    """`pip install '.[ray]'`, which `make` has given as a part of the extra `test`."""
    wanted = [Requirement(line) for line in requires("outrider")]
    extra = [each for each in wanted if each.marker and each.marker.evaluate({"extra": "ray"})]
    plain = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    *server, ray = sorted((each for each in extra if each not in plain), key=lambda each: each.name == "ray")
    names = {each.name for each in server}
    assert names == {"fastapi", "uvicorn", "httptools", "prometheus-client"}  # it answers over HTTP
    assert str(ray).startswith("ray[serve]")
    assert version("ray") in ray.specifier


def test_without_ray_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    assert "pip install '.[ray]' in a checkout" in refusal("--ray")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--replicas", "2"], "--replicas is for Ray; add --ray"),
        (["--gpus-per-replica", "1"], "--gpus-per-replica is for Ray"),
        (["--ray", "--no-model"], "leave out --no-model"),
        (["--ray", "--state", "models.json"], "leave out --state"),
    ],
)
def test_options_that_do_not_belong_together(args, says):
    assert says in refusal(*args)


def test_a_head_is_not_read_here_for_replicas_elsewhere(monkeypatch, tmp_path):
    def unprepared(address):
        raise OutriderError("it goes on")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: name)
    monkeypatch.setattr("outrider.cli.serve._prepare_ray", unprepared)
    monkeypatch.setattr("outrider.server.log.configure", lambda level: None)
    there = "--ray", "--ray-address", "auto", "--adapter-id"
    said = refusal(*there, "/only/there")
    assert "--adapter-id reads a head on this machine" in said
    assert "--draft eagle:head=FOLDER" in said
    assert "it goes on" in refusal("/only/there/model", *there, "eagle")  # the one that comes with the model
    assert "has no config.json" in refusal("--ray", "--adapter-id", tmp_path)  # a Ray of our own reads what lies here
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "--adapter-id reads a head on this machine" in refusal("--ray", "--adapter-id", tmp_path)


def in_a_process(*command):
    """What it prints: Ray is not imported here, for its imports warn."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=180)
    return done.returncode, " ".join(f"{done.stdout} {done.stderr}".split())


BUILD = """
import sys, yaml
from outrider.server.ray.app import application
service = next(each for each in yaml.safe_load_all(open(sys.argv[1])) if each["kind"] == "RayService")
(said,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
assert said["import_path"] == "outrider.server.ray.app:application"
print(type(application(said["args"])).__name__)
application({**said["args"], "replica": 3})
"""


@pytest.mark.ray
class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["--port", "{taken}"], "cannot listen on 127.0.0.1 port {taken} (Address already in use)"),
            (
                ["--port", 0, "--ray-address", "127.0.0.1:{free}", "--allow-folder", "/only/there"],
                "no Ray answers at 127.0.0.1:{free} (Connection",
            ),
            (["--port", 0, "--ray-address", "ray://head:10001"], "'ray://head:10001' is no address of Ray"),
        ],
    )
    def test_a_port_that_is_taken_and_a_ray_that_is_not_there(self, quick, args, says):
        model = "/only/there/model" if "--ray-address" in args else quick  # the replicas' machines have other files
        with socket.create_server(("127.0.0.1", 0)) as once:
            free = once.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as sock:
            ports = {"taken": sock.getsockname()[1], "free": free}
            given = [str(each).format(**ports) for each in args]
            code, said = in_a_process("-m", "outrider", "serve", model, "--ray", *given)
        assert code != 0
        assert says.format(**ports) in said
        assert "Traceback" not in said

    def test_a_model_that_cannot_be_loaded(self, tmp_path):
        (tmp_path / "junk.gguf").write_bytes(b"junk" * 500)
        code, said = in_a_process("-m", "outrider", "serve", tmp_path / "junk.gguf", "--ray", "--port", 0)
        assert code != 0
        assert "error: the replicas cannot start: " in said
        assert "junk.gguf" in said.rpartition("the replicas cannot start: ")[2]

    def test_the_manifest_is_an_application_of_ours(self):
        code, said = in_a_process("-c", BUILD, MANIFEST)
        assert code != 0
        assert said.startswith("Application "), said
        assert "OutriderError: unknown" in said


@pytest.mark.parametrize("replicas", ["0", "-1", "2:1", "many", "1:", "1.5", ""])
def test_a_number_of_replicas_that_is_none(replicas):
    with pytest.raises(OutriderError, match=r"N, or LEAST:MOST"):
        Scale.of(replicas, 0, 0, Settings())


def test_a_scale_fixed_and_moving():
    fixed = Scale.of("3", 0, 0, Settings(threads=2))
    assert (fixed, fixed.replicas(64)) == (Scale(3, 3, 2.0, 0.0), {"num_replicas": 3})
    moving = Scale.of("1:4", 0.5, 1, Settings())
    wanted = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64}
    assert moving.replicas(64) == {"autoscaling_config": wanted}
    assert moving.fitted(Settings()).threads == 1


def test_what_ray_does_not_have_is_refused():
    with pytest.raises(OutriderError, match="3 replicas of 1 CPUs each do not fit: Ray has 2"):
        Scale(3, 3).check({"CPU": 2.0})
    with pytest.raises(OutriderError, match="GPUs each do not fit: Ray has 0"):
        Scale(1, 1, 1.0, 0.5).check({"CPU": 2.0})
    with pytest.raises(OutriderError, match="--gpus-per-replica 1"):
        Scale.of("1", 0, 0, Settings(device="cuda"))
    with pytest.raises(OutriderError, match="leave out history"):
        Scale.of("2", 0, 0, Settings(history="file"))

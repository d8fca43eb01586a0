"""The drafter `history` behind HTTP: a history for each key, over restarts, and none that a request names."""

import json
import signal
import subprocess
import sys

import httpx
import pytest

from outrider.server.options import ServerOptions

KEYS = ("first", "second")
PROMPT = "the red fox"


def ask(server, key, prompt=PROMPT, **more):
    """What became of the drafts, and the text."""
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, **more}
    answer = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return {name: said["metrics"][name] for name in ("steps", "drafted", "accepted", "by_drafter")}, said["choices"]


@pytest.fixture(scope="module")
def server(serve_all, tiny_folder):
    """With two keys."""
    server = serve_all(ServerOptions(api_key=KEYS[0], tenant_keys=KEYS[1:]))
    server.launch(tiny_folder, draft="history", uid="tiny", pace=False)
    return server


class TestTenants:
    def test_texts_of_one_key_speed_up_its_own_requests_and_no_others(self, server):
        first = ask(server, "first")
        again = ask(server, "first")
        assert again[0]["accepted"] > first[0]["accepted"]
        assert again[0]["steps"] < first[0]["steps"]
        assert again[0]["by_drafter"]["history"]["accepted"] == again[0]["accepted"]
        assert ask(server, "second") == first  # as if nothing had been asked before
        assert ask(server, "second") == again
        assert first[1] == again[1]

    def test_a_key_that_is_none_of_them_is_refused(self, server):
        for key in ("third", "firstsecond", "first second"):
            answer = server.post("/v1/completions", {"prompt": "x"}, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 401

    def test_metrics_name_the_drafter(self, server):
        ask(server, "first")
        text = server.get("/metrics", headers={"authorization": "Bearer first"}).text
        assert 'outrider_drafter_accepted_tokens_total{drafter="history",model_name="tiny"}' in text

    @pytest.mark.parametrize("option", ["file", "history", "tenant", "history_tokens"])
    def test_a_request_cannot_name_a_file_a_size_or_a_tenant(self, server, option, tmp_path):
        named = tmp_path / "taken"
        headers = {"authorization": "Bearer first"}
        body = {"prompt": "x", "speculative": {"method": "history", option: str(named)}}
        answer = server.post("/v1/completions", body, headers=headers)
        assert (answer.status_code, "no option" in answer.text) == (400, True)
        launched = server.post("/v1/models", {"model_name": "tiny", option: str(named)}, headers=headers)
        assert launched.status_code in (400, 422)
        assert not named.exists()

    def test_a_tenant_in_a_body_is_not_the_tenant(self, server):
        """Whatever a body says, the key decides."""
        prompt = "a tenant of its own"
        first = ask(server, "first", prompt)
        answer = server.post(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 32, "temperature": 0, "tenant": "first"},
            headers={"authorization": "Bearer second"},
        )
        if answer.status_code == 200:
            assert answer.json()["metrics"]["accepted"] == first[0]["accepted"]
        else:
            assert answer.status_code == 400


def test_without_keys_there_is_one_tenant(serve, tiny_folder):
    server = serve()
    server.launch(tiny_folder, draft="history", uid="tiny", pace=False)
    first, again = ask(server, "any"), ask(server, "other")
    assert again[0]["accepted"] > first[0]["accepted"]


class TestFile:
    def test_a_restart_forgets_nothing_and_mixes_nobody(self, serve, tiny_folder, tmp_path):
        file = tmp_path / "history"
        server = serve(ServerOptions(api_key=KEYS[0], tenant_keys=KEYS[1:]))
        server.launch(tiny_folder, draft="history", uid="tiny", pace=False, history=str(file))
        first = ask(server, "first")
        again = ask(server, "first")
        server.call(server.fleet.terminate("tiny"))
        assert KEYS[0].encode() not in file.read_bytes()
        server.launch(tiny_folder, draft="history", uid="tiny", pace=False, history=str(file))
        assert ask(server, "first")[0]["accepted"] >= again[0]["accepted"] > first[0]["accepted"]
        assert ask(server, "second") == first

    def test_a_server_that_is_told_to_end_writes_it(self, tiny_folder, tmp_path):
        file = tmp_path / "history"
        command = [sys.executable, "-m", "outrider", "serve", str(tiny_folder), "--port", "0", "--threads", "1"]
        command += ["--draft", "history", "--history", str(file), "--cache-memory", "0.1", "--log-level", "error"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                url = process.stdout.readline().split()[2]
                answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 8}, timeout=60)
                assert answer.status_code == 200
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            finally:
                process.kill()
        assert json.loads(file.read_bytes().splitlines()[0])["tokens"][""] > 8

    def test_a_damaged_file_is_one_line_and_the_model_is_not_launched(self, serve, tiny_folder, tmp_path):
        file = tmp_path / "history"
        file.write_text("half a file")
        server = serve()
        with pytest.raises(Exception, match=r"history file .* is not a history file"):
            server.launch(tiny_folder, draft="history", uid="tiny", history=str(file))
        assert file.read_text() == "half a file"
        assert not server.fleet.list()

"""The drafter `grammar` where no grammar is given: it would draft nothing, and says so."""

import json
import socket

import pytest

NONE_HERE = "drafts what a grammar forces, and there is none here"


def refused(done, reason):
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert reason in done.err


@pytest.mark.parametrize("draft", ["grammar", "grammar:length=4"])
def test_generate_refuses_it(outrider, tiny_folder, draft):
    done = outrider("generate", "the sea", "-m", tiny_folder, "--draft", draft)
    refused(done, f"the drafter {draft} {NONE_HERE}; give one (--json-schema")


def test_so_it_does_for_a_file_of_queries(outrider, tiny_folder, tmp_path):
    queries = tmp_path / "q.jsonl"
    queries.write_text('{"query": "the sea"}\n')
    args = ("--input", queries, "--output", tmp_path / "a.jsonl")
    refused(outrider("generate", "-m", tiny_folder, "--draft", "grammar", *args), NONE_HERE)


def test_with_a_grammar_of_the_command_line_or_of_the_config_file_it_drafts(outrider, tiny_folder, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {tiny_folder}\ndraft: grammar\npace: false\nsampling: {{choice: [the sea, the sky]}}\n")
    given = ("-m", tiny_folder, "--draft", "grammar", "--choice", "the sea,the sky")
    for args in (("--config", config), given):
        done = outrider("generate", "the sea", *args, "--json")
        assert (done.code, "note" in done.err) == (0, False), done.err
        said = json.loads(done.out)
        assert said["text"] in ("the sea", "the sky")
        assert said["stats"]["drafted"] > 0


def test_chat_and_demo_refuse_it(outrider, tiny_folder):
    for command in ("chat", "demo"):
        refused(outrider(command, "-m", tiny_folder, "--draft", "grammar"), NONE_HERE)
    done = outrider("chat", "-m", tiny_folder, "--max-tokens", 4, stdin="/draft grammar\n/draft\n")
    assert (done.code, done.out) == (0, "draft: auto\n")
    assert NONE_HERE in done.err


@pytest.mark.parametrize("command", [("bench",), ("bench", "serve")])
def test_benchmarks_refuse_it(outrider, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    refused(outrider(*command, "--draft", "grammar"), "no prompt has one; choose another")


def test_a_server_notes_it_since_requests_may_bring_grammars(outrider, tiny_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that it ends
        port = taken.getsockname()[1]
        done = outrider("serve", tiny_folder, "--draft", "grammar", "--port", port)
    told, ended = done.err.splitlines()
    assert told.startswith("the drafter grammar drafts only for requests that bring a grammar")
    assert f"port {port}" in ended

"""The real vLLM behind our Backend, in its own environment: three engines are opened, 10 to 30 s each."""

from __future__ import annotations

import json

import pytest
from on_vllm import ROOT, install, run

from outrider import build
from outrider.core.request import Request
from outrider.core.sampling import SamplingParams
from outrider.settings import Settings

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_python")]

ARGS = {"enforce_eager": True, "max_model_len": 512}
# As the interface document prints it, but for names of models and what this machine needs.
CONFIG = """\
generator_model_name: {target}
generator_model_platform: vllm
generator_model_platform_args:
  vllm_init_params: {{speculative_model: {draft}, num_speculative_tokens: 5, dtype: float32, enforce_eager: true}}
"""
PROMPTS = ["the red fox", "count the stars, one, two", "a river ends in the sea"]
GREEDY = [{"prompt": text, "params": {"max_tokens": 40, "ignore_eos": True}} for text in PROMPTS]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "params": {"max_tokens": 24, "ignore_eos": True}}
SAMPLED = {"prompt": "the sea", "params": {"max_tokens": 16, "temperature": 1.0, "seed": 7, "ignore_eos": True}}
REFUSED = [
    ({"prompt": "x", "params": {"min_p": 0.1}}, "min_p: vLLM does not apply it while it speculates"),
    ({"prompt": "x", "params": {"logit_bias": {"65": 1.0}}}, "logit_bias: vLLM does not apply it while it speculates"),
    ({"prompt": "x", "draft": "none"}, "the same for all requests"),
    (SAMPLED, "sampling while it speculates on a CPU: vLLM loses the temperature"),
    ({"prompt": "x", "prediction": "y"}, "no drafter that reads one"),
    ({"prompt": "x", "params": {"typical_p": 0.5}}, "typical_p: vLLM has no such option"),
    ({"prompt": [1, 2, 9999]}, "token id 9999 is outside the vocabulary"),
    ({"prompt": "x", "params": {"max_tokens": 5000}}, "set max_tokens to at most"),
    ({"prompt": "fox " * 900}, "shorten the prompt"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": "x", "params": {"logprobs": 100}}, "greater than max allowed"),
]
# What the text may be; each is short enough to end.
HELD = [
    {"prompt": "the red fox", "params": {"max_tokens": 40, **constraint}}
    for constraint in (
        {"json_schema": {"enum": ["red", "blue"]}},
        {"regex": "(ab|cd){2}"},
        {"choice": ["red", "the sea"]},
        {"grammar": 'start: "[" /[ab]/ "]"'},
    )
]
BAD_GRAMMAR = {"prompt": "x", "params": {"json_schema": {"not": {}}}}
FORBIDDEN = {"min_p": 0.2, "temperature": 1.0, "max_tokens": 4}


@pytest.fixture(scope="module")
def target(wide_folder):
    return wide_folder


@pytest.fixture(scope="module")
def draft(wide_twin):
    return wide_twin


@pytest.fixture(scope="module")
def plain(target, vllm_sessions):
    biased = {"prompt": "x", "params": {"logit_bias": {"65": 100.0}, "max_tokens": 3}}
    tasks = {"each": [*GREEDY, CHAT, {"prompt": "x", "params": FORBIDDEN}, biased, SAMPLED, SAMPLED]}
    tasks |= {"held": [*HELD, BAD_GRAMMAR]}
    return vllm_sessions.open(tasks, model=str(target), draft="none", engine_args=ARGS)


@pytest.fixture(scope="module")
def drafted(target, draft, plain, vllm_sessions):
    stopped = {"prompt": PROMPTS[0], "params": {**GREEDY[0]["params"], "stop": [stop_string(plain)]}}
    tasks = {
        "each": [*GREEDY, CHAT, *SHAPED, stopped, *(task for task, _ in REFUSED)],
        "together": GREEDY,
        "held": [*HELD, BAD_GRAMMAR],
        "streamed": CHAT,
        "cancelled": {"prompt": "the fox", "params": {"max_tokens": 400, "ignore_eos": True}},
    }
    return vllm_sessions.open(tasks, model=str(target), draft=f"draft_model:model={draft},length=4", engine_args=ARGS)


def stop_string(plain):
    return plain["each"][0]["text"][8:11]


SHAPED = [
    {"prompt": "the red fox", "params": {"max_tokens": 40, "ignore_eos": True, "n": 2}},
    {"prompt": "the red fox", "params": {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}},
    {"prompt": "the red fox", "params": {"max_tokens": 12, "ignore_eos": True, "bad_words": ["fox"]}},
]


def tokens(answers):
    return [answer["token_ids"] for answer in answers]


def test_greedy_text_is_the_plain_one_and_drafts_are_kept(plain, drafted):
    assert tokens(drafted["each"][:4]) == tokens(plain["each"][:4])
    assert [answer["text"] for answer in drafted["each"][:4]] == [answer["text"] for answer in plain["each"][:4]]
    for answer in drafted["each"][:4]:
        stats = answer["stats"]
        assert 0 < stats["accepted"] < stats["drafted"]
        assert stats["by_drafter"] == {
            "draft_model": {"drafted": stats["drafted"], "accepted": stats["accepted"]},
        }
        assert sum(depth["drafted"] for depth in stats["by_depth"].values()) == stats["drafted"]
        assert stats["steps"] < stats["tokens"]
    assert all(answer["stats"]["drafted"] == 0 for answer in plain["each"][:4])


def test_grammars_hold_it_as_they_hold_our_own_engine(plain, drafted, target):
    backend = build.backend(Settings(model=str(target), draft="none", dtype="float32"))
    try:
        asked = [Request(task["prompt"], params=SamplingParams(**task["params"])) for task in HELD]
        ours = [backend.submit(request).result() for request in asked]
    finally:
        backend.close()
    assert [answer.finish_reason for answer in ours] == ["stop"] * len(HELD)
    for said in (plain["held"], drafted["held"]):
        assert [answer["text"] for answer in said[:-1]] == [answer.text for answer in ours]
        assert 'json_schema cannot be used: Unimplemented keys: ["not"]' in said[-1]


def test_it_is_the_text_of_our_own_engine(plain, target):
    backend = build.backend(Settings(model=str(target), draft="none", dtype="float32"))
    try:
        ours = [
            backend.submit(
                Request(
                    prompt=task.get("prompt"), messages=task.get("messages"), params=SamplingParams(**task["params"])
                )
            ).result()
            for task in (*GREEDY, CHAT)
        ]
    finally:
        backend.close()
    assert [answer.token_ids for answer in ours] == tokens(plain["each"][:4])
    assert [answer.text for answer in ours] == [answer["text"] for answer in plain["each"][:4]]


def test_a_batch_is_as_alone(drafted):
    assert tokens(drafted["together"]) == tokens(drafted["each"][:3])


def test_a_stream_says_what_the_result_says(drafted):
    said = drafted["streamed"]
    assert said["chunks"] > 3
    assert (said["text"], said["tokens"]) == (said["result"]["text"], said["result"]["token_ids"])
    assert said["tokens"] == drafted["each"][3]["token_ids"]
    assert said["last"] == "length"


def test_a_request_can_be_cancelled(drafted):
    said = drafted["cancelled"]
    assert said["finish_reason"] == "cancelled"
    assert 0 < len(said["token_ids"]) < 400


def test_a_stop_string_ends_it_and_the_engines_counters_are_read(plain, drafted):
    said, text = drafted["each"][7], plain["each"][0]["text"]
    assert said["finish_reason"] == "stop"
    assert said["text"] == text[: text.index(stop_string(plain))]
    assert said["token_ids"] == plain["each"][0]["token_ids"][: len(said["token_ids"])]
    assert said["stats"]["drafted"] > 0


def test_samples_logprobs_and_bad_words(drafted):
    twice, scored, banned = drafted["each"][4:7]
    assert [twice["token_ids"], *tokens(twice["samples"])] == [drafted["each"][0]["token_ids"]] * 2
    assert scored["token_ids"] == drafted["each"][0]["token_ids"][:12]
    for token, row in zip(scored["token_ids"], scored["logprobs"], strict=True):
        assert next(iter(row)) == str(token)
        assert len(row) == 2
        assert row[str(token)] == max(row.values())
    assert "fox" not in banned["text"]


def test_what_vllm_cannot_do_is_refused(drafted):
    for answer, (_, reason) in zip(drafted["each"][8:], REFUSED, strict=True):
        assert isinstance(answer, str), reason
        assert reason in answer
        assert "\n" not in answer


def test_what_it_can_do_without_speculation_works(plain):
    sampled, biased, seeded, again = plain["each"][4:]
    assert len(sampled["token_ids"]) <= 4
    assert len(seeded["token_ids"]) == 16
    assert seeded["token_ids"] == again["token_ids"]
    assert biased["token_ids"] == [65, 65, 65]


def test_the_config_file_answers_a_file_of_queries(tmp_path, target, draft, plain):
    file, queries, answers = tmp_path / "c.yaml", tmp_path / "q.jsonl", tmp_path / "a.jsonl"
    file.write_text(CONFIG.format(target=target, draft=draft))
    queries.write_text("".join(json.dumps({"query": text}) + "\n" for text in PROMPTS))
    args = ("--raw", "--max-tokens", 40, "--ignore-eos", "--input", queries, "--output", answers)
    done = run("-m", "outrider", "generate", "--config", file, *args)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "note: speculative_model is dead in vLLM; written as speculative_config.model" in done.stderr
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert tokens(lines) == tokens(plain["each"][:3])
    assert all(line["stats"]["accepted"] > 0 for line in lines)


def test_the_command_that_installs_it(vllm_sessions):
    """`make vllm` has been given for all of these tests; given again, it finds all in place and changes nothing."""
    python = install()
    before = python.stat().st_ctime_ns
    assert install() == python
    assert python.stat().st_ctime_ns == before
    assert vllm_sessions.versions == {"vllm": "0.32.0", "outrider": f"{ROOT}/src/outrider/__init__.py"}


def test_check_explains(tmp_path, target, draft):
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG.format(target=target, draft=draft))
    done = run("-m", "outrider", "config", "check", file)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "vLLM, dtype float32, enforce_eager=True" in done.stdout
    assert '"method": "draft_model"' in done.stdout

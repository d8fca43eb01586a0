"""The real openai client, unmodified, against a real server."""

import math
import re

import openai
import pytest

from outrider import SamplingParams

FOX = [{"role": "user", "content": "the red fox and the blue fox"}]


@pytest.fixture
def client(face):
    with openai.OpenAI(base_url=f"{face.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_gives_what_the_library_gives(client, library):
    answer = client.chat.completions.create(model="tiny", messages=FOX, temperature=0, max_tokens=24)
    alone = library.chat(FOX, SamplingParams(max_tokens=24))
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].finish_reason == alone.finish_reason
    assert answer.usage.prompt_tokens == len(alone.prompt_token_ids)
    assert answer.usage.completion_tokens == len(alone.token_ids)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "speculative",
    [None, {"off": True}, {"method": "ngram", "length": 3}, {"method": "layer_skip"}],
    ids=["as launched", "off", "ngram", "layer_skip"],
)
def test_a_seed_gives_the_same_text_whoever_drafts(client, library, stream, speculative):
    given = dict(model="tiny", messages=FOX, temperature=0.8, seed=7, max_tokens=24)
    given["extra_body"] = {"speculative": speculative}
    answer = client.chat.completions.create(stream=stream, **given)
    text = "".join(piece.choices[0].delta.content or "" for piece in answer) if stream else None
    alone = library.chat(FOX, SamplingParams(max_tokens=24, temperature=0.8, seed=7))
    assert (text if stream else answer.choices[0].message.content) == alone.text


def test_a_stream_has_usage_and_metrics_at_its_end(client):
    pieces = list(
        client.chat.completions.create(
            model="tiny",
            messages=FOX,
            temperature=0,
            max_tokens=48,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *body, last = pieces
    assert body[0].choices[0].delta.role == "assistant"
    assert all(piece.usage is None for piece in body)
    assert [piece.choices[0].finish_reason for piece in body].count("length") == 1
    assert last.choices == []
    assert last.usage.completion_tokens == 48
    assert last.metrics["tokens"] == 48
    assert last.metrics["steps"] <= 48
    assert last.metrics["mean_accepted_length"] >= 1.0


def test_metrics_tell_what_was_drafted(client):
    given = dict(model="tiny", messages=FOX, temperature=0, max_tokens=64)
    plainly = client.chat.completions.create(extra_body={"speculative": {"off": True}}, **given)
    assert plainly.metrics["drafted"] == 0
    assert plainly.metrics["steps"] == plainly.usage.completion_tokens
    spoken = plainly.choices[0].message.content
    drafted = client.chat.completions.create(prediction={"type": "content", "content": spoken}, **given)
    assert drafted.choices[0].message.content == spoken
    assert drafted.metrics["by_drafter"].keys() == {"prediction"}


def test_prediction_counts_are_true(client):
    """What the model will write is predicted with one wrong word in it."""
    given = dict(model="tiny", messages=FOX, temperature=0, max_tokens=40)
    written = client.chat.completions.create(**given).choices[0].message.content
    for expected in (written, [{"type": "text", "text": written}], "the green sea " + written):
        answer = client.chat.completions.create(prediction={"type": "content", "content": expected}, **given)
        details = answer.usage.completion_tokens_details
        counts = answer.metrics["by_drafter"].get("prediction", {"drafted": 0, "accepted": 0})
        assert answer.choices[0].message.content == written
        assert details.accepted_prediction_tokens == counts["accepted"]
        assert details.rejected_prediction_tokens == counts["drafted"] - counts["accepted"]
        assert answer.usage.completion_tokens == answer.metrics["steps"] + counts["accepted"]


def test_n_samples_and_stops(client, library):
    given = dict(model="tiny", prompt="the red fox", temperature=0.9, seed=3, max_tokens=30)
    answer = client.completions.create(n=3, **given)
    alone = library.generate("the red fox", SamplingParams(max_tokens=30, temperature=0.9, seed=3, n=3))
    assert [choice.text for choice in answer.choices] == [sample.text for sample in alone.samples]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    stop = next(c for c in answer.choices[0].text[3:] if c.isascii() and c.isprintable())
    stopped = client.completions.create(stop=[stop], **given)
    assert stopped.choices[0].text == answer.choices[0].text.partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"


def test_several_prompts_stream_side_by_side(client, library):
    prompts = ["the red fox", [5, 6, 7], "one, two"]
    given = dict(model="tiny", temperature=0, max_tokens=12)
    texts = {0: "", 1: "", 2: "", 3: ""}
    for piece in client.completions.create(prompt=["the red fox", "one, two"], n=2, stream=True, **given):
        texts[piece.choices[0].index] += piece.choices[0].text
    alone = [library.generate(prompt, SamplingParams(max_tokens=12)).text for prompt in prompts]
    assert [texts[i] for i in range(4)] == [alone[0], alone[0], alone[2], alone[2]]
    assert client.completions.create(prompt=[5, 6, 7], **given).choices[0].text == alone[1]
    assert client.completions.create(prompt=[[5, 6, 7]], **given).choices[0].text == alone[1]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_are_the_librarys(client, library, stream):
    given = dict(model="tiny", messages=FOX, temperature=0, max_tokens=10, logprobs=True, top_logprobs=3)
    answer = client.chat.completions.create(stream=stream, **given)
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    alone = library.chat(FOX, SamplingParams(max_tokens=10, logprobs=3))
    assert [token.logprob for token in content] == pytest.approx([token.logprob for token in alone.tokens], abs=1e-4)
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == alone.text
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert content[0].top_logprobs[0].token == content[0].token  # greedy: the likeliest is the one written


def test_completion_logprobs_have_the_older_shape(client, library):
    given = dict(model="tiny", prompt="the red fox", temperature=0, max_tokens=10, logprobs=2)
    logprobs = client.completions.create(**given).choices[0].logprobs
    alone = library.generate("the red fox", SamplingParams(max_tokens=10, logprobs=2))
    assert logprobs.token_logprobs == pytest.approx([token.logprob for token in alone.tokens], abs=1e-4)
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 10
    pair = logprobs.top_logprobs, logprobs.token_logprobs
    assert all(max(top.values()) == pytest.approx(own) for top, own in zip(*pair, strict=True))


SHORT = dict(model="tiny", prompt="the red fox", temperature=0, max_tokens=16)


def test_a_bias_reaches_the_law(client, library):
    forced = client.completions.create(logit_bias={"9": 100}, **SHORT)
    params = SamplingParams(max_tokens=16, logit_bias={9: 100})
    assert forced.choices[0].text == library.generate("the red fox", params).text


def test_penalties_reach_the_law(client, library):
    shy = client.completions.create(presence_penalty=1.5, frequency_penalty=0.5, **SHORT)
    params = SamplingParams(max_tokens=16, presence_penalty=1.5, frequency_penalty=0.5)
    assert shy.choices[0].text == library.generate("the red fox", params).text


def test_many_options_reach_the_law(client, library):
    more = {
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
        "min_tokens": 4,
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    odd = client.completions.create(seed=5, extra_body=more, **{**SHORT, "temperature": 0.7})
    params = SamplingParams(max_tokens=16, temperature=0.7, seed=5, **more)
    assert odd.choices[0].text == library.generate("the red fox", params).text


def test_tokens_tell_who_wrote_them(client):
    extra = {"outrider": {"tokens": True}, "speculative": {"method": "layer_skip", "layers": 3, "length": 3}}
    pieces = list(
        client.chat.completions.create(
            model="tiny", messages=FOX, temperature=0, max_tokens=20, stream=True, logprobs=True, extra_body=extra
        )
    )
    told = [choice.model_extra.get("outrider") for piece in pieces for choice in piece.choices]
    tokens = [token for each in told if each for token in each["tokens"]]
    assert len(tokens) == pieces[-1].usage.completion_tokens
    kept = [token for token in tokens if token["drafter"] == "layer_skip"]
    assert len(kept) == pieces[-1].metrics["accepted"] > 0
    assert all(token["depth"] >= 1 for token in kept)
    assert all(token["depth"] == 0 for token in tokens if token["drafter"] is None)
    assert all(token["logprob"] <= 0 and math.isfinite(token["logprob"]) for token in tokens)


def test_the_only_model_goes_by_many_names(client, target):
    for name in ("tiny", "", str(target)):
        answer = client.completions.create(model=name, prompt="the", temperature=0, max_tokens=1)
        assert answer.model == "tiny"


def test_without_a_limit_an_answer_fills_the_context_at_most(client):
    answer = client.chat.completions.create(
        model="tiny", messages=FOX, temperature=0, extra_body={"ignore_eos": True}, timeout=60
    )
    assert answer.usage.total_tokens == 1024  # conftest.CONTEXT
    assert answer.choices[0].finish_reason == "length"


def test_a_client_that_goes_away_stops_its_sequence(client, face):
    running = re.compile(r'^outrider_num_requests_running{model_name="tiny"} (\S+)$', re.M)

    def count():
        return float(running.search(face.get("/metrics").text)[1])

    given = dict(model="tiny", prompt="the red fox", temperature=0, max_tokens=1000, extra_body={"ignore_eos": True})
    with client.completions.create(stream=True, **given) as stream:
        next(iter(stream))
        face.wait_for(lambda: count() == 1, 10)
    face.wait_for(lambda: count() == 0, 10)


class TestRefusals:
    """Each with the right status, in OpenAI's shape; the server goes on."""

    @pytest.fixture(autouse=True)
    def _goes_on(self, client):
        yield
        assert client.completions.create(model="tiny", prompt="the", temperature=0, max_tokens=1).choices

    def refused(self, client, **more):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                **{"model": "tiny", "messages": FOX, "temperature": 0, "max_tokens": 4, **more}
            )
        assert caught.value.body["type"] == "invalid_request_error"
        return caught.value.body

    @pytest.mark.parametrize(
        ("more", "param", "reason"),
        [
            ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
            ({"max_tokens": -1}, "max_tokens", "greater than"),
            ({"max_tokens": 0}, "max_tokens", "greater than"),
            ({"max_tokens": 5000}, None, "context is 1024"),
            ({"temperature": -0.1}, "temperature", "greater than"),
            ({"temperature": "hot"}, "temperature", "valid number"),
            ({"top_p": 1.5}, "top_p", "less than"),
            ({"n": 0}, "n", "greater than"),
            ({"logit_bias": {"5000": 1}}, None, "outside the vocabulary"),
            ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
            ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
            ({"stop": [""]}, None, "stop string is empty"),
            ({"messages": []}, "messages", "at least 1"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages.0.content.0.type",
                "'text'",
            ),
            ({"messages": [{"role": "user", "content": "x " * 3000}]}, None, "context is 1024"),
            ({"extra_body": {"frobnicate": 1}}, "frobnicate", "unknown field"),
            ({"extra_body": {"speculative": {"method": "teapot"}}}, None, "unknown drafter 'teapot'; known"),
            ({"extra_body": {"speculative": {"method": "ngram", "speed": 3}}}, None, "no option 'speed'"),
            ({"extra_body": {"speculative": {"method": "ngram", "length": 0}}}, None, "at least 1"),
            ({"extra_body": {"speculative": {"method": "ngram", "length": [1]}}}, "speculative", "a number"),
            ({"extra_body": {"speculative": {"method": "ngram", "length": 10**9}}}, "speculative", "at most 256"),
            ({"extra_body": {"speculative": {"max_n": 10**9}}}, "speculative", "at most 256"),
            ({"extra_body": {"speculative": {"method": "prediction"}}}, "prediction", "none is given"),
            ({"prediction": {"type": "content", "content": "x" * 100_001}}, "prediction", "at most 100000"),
            ({"extra_body": {"bad_words": ["x"] * 300}}, "bad_words", "at most 256"),
            ({"extra_body": {"speculative": {"off": True, "method": "ngram"}}}, "speculative", "off"),
            ({"extra_body": {"outrider": {"tokens": True}}}, "outrider", "stream"),
        ],
    )
    def test_with_the_reason(self, client, more, param, reason):
        body = self.refused(client, **more)
        assert reason in body["message"]
        if param:
            assert body["param"].startswith(param)

    def test_a_prediction_and_another_method(self, client):
        prediction = {"type": "content", "content": "the"}
        body = self.refused(client, prediction=prediction, extra_body={"speculative": {"method": "ngram"}})
        assert "ngram does not read it" in body["message"]
        body = self.refused(client, prediction=prediction, extra_body={"speculative": {"off": True}})
        assert "off" in body["message"]

    def test_harmless_fields_are_taken(self, client):
        answer = client.chat.completions.create(
            model="tiny",
            messages=FOX,
            temperature=0,
            max_tokens=1,
            user="me",
            metadata={"a": "b"},
            store=False,
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            parallel_tool_calls=True,
        )
        assert answer.choices

    def test_an_unknown_model(self, client):
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'") as caught:
            client.chat.completions.create(model="gpt-9", messages=FOX)
        assert caught.value.code == "model_not_found"

    @pytest.mark.parametrize("path", ["/etc", "/etc/passwd", "../..", "~root", "/proc/self/fd/0"])
    def test_a_path_outside_of_the_allowed_folders(self, client, path):
        with pytest.raises(openai.PermissionDeniedError, match="--allow-folder"):
            client.chat.completions.create(
                model="tiny", messages=FOX, extra_body={"speculative": {"method": "draft_model", "model": path}}
            )

    def test_no_request_opens_a_pickle(self, client, tiny_draft):
        extra = {"speculative": {"method": "eagle", "head": str(tiny_draft), "allow_pickle": True}}
        with pytest.raises(openai.PermissionDeniedError, match="pickles are never opened"):
            client.chat.completions.create(model="tiny", messages=FOX, extra_body=extra)

    def test_a_link_out_of_an_allowed_folder(self, client, tiny_draft):
        link = tiny_draft.parent / "link"
        link.unlink(missing_ok=True)
        link.symlink_to("/etc")
        with pytest.raises(openai.PermissionDeniedError):
            client.chat.completions.create(
                model="tiny", messages=FOX, extra_body={"speculative": {"method": "draft_model", "model": str(link)}}
            )

    def test_an_allowed_folder(self, client, tiny_draft, library):
        extra = {"speculative": {"method": "draft_model", "model": str(tiny_draft), "length": 2}}
        answer = client.chat.completions.create(
            model="tiny", messages=FOX, temperature=0, max_tokens=12, extra_body=extra
        )
        assert answer.choices[0].message.content == library.chat(FOX, SamplingParams(max_tokens=12)).text
        assert answer.metrics["by_drafter"].keys() == {"draft_model"}

    def test_malformed_bodies(self, face):
        for content in (b"{", b"", b"[]", b'"x"', b"\xff\xfe", b'{"messages": "x"}', b'{"model": null}'):
            answer = face.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400, content
            assert answer.json()["error"]["message"]
        ask = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,'
        deep = b"[" * 100_000 + b"]" * 100_000
        for more in (
            b'"temperature":NaN}',
            b'"temperature":Infinity}',
            b'"logit_bias":{"5":NaN}}',
            b'"speculative":{"length":NaN}}',
            b'"seed":' + b"9" * 10_000 + b"}",
            b'"user":' + deep + b"}",
        ):
            answer = face.post("/v1/chat/completions", content=ask + more, headers={"content-type": "application/json"})
            assert answer.status_code == 400, more[:40]
        lone = b'{"messages":[{"role":"user","content":"\\ud800"}]}'
        answer = face.post("/v1/chat/completions", content=lone, headers={"content-type": "application/json"})
        assert (answer.status_code, "surrogate" in answer.text) == (400, True)

    def test_unknown_paths_and_methods(self, face):
        assert face.get("/v1/nothing").status_code == 404
        assert face.get("/v1/chat/completions").status_code == 405
        assert face.get("/v1/nothing").json()["error"]["message"]


def test_a_body_without_its_content_type_is_told_which_to_send(face):
    """What `curl -d` sends unless it is told otherwise."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = face.post("/v1/chat/completions", content=b'{"messages": []}', headers=headers)
    said = (
        "the body comes as 'application/x-www-form-urlencoded'; send it with the header content-type: application/json"
    )
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


def test_our_own_checks_speak_for_themselves(face):
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 1e30}
    said = "temperature: must be 0 (greedy) or between 1e-37 and 100"
    assert face.post("/v1/chat/completions", body).json()["error"]["message"] == said

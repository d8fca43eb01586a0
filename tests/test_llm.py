"""The Python face: prompts in any form, answers in the same order, streams, threads."""

import asyncio
import threading

import pytest
from tiny import greedy_by_transformers

import outrider
from outrider import LLM, OutriderError, SamplingParams

FOX = "the red fox and the blue fox and the"
PROMPTS = [FOX, "one, two, three; one, two,", "a river ends in the sea"]
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder), draft="ngram:min_n=1", device="cpu", dtype="float32", threads=1, pace=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def peer(tiny_folder):
    """The same folder as transformers reads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)


def ids(results):
    return [result.token_ids for result in results]


def test_public_names():
    assert outrider.__all__ == [
        "LLM",
        "AdapterMix",
        "Chunk",
        "Client",
        "OutriderError",
        "Request",
        "Result",
        "SamplingParams",
        "Settings",
        "Stats",
    ]
    assert all(hasattr(outrider, name) for name in outrider.__all__)


def test_the_answer_is_that_of_transformers(llm, peer):
    model, tokenizer = peer
    for prompt in PROMPTS:
        tokens = tokenizer(prompt).input_ids
        expected = greedy_by_transformers(model, tokens, 24)
        result = llm.generate(prompt, SamplingParams(max_tokens=24))
        assert result.prompt_token_ids == tokens
        assert result.token_ids == expected
        assert result.text == tokenizer.decode(expected, skip_special_tokens=True)


class TestGenerate:
    def test_one_prompt_gives_one_result_and_a_list_gives_a_list(self, llm):
        alone = llm.generate(FOX, SHORT)
        listed = llm.generate([FOX], SHORT)
        assert isinstance(alone, outrider.Result)
        assert isinstance(listed, list)
        assert listed[0].token_ids == alone.token_ids
        assert llm.generate([], SHORT) == []

    def test_text_and_ids_are_the_same_prompt(self, llm):
        tokens = llm.tokenizer.encode(FOX)
        assert llm.generate(tokens, SHORT).text == llm.generate(FOX, SHORT).text
        assert ids(llm.generate([tokens, FOX], SHORT)) == [llm.generate(FOX, SHORT).token_ids] * 2

    def test_results_come_in_the_order_of_the_prompts(self, llm):
        """Also where a later one is done first."""
        lengths = [30, 1, 12]
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        results = llm.generate(PROMPTS, params)
        assert [len(result.token_ids) for result in results] == lengths
        assert ids(results) == [llm.generate(p, own).token_ids for p, own in zip(PROMPTS, params, strict=True)]

    def test_one_params_for_all_or_one_for_each(self, llm):
        assert ids(llm.generate(PROMPTS, SHORT)) == ids(llm.generate(PROMPTS, [SHORT] * 3))
        for count in (0, 2, 4):
            with pytest.raises(OutriderError, match=f"{count} params for 3 prompts"):
                llm.generate(PROMPTS, [SHORT] * count)

    def test_the_default_is_greedy(self, llm):
        assert llm.generate(FOX).token_ids == llm.generate(FOX, SamplingParams()).token_ids

    def test_a_bad_prompt_among_many_stops_all(self, llm):
        with pytest.raises(OutriderError, match="outside the vocabulary"):
            llm.generate([FOX, [10**6]], SHORT)
        assert llm.generate(FOX, SHORT).finish_reason == "length"

    def test_two_hundred_prompts(self, llm):
        prompts = [[i % 50, 7, 8, i % 3, 7, 8] for i in range(200)]
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        results = llm.generate(prompts, params)
        assert [result.prompt_token_ids for result in results] == prompts
        for i in (0, 77, 199):
            assert results[i].token_ids == llm.generate(prompts[i], params).token_ids

    def test_every_drafter_gives_the_same_answer(self, llm, tiny_draft):
        params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
        answer = llm.generate(FOX, params, draft="none")
        assert answer.stats.drafted == 0
        for draft in ("ngram:store=adaptive,min_n=1", "layer_skip", f"draft_model:model={tiny_draft}"):
            result = llm.generate(FOX, params, draft=draft)
            assert result.token_ids == answer.token_ids
            assert result.stats.drafted > 0
        result = llm.generate(FOX, params, draft="prediction", prediction=answer.token_ids)
        assert result.token_ids == answer.token_ids
        assert result.stats.accepted > 15

    def test_predictions_one_for_each(self, llm):
        answers = llm.generate(PROMPTS, SHORT)
        results = llm.generate(PROMPTS, SHORT, draft="prediction", prediction=ids(answers))
        assert ids(results) == ids(answers)
        assert all(result.stats.accepted == 7 for result in results)
        with pytest.raises(OutriderError, match="2 predictions for 3 prompts"):
            llm.generate(PROMPTS, SHORT, prediction=["a", "b"])

    def test_a_draft_model_of_another_vocabulary(self, llm, tiny_stranger):
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        result = llm.generate(FOX, params, draft=f"draft_model:model={tiny_stranger}")
        assert result.token_ids == llm.generate(FOX, params, draft="none").token_ids
        assert result.stats.drafted > 0

    def test_a_result_is_json(self, llm):
        import json

        said = json.loads(json.dumps(llm.generate(FOX, SamplingParams(max_tokens=4, logprobs=1, n=2)).as_dict()))
        assert said.keys() == {"text", "token_ids", "finish_reason", "logprobs", "stats", "samples"}
        assert said["stats"]["tokens"] == len(said["token_ids"])


class TestChat:
    MESSAGES = ({"role": "user", "content": "count the stars"},)

    def test_messages_are_written_by_the_template(self, llm):
        prompt = "<|im_start|>user\ncount the stars<|im_end|>\n<|im_start|>assistant\n"
        result = llm.chat(list(self.MESSAGES), SHORT)
        assert llm.tokenizer.decode(result.prompt_token_ids) == prompt
        assert result.token_ids == llm.generate(prompt, SHORT).token_ids

    def test_one_conversation_or_many(self, llm):
        other = [{"role": "user", "content": "a river"}]
        results = llm.chat([list(self.MESSAGES), other], SHORT)
        assert ids(results) == [llm.chat(list(self.MESSAGES), SHORT).token_ids, llm.chat(other, SHORT).token_ids]

    def test_without_a_template_it_says_so(self, tiny_mute):
        with LLM(str(tiny_mute), device="cpu") as llm, pytest.raises(OutriderError, match="no chat template"):
            llm.chat(list(self.MESSAGES))


class TestStream:
    PARAMS = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)

    def test_sync_and_async_are_generate(self, llm):
        async def collect():
            return [chunk async for chunk in llm.stream(FOX, self.PARAMS)]

        whole = llm.generate(FOX, self.PARAMS)
        for chunks in (list(llm.stream(FOX, self.PARAMS)), asyncio.run(collect())):
            assert "".join(chunk.text for chunk in chunks) == whole.text
            assert [token.id for chunk in chunks for token in chunk.tokens] == whole.token_ids
            assert len(chunks) > 1

    def test_of_a_conversation(self, llm):
        stream = llm.stream(list(TestChat.MESSAGES), SHORT)
        assert "".join(chunk.text for chunk in stream) == llm.chat(list(TestChat.MESSAGES), SHORT).text

    def test_nothing_of_a_stop_string_is_shown(self, llm):
        whole = llm.generate(FOX, self.PARAMS).text
        stop = whole[5:8]
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, stop=[stop])
        stream = llm.stream(FOX, params)
        assert "".join(chunk.text for chunk in stream) == whole[: whole.find(stop)]
        assert stream.result().finish_reason == "stop"
        assert stream.result().token_ids == llm.generate(FOX, params).token_ids

    def test_cancel(self, llm):
        stream = llm.stream(FOX, SamplingParams(max_tokens=900, ignore_eos=True))
        next(iter(stream))
        stream.cancel()
        assert stream.result().finish_reason in ("cancelled", "length")

    def test_samples_are_told_apart(self, llm):
        params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=3, ignore_eos=True)
        stream, texts = llm.stream(FOX, params), ["", "", ""]
        for chunk in stream:
            texts[chunk.index] += chunk.text
        assert texts == [sample.text for sample in stream.result().samples]
        assert len(set(texts)) == 3


def test_two_threads_get_their_own_answers(llm):
    answers, got = {prompt: llm.generate(prompt, SHORT).text for prompt in PROMPTS}, []

    def ask(prompt):
        got.extend((prompt, llm.generate(prompt, SHORT).text) for _ in range(10))

    threads = [threading.Thread(target=ask, args=[prompt]) for prompt in PROMPTS[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(got) == 20
    assert all(answers[prompt] == text for prompt, text in got)


def test_close_ends_the_engine_and_may_be_called_twice(tiny_folder):
    llm = LLM(str(tiny_folder), device="cpu")
    stream = llm.stream(FOX, SamplingParams(max_tokens=900, ignore_eos=True))
    llm.close()
    llm.close()
    assert stream.result().finish_reason in ("cancelled", "length")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(model="./nowhere"), "no such file or folder"),
        (dict(draft="teapot"), "unknown drafter"),
        (dict(device="tpu"), "unknown device 'tpu'"),
        (dict(dtype="int3"), "unknown dtype 'int3'"),
        (dict(rule="hope"), "unknown rule 'hope'"),
        (dict(speed=11), "unknown setting 'speed'; known: model"),
        (dict(max_batch=0), "max_batch must be at least 1"),
        (dict(max_batch=2049), "max_batch must be at most 2048"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tiny_folder, settings, reason):
    with pytest.raises(OutriderError, match=reason):
        LLM(**dict(model=str(tiny_folder)) | settings)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda llm: llm.generate(5), "prompts must be text, a list of token ids, or a list of these, not 5"),
        (lambda llm: llm.generate([["a"]]), r"a prompt must be text or a list of token ids, not \['a'\]"),
        (lambda llm: llm.generate([5.5, None]), "a prompt must be text or a list of token ids, not 5.5"),
        (lambda llm: llm.generate("x", {"max_tokens": 3}), r"params must be SamplingParams\(...\), not {"),
        (lambda llm: llm.chat("hi"), "messages must be a list such as .* not 'hi'"),
        (lambda llm: llm.chat({"role": "user"}), "messages must be a list such as .* not {'role': 'user'}"),
    ],
)
def test_inputs_of_other_types_are_refused(tiny_folder, call, reason):
    with LLM(str(tiny_folder)) as llm, pytest.raises(OutriderError, match=reason):
        call(llm)


def test_the_drafter_of_the_model_is_built_once(tiny_folder, tiny_draft, monkeypatch):
    from outrider import build

    loaded = []
    real = build.load
    monkeypatch.setattr(build, "load", lambda name, where: loaded.append(name) or real(name, where))
    spec = f"draft_model:model={tiny_draft}"
    with LLM(str(tiny_folder), draft=spec) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4), draft=spec)
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
    assert len(loaded) == 2


def test_a_prediction_that_nobody_reads_is_refused(tiny_folder):
    with LLM(str(tiny_folder), draft="ngram") as llm, pytest.raises(OutriderError, match="only the drafter prediction"):
        llm.generate([1, 2, 3], prediction=[4, 5])

"""Our engine behind a tokenizer: requests in, streams out, from any thread."""

import asyncio
import gc
import itertools
import threading
import time
import tracemalloc
import weakref
from functools import partial

import pytest
import torch
from letters import LETTERS, Letters, Slow, backend
from looped import plain as plain_texts, sequences, target
from simulated_device import DeviceClock, SimulatedDevice
from tiny import Markov, new_engine, outputs, plainly

from outrider import drafters
from outrider.backends.local import Local
from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.request import Request
from outrider.core.sampling import SamplingParams, warp
from outrider.drafters.base import BuildContext, Drafter
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed, Outputs, WrittenTokens


@pytest.fixture
def local():
    local = backend()
    yield local
    local.close()


def plain(tokens, params, **more):
    return outputs([plainly(Markov(seed=3), tokens, params, **more)])[0]


def text(ids):
    return "".join(LETTERS[id] for id in ids)


@pytest.mark.parametrize("spec", ["none", "ngram:min_n=1,length=4", "draft_model:model=same,length=5", "layer_skip"])
class TestStopStrings:
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_tokens_end_exactly_where_plain_decoding_ends(self, spec, size):
        """Not at the end of the draft that was kept."""
        whole = text(plain([0, 1], SamplingParams(max_tokens=20)))
        for place in range(6):
            stop = whole[place : place + size]
            end = whole.find(stop)
            local = backend(spec)
            result = local.submit(Request([0, 1], params=SamplingParams(max_tokens=20, stop=[stop]))).result()
            assert text(result.token_ids) == whole[: end + size]
            assert result.text == whole[:end]
            assert result.finish_reason == "stop"
            local.close()


def test_eos_ends_unless_it_is_ignored():
    answer = plain([0, 1], SamplingParams(max_tokens=9))
    local = backend(ends=frozenset({answer[2]}))
    ended = local.submit(Request([0, 1], params=SamplingParams(max_tokens=9))).result()
    assert ended.token_ids == answer[: answer.index(answer[2]) + 1]
    assert ended.finish_reason == "stop"
    ignored = local.submit(Request([0, 1], params=SamplingParams(max_tokens=9, ignore_eos=True))).result()
    assert (ignored.token_ids, ignored.finish_reason) == (answer, "length")
    stop = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[answer[1]])
    assert local.submit(Request([0, 1], params=stop)).result().token_ids == answer[: answer.index(answer[1]) + 1]
    local.close()


def test_samples_of_one_request_differ_and_repeat(local):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=5)
    first = local.submit(Request("ab", params=params)).result()
    again = local.submit(Request("ab", params=params)).result()
    ids = [sample.token_ids for sample in first.samples]
    assert len(ids) == 5
    assert len(set(map(tuple, ids))) == 5
    assert [sample.token_ids for sample in again.samples] == ids
    for index, sample in enumerate(ids):
        assert sample == plain([0, 1], params, dice=Dice(7, index))


def test_without_a_seed_requests_differ(local):
    params = SamplingParams(max_tokens=12, temperature=1.0)
    assert len({local.submit(Request("ab", params=params)).result().text for _ in range(4)}) > 1


def test_logprobs_come_with_the_tokens(local):
    result = local.submit(Request("ab", params=SamplingParams(max_tokens=4, logprobs=3))).result()
    for id, scores in zip(result.token_ids, result.logprobs, strict=True):
        assert id in scores
        assert max(scores.values()) == scores[id]
        assert len(scores) == 3
    assert local.submit(Request("ab", params=SamplingParams(max_tokens=4))).result().logprobs is None


def test_a_stream_is_the_result_in_pieces(local):
    request = Request("ab", params=SamplingParams(max_tokens=15), stream=True)
    stream = local.submit(request)
    chunks = list(stream)
    result = stream.result()
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token.id for chunk in chunks for token in chunk.tokens] == result.token_ids
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_a_stream_ends_after_the_last_chunk_of_every_sample(local):
    """Also where all samples end in the same step."""
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, n=4)
    stream = local.submit(Request("ab", params=params, stream=True))
    stream.result()
    chunks = list(stream)
    assert sorted(chunk.index for chunk in chunks if chunk.finish_reason) == [0, 1, 2, 3]
    for index, sample in enumerate(stream.result().samples):
        assert "".join(chunk.text for chunk in chunks if chunk.index == index) == sample.text


def test_an_async_stream_is_the_same(local):
    async def collect():
        return [chunk.text async for chunk in local.submit(Request("ab", params=params, stream=True))]

    params = SamplingParams(max_tokens=15)
    assert "".join(asyncio.run(collect())) == local.submit(Request("ab", params=params)).result().text


def test_a_reader_that_leaves_does_not_stop_the_others():
    """An event loop that is gone when the next token comes."""
    model = Slow()
    local = backend("none", model=model)

    async def read_one():
        stream = local.submit(Request("ab", params=SamplingParams(max_tokens=6), stream=True))
        iterator = stream.__aiter__()
        model.go.release()
        await iterator.__anext__()
        return stream, iterator

    stream, iterator = asyncio.run(read_one())
    model.go.release(100)
    assert len(stream.result().token_ids) == 6
    assert len(local.submit(Request("ba", params=SamplingParams(max_tokens=6))).result().token_ids) == 6
    local.close()
    del iterator


def test_cancelling_keeps_what_was_written():
    model = Slow()
    local = backend("none", model=model)
    stream = local.submit(Request("ab", params=SamplingParams(max_tokens=1000), stream=True))
    waiting = local.submit(Request("ab", params=SamplingParams(max_tokens=3)))
    model.go.release(4)
    chunks = iter(stream)
    next(chunks)
    stream.cancel()
    model.go.release(10_000)
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert 1 <= len(result.token_ids) < 1000
    assert result.token_ids == plain([0, 1], SamplingParams(max_tokens=len(result.token_ids)))
    assert waiting.result().finish_reason == "length"
    assert local.engine.scheduler._reserved == 0
    assert model.seen == {}
    local.close()


def test_a_request_with_many_samples_leaves_the_others_their_turn():
    """Eight long samples fill the batch; a small request is answered after as many passes as it has tokens."""
    model = Slow()
    local = backend("none", model=model, batch=4)
    many = local.submit(Request("ab", params=SamplingParams(max_tokens=1000, n=8), stream=True))
    model.go.release()
    next(iter(many))  # they run
    small = local.submit(Request("ba", params=SamplingParams(max_tokens=3)))
    model.go.release(4)  # one that may be under way, and three
    assert small.result().token_ids == plain([1, 0], SamplingParams(max_tokens=3))
    many.cancel()
    model.go.release(10)
    assert {sample.finish_reason for sample in many.result().samples} == {"cancelled"}
    assert local.engine.scheduler.reserved == 0
    local.close()
    assert model.seen == {}


def test_prompts_of_one_group_leave_the_others_their_turn():
    """The same for the prompts of one HTTP request, each of which is a request to the backend."""
    model = Slow()
    local = backend("none", model=model, batch=4)
    params = SamplingParams(max_tokens=1000)
    many = [local.submit(Request("ab", params=params, stream=True, group="one")) for _ in range(8)]
    model.go.release()
    next(iter(many[0]))  # they run
    small = local.submit(Request("ba", params=SamplingParams(max_tokens=3)))
    model.go.release(4)  # one that may be under way, and three
    assert small.result().token_ids == plain([1, 0], SamplingParams(max_tokens=3))
    for stream in many:
        stream.cancel()
    model.go.release(10)
    assert {stream.result().finish_reason for stream in many} == {"cancelled"}
    assert local.engine.scheduler.reserved == 0
    local.close()


def test_closing_cancels_what_runs_and_what_waits():
    model = Slow()
    local = backend("none", model=model, batch=1)
    streams = [local.submit(Request("ab", params=SamplingParams(max_tokens=1000))) for _ in range(3)]
    closing = threading.Thread(target=local.close)
    closing.start()
    model.go.release(10_000)
    closing.join(timeout=20)
    assert not closing.is_alive()
    assert [stream.result().finish_reason for stream in streams] == ["cancelled"] * 3
    local.close()


def test_a_pass_that_fails_ends_its_sequences_and_no_others():
    class Failing(Markov):
        fail = True

        def forward(self, feeds, layers=()):
            if self.fail:
                self.fail = False
                raise MemoryError("no memory for this")
            return super().forward(feeds, layers)

    local = backend("none", model=Failing(seed=3), batch=1)
    first, second = (local.submit(Request("ab", params=SamplingParams(max_tokens=4))) for _ in range(2))
    assert first.result().finish_reason == "error"
    assert "no memory for this" in first.result().error
    assert second.result().token_ids == plain([0, 1], SamplingParams(max_tokens=4))
    assert local.engine.scheduler._reserved == 0
    local.close()


@pytest.mark.parametrize("spec", ["none", "draft_model:model=same"])
def test_a_processor_that_raises_is_reported_to_its_own_request(spec):
    def fail(tokens, logits):
        raise KeyError("mine")

    local = backend(spec)
    bad = local.submit(Request("ab", params=SamplingParams(max_tokens=4, processors=[fail])))
    good = local.submit(Request("ab", params=SamplingParams(max_tokens=4)))
    assert bad.result().finish_reason == "error"
    assert "mine" in bad.result().error
    assert good.result().token_ids == plain([0, 1], SamplingParams(max_tokens=4))
    local.close()


def test_bad_words_are_banned_in_every_spelling(local):
    answer = local.submit(Request("ab", params=SamplingParams(max_tokens=9))).result().text
    banned = local.submit(Request("ab", params=SamplingParams(max_tokens=9, bad_words=[answer[:2]]))).result()
    assert answer[:2] not in banned.text
    by_ids = [LETTERS.index(letter) for letter in answer[:2]]
    assert (
        local.submit(Request("ab", params=SamplingParams(max_tokens=9, bad_words=[by_ids]))).result().text
        == banned.text
    )


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(), "either a prompt or messages"),
        (Request("ab", messages=[{"role": "user", "content": "ab"}]), "either a prompt or messages"),
        (Request(messages=[{"role": "user", "content": "ab"}]), "no chat template"),
        (Request([]), "prompt is empty"),
        (Request([0, 6]), "token id 6 is outside the vocabulary of 6"),
        (Request([-1]), "token id -1"),
        (Request("ab", params=SamplingParams(logit_bias={9: 1.0})), "token id 9"),
        (Request("ab", params=SamplingParams(bad_words=[[0, 77]])), "token id 77"),
        (Request("ab", params=SamplingParams(max_tokens=500)), "context is 64; set max_tokens to at most 62"),
        (Request("abcdef" * 20), "context is 64; shorten"),
        (Request("ab", draft="teapot"), "unknown drafter 'teapot'"),
        (Request("ab", draft="ngram:speed=9"), "no option 'speed'"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(local, request_, reason):
    with pytest.raises(OutriderError, match=reason):
        local.submit(request_)


def test_a_prompt_that_is_too_long_is_not_copied_for_each_sample(local):
    prompt = [0] * 100_000
    tracemalloc.start()
    with pytest.raises(OutriderError, match="context is 64; shorten"):
        local.submit(Request(prompt, params=SamplingParams(n=100)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 10 * 8 * len(prompt)  # bytes


def test_without_a_tokenizer_text_is_refused_and_ids_work():
    local = backend(tokenizer=False)
    with pytest.raises(OutriderError, match="give token ids"):
        local.submit(Request("ab"))
    with pytest.raises(OutriderError, match="give token ids"):
        local.submit(Request([0], params=SamplingParams(stop=["a"], max_tokens=3)))
    result = local.submit(Request([0, 1], params=SamplingParams(max_tokens=5))).result()
    assert result.token_ids == plain([0, 1], SamplingParams(max_tokens=5))
    assert result.text == ""
    local.close()


def test_a_request_may_name_its_own_drafter(local):
    result = local.submit(Request("ab", params=SamplingParams(max_tokens=9), draft="layer_skip:layers=3")).result()
    assert result.token_ids == plain([0, 1], SamplingParams(max_tokens=9))
    assert result.stats.by_drafter.keys() == {"layer_skip"}


def test_a_prediction_is_text_or_ids(local):
    answer = local.submit(Request("ab", params=SamplingParams(max_tokens=9))).result()
    for prediction in (answer.text, answer.token_ids):
        request = Request("ab", params=SamplingParams(max_tokens=9), draft="prediction", prediction=prediction)
        result = local.submit(request).result()
        assert result.text == answer.text
        assert result.stats.accepted == 8


def test_many_threads_may_submit():
    local, wrong = backend(batch=4), []

    def ask(seed):
        for i in range(5):
            params = SamplingParams(max_tokens=8, temperature=1.0, seed=10 * seed + i)
            if local.submit(Request("ab", params=params)).result().token_ids != plain(
                [0, 1], params, dice=Dice(10 * seed + i)
            ):
                wrong.append((seed, i))

    threads = [threading.Thread(target=ask, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    local.close()


def test_a_backend_that_was_closed_opens_again(local):
    local.submit(Request("ab", params=SamplingParams(max_tokens=3))).result()
    local.close()
    assert len(local.submit(Request("ab", params=SamplingParams(max_tokens=3))).result().token_ids) == 3


def test_the_plain_drafter_is_a_drafter():
    assert isinstance(drafters.build("none", BuildContext(None, None)), Drafter)


def test_a_drafter_that_cannot_forget_loses_no_request(local, monkeypatch, caplog):
    monkeypatch.setattr(local.engine.drafters[""], "forget", lambda id: 1 / 0)
    result = local.submit(Request("abc", params=SamplingParams(max_tokens=5))).result()
    assert len(result.token_ids) == 5
    assert "could not forget" in caplog.text


def test_a_pass_that_fails_ends_its_requests_and_no_others(local, monkeypatch):
    real = local.engine.model.forward

    def forward(feeds, layers=()):
        raise MemoryError("no more")

    monkeypatch.setattr(local.engine.model, "forward", forward)
    failed = local.submit(Request("abc", params=SamplingParams(max_tokens=5))).result()
    assert failed.finish_reason == "error"
    assert "MemoryError: no more" in failed.error
    monkeypatch.setattr(local.engine.model, "forward", real)
    assert local.submit(Request("abc", params=SamplingParams(max_tokens=5))).result().finish_reason == "length"


def test_a_tokenizer_that_fails_ends_its_request_with_the_reason(local, monkeypatch):
    def decode(ids, skip_special_tokens):
        raise ValueError("no such letter")

    monkeypatch.setattr(local.tokenizer, "decode", decode)
    with pytest.raises(OutriderError, match="no such letter"):
        local.submit(Request("abc", params=SamplingParams(max_tokens=5))).result()
    monkeypatch.undo()
    assert local.submit(Request("abc", params=SamplingParams(max_tokens=5))).result().text
    assert not local._places


class TestDraftersThatRequestsName:
    def specs(self, local):
        return {spec for spec in local.engine.drafters if spec.startswith("ngram:length=")}

    def test_only_the_last_used_are_kept(self, local):
        for length in range(1, 21):
            local.submit(Request("ab", params=SamplingParams(max_tokens=2), draft=f"ngram:length={length}")).result()
        local.submit(Request("ab", params=SamplingParams(max_tokens=2), draft="ngram:length=13")).result()
        local.submit(Request("ab", params=SamplingParams(max_tokens=2), draft="ngram:length=99")).result()
        kept = {99, 13, 20, 19, 18, 17, 16, 15}
        assert self.specs(local) == {f"ngram:length={length}" for length in kept}
        assert "" in local.engine.drafters

    def test_few_with_weights_of_their_own_are_kept(self):
        """A server that was asked for many variants of a head holds two of them, not one for each."""
        alive = weakref.WeakSet()

        class Heavy(Drafter):
            name, has_weights = "heavy", True

            def __init__(self, spec):
                self.spec = spec
                alive.add(self)

        local = backend()
        build = local._drafter
        local._drafter = lambda spec: partial(Heavy, spec) if spec.startswith("heavy") else build(spec)
        for length in range(1, 21):
            for spec in (f"heavy:length={length}", f"ngram:length={length}"):
                local.submit(Request("ab", params=SamplingParams(max_tokens=2), draft=spec)).result()
        gc.collect()
        assert {drafter.spec for drafter in alive} == {"heavy:length=19", "heavy:length=20"}
        assert len(self.specs(local)) == 6  # with those two the eight that are kept
        local.close()

    def test_the_methods_with_weights_of_their_own_say_so(self):
        with_weights = {name for name in drafters.names() if drafters.find(name).has_weights}
        assert with_weights == {"auto", "block", "draft_model", "eagle", "medusa"}

    def test_one_in_use_is_not_dropped(self):
        local, go_on = backend(batch=1), threading.Event()

        def wait(tokens, logits):
            assert go_on.wait(60)
            return logits

        params = SamplingParams(max_tokens=9, ignore_eos=True, processors=(wait,))
        first = local.submit(Request("ab", params=params, draft="layer_skip"))
        waiting = [
            local.submit(Request("ab", params=SamplingParams(max_tokens=4), draft=f"ngram:length={length}"))
            for length in range(1, 15)
        ]
        assert {"layer_skip"} | self.specs(local) <= set(local.engine.drafters)
        go_on.set()
        assert [stream.result().finish_reason for stream in (first, *waiting)] == ["length"] * 15
        assert len(self.specs(local)) <= 8
        local.close()

    def test_one_that_was_refused_or_cancelled_is_let_go(self, local):
        for length in range(1, 21):
            with pytest.raises(OutriderError):
                local.submit(Request("ab" * 50, draft=f"ngram:length={length}"))
        assert len(self.specs(local)) == 8
        for length in range(1, 21):
            stream = local.submit(Request("ab", params=SamplingParams(max_tokens=40), draft=f"ngram:length={length}"))
            stream.cancel()
            stream.result()
        assert len(self.specs(local)) == 8

    def test_a_build_holds_nobody_up(self):
        """While one request's drafter is being built another request runs."""
        local, built, go = backend(), threading.Event(), threading.Event()
        build = local._drafter

        def slow(spec):
            built.set()
            assert go.wait(10)
            return build(spec)

        local._drafter = slow
        short = SamplingParams(max_tokens=3)
        late = threading.Thread(target=local.submit, args=(Request("ab", params=short, draft="ngram:length=3"),))
        late.start()
        assert built.wait(10)
        assert local.submit(Request("ab", params=short)).result().finish_reason == "length"
        go.set()
        late.join(10)
        local.close()


class Apart:
    """A model whose passes run on a device of its own, as far as the engine can tell."""

    page = 1

    def __init__(self):
        self._model = Markov(seed=3)

    def __getattr__(self, name):
        return getattr(self._model, name)

    def begin(self, id, tokens, tenant=""): ...

    def seen(self, id, tokens, tenant=""): ...

    def held(self):
        """Sequences that it has memory for."""
        return set(self._model.seen)

    def write(self, ids, last, dice, temperatures, plan, wait, layers=(), adapters=()):
        while steps := plan(0):
            wait()
            each = zip(ids, last, dice, temperatures, strict=True)
            rows = [self._write(*one, steps) for one in each]
            last = [row[-1] for row in rows]
            yield WrittenTokens(torch.tensor(rows).T)

    def _write(self, id, token, dice, temperature, steps):
        written = []
        for _ in range(steps):
            [output] = self._model.forward([Feed(id, [token])])
            law = warp(output.logits[0], SamplingParams(temperature=temperature))
            token = int(law.argmax()) if dice is None else dice.choose(law, self._model.length(id))
            written.append(token)
        return written

    def forward(self, feeds, layers=()):
        outputs = self._model.forward(feeds, layers)
        starts = [0, *itertools.accumulate(len(output.logits) for output in outputs)]
        return Outputs(torch.cat([output.logits for output in outputs]), starts)


def reason(stream):
    """Why a request failed: raised, or in its result."""
    try:
        return stream.result().error
    except OutriderError as error:
        return str(error)


class TestPassesThatRunApart:
    """Chunks are handed over while the next pass runs, and the last ones at once."""

    def test_what_a_request_holds_is_let_go_after_the_step_in_which_it_ended(self, monkeypatch):
        """A step goes on with the rows of a text that has ended: kernels still read its adapter."""
        engine = Engine(SimulatedDevice(DeviceClock()), Drafter(Drafter.Options(), None), Limits(batch=8))
        local, events = Local(engine, lambda spec: lambda: Drafter(Drafter.Options(), None)), []

        def noted(own, before, after=None):
            def call(*given):
                events.append(before)
                found = own(*given)
                events.extend([after] if after else [])
                return found

            return call

        monkeypatch.setattr(engine, "step", noted(engine.step, "begins", "ends"))
        monkeypatch.setattr(local, "_let_go_of", noted(local._let_go_of, "let go"))
        monkeypatch.setattr(local, "_outcome", noted(local._outcome, "result"))
        asked = [Request([place, 2, 3], params=SamplingParams(4 if not place else 60)) for place in range(3)]
        assert [len(stream.result().token_ids) for stream in local.submit_all(asked)] == [4, 60, 60]
        local.close()
        within = [
            event
            for place, event in enumerate(events)
            if events[:place].count("begins") > events[:place].count("ends") and event != "ends"
        ]
        assert within == ["result"], "of the short one, while the step goes on"
        assert events.count("let go") == 3

    def test_what_uses_a_drafter_until_the_step_is_over_is_waited_for(self, monkeypatch):
        """Not refused: who has got the answer of the last request with it may name another."""

        class Heavy(Drafter):
            @property
            def has_weights(self):
                if threading.current_thread() is not local._thread:
                    looked.set()
                return True

        def meanwhile():  # the step goes on until the other thread has seen what is in use
            usual()
            if short.done:
                assert looked.wait(20)

        monkeypatch.setattr("outrider.backends.local.MOST_WITH_WEIGHTS", 1)
        engine = Engine(SimulatedDevice(DeviceClock()), Drafter(Drafter.Options(), None), Limits(batch=8))
        local, looked = Local(engine, lambda spec: lambda: Heavy(Drafter.Options(), None)), threading.Event()
        usual, engine.meanwhile = engine.meanwhile, meanwhile
        asked = [
            Request([1, 2], params=SamplingParams(4), draft="draft_model:model=a"),
            Request([2, 3], params=SamplingParams(60)),
        ]
        short, long = local.submit_all(asked)
        looked.clear()
        assert short.result().finish_reason == "length"
        local.prepare("draft_model:model=b")
        assert long.result().finish_reason == "length"
        held = local.submit(Request([1, 2], params=SamplingParams(4), draft="draft_model:model=b"))
        assert held.result().finish_reason == "length"
        local.close()
        assert set(engine.drafters) == {"", "draft_model:model=b"}

    def test_streams_carry_the_same_tokens_and_text(self):
        local = backend(model=Apart())
        streams = [local.submit(Request(prompt, params=SamplingParams(30), stream=True)) for prompt in ("abc", "fa")]
        for prompt, stream in zip(("abc", "fa"), streams, strict=True):
            chunks = list(stream)
            expected = plain(Letters().encode(prompt, False), SamplingParams(30))
            assert [token.id for chunk in chunks for token in chunk.tokens] == expected
            assert "".join(chunk.text for chunk in chunks) == text(expected)
            assert chunks[-1].finish_reason == "length"
            assert len(chunks) > 3
        assert not local.engine.model.held()
        local.close()

    @pytest.mark.parametrize("stop", [(), ("never",)])
    def test_a_text_that_cannot_be_written_ends_its_request_alone(self, stop):
        class Broken(Letters):
            def decode(self, ids, skip_special_tokens):
                if 0 in ids:
                    raise ValueError("no such piece")
                return super().decode(ids, skip_special_tokens)

        local = backend(model=Apart())
        local.tokenizer = Broken()
        prompts = [[a, b] for a in range(6) for b in range(6)]
        params = SamplingParams(12, stop=stop)
        streams = [local.submit(Request(prompt, params=params, stream=True)) for prompt in prompts]
        failed = 0
        for prompt, stream in zip(prompts, streams, strict=True):
            expected = plain(prompt, SamplingParams(12))
            if 0 in expected:
                assert "no such piece" in reason(stream)
                failed += 1
            else:
                assert [token.id for chunk in stream for token in chunk.tokens] == expected
        assert 0 < failed < len(prompts)
        local.close()
        assert not local.engine.busy
        assert not local.engine.model.held()

    def test_a_drafter_is_dropped_only_after_the_pass_that_uses_it(self, monkeypatch):
        """A request whose text cannot be written ends while a pass runs, its sequence with the pass."""

        class Broken(Letters):
            def decode(self, ids, skip_special_tokens):
                if 0 in ids:
                    raise ValueError("no such piece")
                return super().decode(ids, skip_special_tokens)

        class Waiting(Apart):
            def forward(self, feeds, layers=()):
                assert go.wait(20)
                return super().forward(feeds, layers)

        monkeypatch.setattr("outrider.backends.local.IDLE", 1)
        go, local = threading.Event(), backend(model=Waiting())
        local.tokenizer = Broken()
        written = {prompt: plain(prompt, SamplingParams(30)) for prompt in itertools.product(range(6), repeat=2)}
        fine = next(prompt for prompt, tokens in written.items() if 0 not in tokens)
        unfit = next(prompt for prompt, tokens in written.items() if 0 in tokens[:6])
        failing = local.submit(Request(unfit, params=SamplingParams(30), draft="ngram:length=3", stream=True))
        used_last = local.submit(Request(fine, params=SamplingParams(1), draft="ngram:length=4"))
        bystander = local.submit(Request(fine, params=SamplingParams(30)))
        go.set()
        assert used_last.result().finish_reason == "length"
        assert "no such piece" in reason(failing)
        assert bystander.result().token_ids == written[fine]
        local.close()
        assert set(local.engine.drafters) == {"", "ngram:length=4"}
        assert not local.engine.model.held()

    def test_a_cancelled_stream_ends(self):
        local = backend(model=Apart())
        stream = local.submit(Request("abc", params=SamplingParams(50), stream=True))
        next(iter(stream))
        stream.cancel()
        assert stream.result().finish_reason in ("cancelled", "length")
        local.close()
        assert not local.engine.model.held()


class Counting(Markov):
    """Counts the feeds of each pass."""

    def __init__(self):
        super().__init__(seed=3)
        self.sizes = []

    def forward(self, feeds, layers=()):
        self.sizes.append(len(feeds))
        return super().forward(feeds, layers)


def test_requests_that_are_handed_in_together_share_their_first_pass():
    model = Counting()
    local = backend("none", model=model)
    requests = [Request([n % 6, 1], params=SamplingParams(max_tokens=2)) for n in range(40)]
    streams = local.submit_all(requests)
    assert [stream.result().token_ids for stream in streams] == [
        plain([n % 6, 1], SamplingParams(max_tokens=2)) for n in range(40)
    ]
    assert model.sizes == [40, 40]
    local.close()


def test_of_requests_handed_in_together_none_runs_when_one_cannot():
    model = Counting()
    local = backend("none", model=model)
    good = Request([0, 1], params=SamplingParams(max_tokens=2), draft="ngram:length=3")
    with pytest.raises(OutriderError):
        local.submit_all([good, Request([])])
    assert local.submit_all([]) == []
    assert model.sizes == []
    assert local.submit(good).result().finish_reason == "length"  # its drafter was given back, and is there
    for length in range(4, 20):
        local.prepare(f"ngram:length={length}")
    assert "ngram:length=3" not in local.engine.drafters  # idle, so dropped for the ones that came after
    local.close()


def test_a_drafter_that_is_renewed_has_learned_nothing():
    own, other = "ngram:min_n=1,length=4", "ngram:min_n=1,length=5"
    local = backend(own)
    local.engine.drafters[own] = local.engine.drafters[""]
    request = Request("abcabcab", params=SamplingParams(max_tokens=20), draft=other)
    first = local.submit(request).result()
    old, old_own = local.engine.drafters[other], local.engine.drafters[""]
    local.renew(other)
    local.renew(own)
    assert local.engine.drafters[other] is not old
    assert local.engine.drafters[""] is local.engine.drafters[own] is not old_own
    again = local.submit(request).result()
    assert again.token_ids == first.token_ids
    assert again.stats.drafted_by_depth == first.stats.drafted_by_depth
    local.close()


def test_no_step_waits_for_the_files_of_a_drafter_that_a_request_names():
    """A download may take minutes, or hang."""
    asked, there, waited = threading.Event(), threading.Event(), []

    def plainly_decoding():
        return Drafter(Drafter.Options(), None)

    def drafter(spec):
        asked.set()
        waited.append(there.wait(5))
        return plainly_decoding

    engine = Engine(SimulatedDevice(DeviceClock()), plainly_decoding(), Limits(batch=8))
    local = Local(engine, drafter)
    naming = threading.Thread(target=local.prepare, args=["ngram:length=3"])
    naming.start()
    assert asked.wait(20)
    assert len(local.submit(Request([1, 2], params=SamplingParams(60))).result().token_ids) == 60
    there.set()
    naming.join(20)
    assert waited == [True], "the step waited for it"
    assert set(engine.drafters) == {"", "ngram:length=3"}
    local.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu")
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
def test_on_a_device_a_drafter_that_a_request_names_is_built_between_two_steps():
    """It prepares passes there, in the memory that the passes of a step use."""
    params, stepping, seen = SamplingParams(max_tokens=60), threading.Event(), []

    def drafter(spec):
        for _ in range(100):
            seen.append(stepping.is_set())
            time.sleep(0.005)
        return drafters.build(spec, BuildContext(target(), None))

    engine = new_engine(target(), drafters.build("none", BuildContext(target(), None)), Limits())
    step = engine.step

    def watched():
        stepping.set()
        try:
            return step()
        finally:
            stepping.clear()

    engine.step = watched
    local = Local(engine, lambda spec: partial(drafter, spec))
    [seq] = sequences([params])
    stream = local.submit(Request(list(seq.tokens), params=params))
    assert stepping.wait(20)
    local.prepare("ngram:length=3")
    assert len(seen) == 100
    assert not any(seen)
    assert stream.result().token_ids == outputs(plain_texts([params]))[0]
    local.close()

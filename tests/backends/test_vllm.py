"""The vLLM backend as far as it can be seen without vLLM; tests/backends/test_vllm_real.py runs the real one."""

import asyncio
import importlib.util
import sys
import threading
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from outrider import build
from outrider.backends.base import BackendLoad
from outrider.backends.vllm import VLLM, _count, _Sample, _tokens, refuse
from outrider.core.errors import OutriderError
from outrider.core.request import Request
from outrider.core.sampling import SamplingParams
from outrider.core.stats import Stats
from outrider.settings import Settings

absent = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quantize": "int8"}, "quantize cannot be chosen on the backend vllm: name a quantised model"),
        ({"rule": "coupled"}, "rule cannot be chosen on the backend vllm: it verifies drafts by rejection"),
        ({"piece": 64}, "max_num_batched_tokens"),
        ({"draft": "layer_skip"}, "vLLM has no drafter 'layer_skip'"),
        ({"draft": "draft_model"}, "needs model"),
    ],
)
def test_what_can_be_refused_before_anything_is_loaded(settings, reason):
    with pytest.raises(OutriderError, match=reason):
        build.check(Settings(backend="vllm", **settings))


@absent
def test_without_vllm_one_line_says_how_to_install_it():
    with pytest.raises(OutriderError, match="vLLM is not installed for this Python: run `make vllm`") as refused:
        build.backend(Settings(backend="vllm"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("x", prediction="y"), "no drafter that reads one"),
        (Request("x", params=SamplingParams(processors=[lambda tokens, logits: logits])), "processors"),
        (Request("x", params=SamplingParams(typical_p=0.5)), "typical_p"),
        (Request("x", params=SamplingParams(bad_words=[(1, 2)])), "takes them as text"),
        (Request("x", params=SamplingParams(min_p=0.1)), "min_p"),
        (Request("x", params=SamplingParams(logit_bias={1: 2.0})), "logit_bias"),
        (Request("x", params=SamplingParams(temperature=1.0)), "loses the temperature"),
    ],
)
def test_requests_that_vllm_cannot_honour(request_, reason):
    with pytest.raises(OutriderError, match=reason):
        refuse(request_, speculating=True, on_cpu=True)


def test_plain_decoding_there_can_do_more():
    every = SamplingParams(min_p=0.1, logit_bias={1: 2.0}, temperature=1.0, seed=3)
    refuse(Request("x", params=every), speculating=False, on_cpu=True)
    refuse(Request("x", params=SamplingParams(seed=3, bad_words=["x"])), speculating=True, on_cpu=True)
    refuse(Request("x", params=SamplingParams(temperature=1.0)), speculating=True, on_cpu=False)


def test_grammars_are_for_the_compiler_that_we_have_too():
    request = Request("x", params=SamplingParams(json_object=True))
    refuse(request, speculating=True, on_cpu=True)
    for other, name in (("xgrammar", "xgrammar"), ("", "auto")):
        with pytest.raises(OutriderError, match=f"json_object: vLLM was loaded with the grammar backend {name}"):
            refuse(request, speculating=False, on_cpu=True, grammar_backend=other)


def output(ids, finish=None, logprobs=None, spec=None):
    return SimpleNamespace(token_ids=ids, finish_reason=finish, logprobs=logprobs, spec_decode_metrics=spec)


class Letters:
    """Token 1 is a, 2 is b, ..."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(96 + id) for id in ids)


def test_a_stop_string_ends_a_sample_in_the_middle_of_a_step():
    from outrider.backends.text import Writer

    sample = _Sample(Writer(Letters(), ["cd"]))
    assert [token.id for token in sample.take(output([1, 2]))] == [1, 2]
    assert [token.id for token in sample.take(output([3, 4, 5]))] == [3, 4]
    assert sample.finish == "stop"
    assert sample.take(output([6], "length")) == []
    assert ([token.id for token in sample.tokens], sample.writer.text) == ([1, 2, 3, 4], "ab")


def test_how_samples_end():
    for theirs, ours in (("stop", "stop"), ("length", "length"), ("abort", "cancelled"), ("error", "error")):
        sample = _Sample(None)
        sample.take(output([1], theirs))
        assert sample.finish == ours


def test_counts_of_steps_become_depths():
    stats = Stats()
    _count(stats, [4, 4, 2], [2, 0, 2])
    assert (stats.drafts, stats.drafted, stats.accepted) == (3, 10, 4)
    assert stats.by_depth == {
        1: {"drafted": 3, "accepted": 2},
        2: {"drafted": 3, "accepted": 2},
        3: {"drafted": 2, "accepted": 0},
        4: {"drafted": 2, "accepted": 0},
    }


def test_logprobs_are_ranked():
    found = {5: SimpleNamespace(logprob=-2.0, rank=3), 7: SimpleNamespace(logprob=-0.1, rank=1)}
    (token,) = _tokens(output([5], logprobs=[found]), 3)
    assert (token.logprob, token.top) == (-2.0, ((7, -0.1), (5, -2.0)))
    (token,) = _tokens(output([5], logprobs=[found]), 1)
    assert (token.logprob, token.top) == (-2.0, ((7, -0.1),))


@absent
@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_the_command_line_says_it_in_one_line(command, capsys):
    from outrider.cli import main

    assert main([*command, "--backend", "vllm"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), "make vllm" in err) == (1, True)


class _Engine:
    """As much of vLLM's AsyncLLM as our backend calls; it writes token 5 until it is told to stop."""

    errored = False
    model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 9)

    async def generate(self, prompt, params, id):
        for count in range(params.max_tokens):
            last = count + 1 == params.max_tokens
            part = SimpleNamespace(
                index=0,
                token_ids=[5],
                logprobs=None,
                finish_reason="length" if last else None,
                spec_decode_metrics=None,
            )
            yield SimpleNamespace(outputs=[part], metrics=None)
            await asyncio.sleep(0)

    def shutdown(self, timeout):
        pass


@dataclass
class _Arguments:
    model: str = ""
    speculative_config: object = None
    use_tqdm_on_load: bool = True
    skip_tokenizer_init: bool = False
    kv_cache_memory_bytes: int = 0


@pytest.fixture
def engine(monkeypatch):
    """A package named vllm whose engine is the one above."""
    made = _Engine()
    for name, content in {
        "vllm": {"TokensPrompt": dict, "SamplingParams": SimpleNamespace},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": _Arguments},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(DELTA=1),
            "StructuredOutputsParams": SimpleNamespace,
        },
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=lambda args: made)},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return made


@absent
class TestRequests:
    @pytest.fixture
    def backend(self, engine):
        backend = VLLM("model", "none", "auto", None, {})
        yield backend
        backend.close()

    def ask(self, backend, tokens=3):
        return backend.submit(Request([1, 2], params=SamplingParams(max_tokens=tokens)))

    def test_tokens_come(self, backend):
        assert self.ask(backend).result().token_ids == [5, 5, 5]
        assert backend.describe() == {"context": 64, "vocab_size": 9, "notes": [], "text": False, "chat": False}

    def test_a_grammar_needs_a_tokenizer(self, backend):
        with pytest.raises(OutriderError, match="the model has no tokenizer"):
            backend.submit(Request([1, 2], params=SamplingParams(json_object=True)))

    def test_one_that_is_cancelled_in_the_turn_in_which_it_starts_ends(self, backend):
        """Start and cancel lie in the event loop together: the task is cancelled before its first step."""
        gate = threading.Event()
        backend._loop.call_soon_threadsafe(gate.wait)
        stream = self.ask(backend)
        stream.cancel()
        gate.set()
        ended = threading.Thread(target=stream.result, daemon=True)
        ended.start()
        ended.join(20)
        assert not ended.is_alive(), "it never ends"
        assert stream.result().finish_reason == "cancelled"
        assert backend.load().running == 0
        assert self.ask(backend).result().finish_reason == "length"

    def test_the_load_tells_of_an_engine_that_has_died(self, backend, engine):
        assert backend.load() == BackendLoad()
        engine.errored = True
        assert backend.load().fault == "vLLM's engine has died"

    def test_the_load_tells_when_an_output_last_came(self, backend, engine):
        begun, go = threading.Event(), threading.Event()
        real = engine.generate

        async def hangs(*args):
            begun.set()
            await asyncio.to_thread(go.wait)
            async for output in real(*args):
                yield output

        engine.generate = hangs
        stream = self.ask(backend)
        assert begun.wait(20)
        load = backend.load()
        assert (load.running, load.slowest_step) == (1, 0.0)
        assert 0.0 < load.since_step < backend.load().since_step
        go.set()
        stream.result()
        while backend.load().running:
            threading.Event().wait(0.001)
        assert backend.load().since_step == 0.0
        assert backend.load().slowest_step >= load.since_step

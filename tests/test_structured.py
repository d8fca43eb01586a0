"""Structured output from end to end: what ends by itself is valid, whatever the tokenizer, drafter and batch."""

import json
import re

import jsonschema
import pytest
from ggufs import byte_metadata, write_llama
from schemas import schema
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider import LLM, SamplingParams
from outrider.core.errors import OutriderError
from outrider.models.token_bytes import vocabulary_of

SCHEMAS = 300
MANY = dict(threads=1, cache_memory=0.2, max_batch=64)


@pytest.fixture(scope="module", params=["none", "ngram:min_n=1,length=4"])
def llm(request, tiny_folder):
    with LLM(str(tiny_folder), draft=request.param, pace=False, **MANY) as loaded:
        yield loaded


class TestValid:
    def test_every_text_that_ends_by_itself(self, llm):
        """Some hundred schemas and settings, all of them and free neighbours in one batch."""
        asked = [self.params(seed) for seed in range(SCHEMAS)]
        results = llm.generate([f"{seed}: the red fox" for seed in range(SCHEMAS)], asked)
        ended = 0
        for params, result in zip(asked, results, strict=True):
            assert result.finish_reason in ("stop", "length"), result.error
            if result.finish_reason == "stop" and params.json_schema is not None:
                ended += 1
                check(result.text, params.json_schema)
        assert ended > 0.6 * SCHEMAS

    def params(self, seed):
        more = dict(temperature=(0.0, 0.7, 1.5)[seed % 3], seed=seed, max_tokens=60)
        return SamplingParams(**more) if seed % 16 == 15 else SamplingParams(json_schema=schema(seed), **more)

    @pytest.mark.parametrize("seed", range(8))
    def test_an_expression(self, llm, seed):
        pattern = r"(red|blue) fox(es)?, \d{1,3}[a-f]é"
        result = llm.generate("the", SamplingParams(regex=pattern, temperature=1.0, seed=seed, max_tokens=40))
        assert result.finish_reason == "stop"
        assert re.fullmatch(pattern, result.text)

    def test_a_choice(self, llm):
        texts = ["red", "red fox", 'naïve\n"狐"', "the sea"]
        asked = SamplingParams(choice=texts, temperature=1.5, seed=3, max_tokens=30, n=16)
        results = llm.generate("the", asked).samples
        assert {result.finish_reason for result in results} == {"stop"}
        assert len({result.text for result in results}) > 1
        assert {result.text for result in results} <= set(texts)

    def test_a_grammar(self, llm):
        rules = 'start: "[" pair ("," pair)* "]"\npair: /[ab]/ "=" /[0-9]/'
        result = llm.generate("the", SamplingParams(grammar=rules, temperature=1.0, seed=1, max_tokens=300))
        assert re.fullmatch(r"\[[ab]=\d(,[ab]=\d)*\]", result.text) or result.finish_reason == "length"

    def test_any_object(self, llm):
        asked = SamplingParams(json_object=True, max_tokens=200, temperature=1.0, n=12, seed=2)
        ended = [result for result in llm.generate("the", asked).samples if result.finish_reason == "stop"]
        assert ended
        assert all(isinstance(json.loads(result.text), dict) for result in ended)

    def test_a_length_that_cuts_it_off_says_so(self, llm):
        result = llm.generate("the", SamplingParams(regex="a{50}", max_tokens=10))
        assert (result.finish_reason, result.text) == ("length", "a" * 10)

    def test_a_stop_string_still_stops(self, llm):
        result = llm.generate("the", SamplingParams(choice=["red fox"], stop=["fo"], max_tokens=20))
        assert (result.finish_reason, result.text) == ("stop", "red ")

    def test_a_stream_and_log_probabilities(self, llm):
        asked = SamplingParams(choice=["red fox", "the sea"], logprobs=2, max_tokens=20)
        stream = llm.stream("the", asked)
        text = "".join(chunk.text for chunk in stream)
        assert text == stream.result().text in asked.choice
        assert len(stream.result().logprobs) == len(stream.result().token_ids)


def check(text, wanted):
    jsonschema.validate(json.loads(text), wanted, format_checker=jsonschema.FormatChecker())


def test_a_bad_grammar_is_refused_when_the_request_is_made(llm):
    with pytest.raises(OutriderError, match=r"json_schema cannot be used.*uniqueItems"):
        llm.stream("the", SamplingParams(json_schema={"type": "array", "uniqueItems": True}))


def test_grammars_are_compiled_once_and_not_by_the_thread_of_the_engine(llm, monkeypatch):
    import threading

    from outrider.core import grammar

    names, real = [], grammar.Grammar.__init__

    def compiled(self, *given):
        names.append(threading.current_thread().name)
        real(self, *given)

    monkeypatch.setattr(grammar.Grammar, "__init__", compiled)
    for _ in range(3):
        llm.generate(["the", "fox"], SamplingParams(regex="once[0-9]", max_tokens=8))
    assert names == [threading.current_thread().name]


class TestTokenizers:
    """Grammars work on the bytes of tokens, which each kind of tokenizer keeps in its own way."""

    TEXT = '{"key": ["naïve 狐", -1.5]}'

    def fits(self, tokenizer, size=None, text=TEXT):
        from outrider.core.grammar import Grammar
        from outrider.core.grammar_spec import GrammarSpec

        ends = frozenset([tokenizer.eos_token_id])
        words = vocabulary_of(tokenizer, size or len(tokenizer), ends)
        matcher = Grammar(GrammarSpec("choice", json.dumps([text])), words).matcher(ends)
        ids = words_after(tokenizer, text)
        assert matcher.allowed([*ids, *ends]) == len(ids) + 1
        assert matcher.allowed([*ids[:-1], *ends]) == len(ids) - 1

    def test_byte_level_of_a_folder(self, tiny_folder):
        from outrider.models.tokenizer import from_folder

        tokenizer = from_folder(tiny_folder)
        self.fits(tokenizer)
        self.fits(tokenizer, len(tokenizer) + 60)  # a model with padded logits

    def test_byte_level_of_a_gguf_file(self, tmp_path):
        metadata = byte_metadata()
        path = write_llama(tmp_path / "m.gguf", len(metadata["tokenizer.ggml.tokens"]), metadata)
        with LLM(str(path), threads=1, cache_memory=0.1) as llm:
            self.fits(llm.tokenizer)
            result = llm.generate("a", SamplingParams(choice=["yes", "no"], max_tokens=8))
            assert result.text in ("yes", "no")

    def test_sentencepiece(self):
        self.fits(sentencepiece(), text='{"key": "b c é"}')

    def test_a_tokenizer_that_loses_text_is_refused(self):
        backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "</s>": 3}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        with pytest.raises(OutriderError, match="bytes of its tokens"):
            vocabulary_of(fast(backend), 4, frozenset([3]))

    def test_a_model_without_an_end_is_refused(self, tiny_folder):
        from outrider.models.tokenizer import from_folder

        with pytest.raises(OutriderError, match="ends an answer"):
            vocabulary_of(from_folder(tiny_folder), 300, frozenset())


def words_after(tokenizer, text):
    from outrider.models.token_bytes import following

    return following(tokenizer)(text)


def sentencepiece():
    """As llama 2 has it: a space before a text, spaces as ▁, and bytes for what has no token."""
    from tokenizers import normalizers

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    words += [*'abceky{}":[],1', '▁"', "ke", "key"]
    merges = [("▁", '"'), ("k", "e"), ("ke", "y")]
    backend = Tokenizer(
        models.BPE(
            {word: id for id, word in enumerate(words)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(backend)


def fast(backend):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")

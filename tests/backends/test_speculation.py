import pytest

from outrider import drafters
from outrider.backends.speculation import modernise, parse, spec_from_values, to_draft, to_vllm
from outrider.core.errors import OutriderError


@pytest.mark.parametrize(
    ("draft", "config"),
    [
        ("none", None),
        (
            "auto",
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        (
            "ngram",
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        (
            "ngram:length=8,max_n=3,min_n=1",
            {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        ),
        ("suffix", {"method": "suffix"}),
        ("draft_model:model=org/x", {"method": "draft_model", "model": "org/x", "num_speculative_tokens": 5}),
        ("medusa:head=h,length=3", {"method": "medusa", "model": "h", "num_speculative_tokens": 3}),
        ("eagle:head=h", {"method": "eagle", "model": "h", "num_speculative_tokens": 5}),
        ("eagle3:head=h", {"method": "eagle3", "model": "h", "num_speculative_tokens": 5}),
    ],
)
def test_our_words_are_vllms(draft, config):
    assert to_vllm(draft) == config


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ("eagle:head=h+ngram", "vLLM runs one drafter at a time, not 'eagle:head=h[+]ngram'"),
        ("auto:length=3", "vLLM has no drafter 'auto'"),
        ("layer_skip", "vLLM has no drafter 'layer_skip'; on this backend there are: none, ngram"),
        ("prediction", "vLLM has no drafter 'prediction'"),
        ("ngram:store=adaptive", "has no option 'store'; it has: length, max_n, min_n"),
        ("ngram:length=five", "ngram:length must be a whole number"),
        ("ngram:length=0", "of at least 1"),
        ("none:length=3", "the drafter none has no options"),
        ("draft_model", "drafter draft_model needs model"),
        ("eagle:length=3", "drafter eagle needs head"),
    ],
)
def test_what_vllm_lacks_is_refused(draft, reason):
    with pytest.raises(OutriderError, match=reason):
        to_vllm(draft)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("ngram", {"length": "3"}, "ngram:length must be a whole number, not '3'"),
        ("ngram", {" length": 3}, "no option ' length'"),
        ("eagle", {"head": "h", "length=3,head": "/etc"}, "no option 'length=3,head'"),
        ("draft_model", {" model": "/etc"}, "no option ' model'"),
        ("suffix", {"length": 0}, "of at least 1"),
    ],
)
def test_vllms_options_are_neither_stripped_nor_converted(name, values, reason):
    with pytest.raises(OutriderError, match=reason):
        spec_from_values(name, values)


@pytest.mark.parametrize(
    ("config", "draft"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5}, "ngram:length=5"),
        ({"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 2}, "ngram:length=5,max_n=2"),
        ({"method": "draft_model", "model": "./d", "num_speculative_tokens": 3}, "draft_model:model=./d,length=3"),
        ({"model": "./d"}, "draft_model:model=./d"),
    ],
)
def test_vllms_words_are_ours(config, draft):
    assert to_draft(config) == draft
    drafters.parse(draft)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"method": "mtp"}, "no speculative method 'mtp'; it has: ngram"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "does not know 'draft_tensor_parallel_size'"),
        ({"num_speculative_tokens": 5}, "neither a method nor a model"),
        ({"model": "a,b"}, "cannot hold a comma"),
    ],
)
def test_what_our_engine_lacks_is_refused(config, reason):
    with pytest.raises(OutriderError, match=reason):
        to_draft(config)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_bad_json_is_refused(text):
    with pytest.raises(OutriderError, match="speculative_config"):
        parse(text)


def test_dead_keys_go_to_their_new_place_with_a_note_each():
    args, notes = modernise(
        {"speculative_model": "d", "num_speculative_tokens": 5, "use_v2_block_manager": True, "max_model_len": 9}
    )
    assert args == {
        "max_model_len": 9,
        "speculative_config": {"method": "draft_model", "model": "d", "num_speculative_tokens": 5},
    }
    assert notes == [
        "speculative_model is dead in vLLM; written as speculative_config.model",
        "num_speculative_tokens is dead in vLLM; written as speculative_config.num_speculative_tokens",
        "use_v2_block_manager is dead in vLLM (it always does); left out",
    ]


def test_the_old_way_to_ask_for_ngrams():
    args, notes = modernise({"speculative_model": "[ngram]", "num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3})
    assert args == {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    }
    assert len(notes) == 3


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"speculative_disable_by_batch_size": 4}, "is gone from vLLM: write"),
        ({"spec_decoding_acceptance_method": "typical_acceptance_sampler"}, "exact rejection"),
        ({"speculative_model": "d", "speculative_config": {"method": "ngram"}}, "not both"),
    ],
)
def test_dead_keys_without_a_new_place_are_refused(args, reason):
    with pytest.raises(OutriderError, match=reason):
        modernise(args)

"""AutoGluon-RAG's generator block on our engine; tests/backends/test_vllm_real.py runs it on vLLM."""

import json

import pytest
import yaml

from outrider import build
from outrider.cli.options import read_config
from outrider.compat import autogluon
from outrider.core.errors import OutriderError
from outrider.core.request import Request
from outrider.settings import Settings

# As the interface document prints them, but for names of models.
HUGGINGFACE = """\
generator_model_name: {target}
generator_model_platform: huggingface            # or vllm
generator_model_platform_args:
  hf_generate_params: {{assistant_model: {draft}}}
"""
VLLM = """\
generator_model_name: facebook/opt-6.7b
generator_model_platform: vllm
generator_model_platform_args:
  vllm_init_params: {speculative_model: facebook/opt-125m, num_speculative_tokens: 5}
"""


def parse(text):
    return autogluon.parse(yaml.safe_load(text))


def hf(**generate):
    return autogluon.parse(
        {"generator_model_name": "m", "generator_model_platform_args": {"hf_generate_params": generate}}
    )


def test_the_first_file_means_a_draft_model_on_our_engine():
    said = parse(HUGGINGFACE.format(target="meta-llama/Llama-3.1-8B", draft="meta-llama/Llama-3.2-1B"))
    assert said.settings == Settings(model="meta-llama/Llama-3.1-8B", draft="draft_model:model=meta-llama/Llama-3.2-1B")
    assert said.params.greedy


def test_the_second_file_means_a_draft_model_on_vllm():
    said = parse(VLLM)
    assert said.settings == Settings(
        model="facebook/opt-6.7b",
        backend="vllm",
        speculative_config={"method": "draft_model", "model": "facebook/opt-125m", "num_speculative_tokens": 5},
    )
    assert len(said.notes) == 2
    assert "speculative_model is dead" in said.notes[0]


def test_the_first_file_runs_and_the_text_is_the_plain_one(tmp_path, tiny_folder, tiny_twin):
    file = tmp_path / "c.yaml"
    file.write_text(HUGGINGFACE.format(target=tiny_folder, draft=tiny_twin))
    settings = read_config(file).settings
    plain, drafted = (answer(spec) for spec in (Settings(model=settings.model, draft="none"), settings))
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.drafted == 0
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


def answer(settings):
    backend = build.backend(Settings(model=settings.model, draft=settings.draft, pace=False))
    try:
        return backend.submit(Request("the red fox")).result()
    finally:
        backend.close()


def test_the_command_answers_a_file_of_queries(tmp_path, tiny_folder, tiny_twin, outrider_cli):
    file, queries, answers = tmp_path / "c.yaml", tmp_path / "q.jsonl", tmp_path / "a.jsonl"
    file.write_text(HUGGINGFACE.format(target=tiny_folder, draft=tiny_twin))
    queries.write_text('{"query": "the fox"}\n{"query": "count", "retrieved": ["one, two, three"]}\n')
    assert outrider_cli("generate", "--config", file, "--input", queries, "--output", answers) == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["query"] for line in lines] == ["the fox", "count"]
    assert all(line["stats"]["by_drafter"].keys() <= {"draft_model"} for line in lines)


@pytest.fixture
def outrider_cli():
    from outrider.cli import main

    return lambda *args: main([str(arg) for arg in args])


def test_a_whole_file_has_the_block_under_its_name():
    assert parse("generator:\n  generator_model_name: x").settings.model == "x"


def test_names_of_earlier_versions():
    old = autogluon.parse(
        {
            "generator_model_name": "m",
            "use_vllm": False,
            "use_bedrock": False,
            "num_gpus": 0,
            "generator_hf_generate_params": {"max_new_tokens": 7, "prompt_lookup_num_tokens": 4},
            "generator_hf_model_params": {"torch_dtype": "bfloat16"},
            "local_model_path": "./here",
        }
    )
    assert old.settings == Settings(model="./here", draft="ngram:length=4", dtype="bfloat16", device="cpu")
    assert old.params.max_tokens == 7
    assert "generator_hf_generate_params is now generator_model_platform_args.hf_generate_params" in old.notes
    assert autogluon.parse({"model_name": "m", "model_platform": "huggingface"}).settings.model == "m"
    there = autogluon.parse({"generator_model_name": "m", "use_vllm": True, "vllm_sampling_params": {"top_k": -1}})
    assert (there.settings.backend, there.settings.draft, there.params.top_k) == ("vllm", "none", 0)


@pytest.mark.parametrize(
    ("generate", "draft"),
    [
        ({}, "auto"),
        ({"assistant_model": "d", "num_assistant_tokens": 7}, "draft_model:model=d,length=7"),
        ({"assistant_model": "d", "assistant_tokenizer": "d", "tokenizer": "m"}, "draft_model:model=d"),
        ({"assistant_model": "d", "assistant_tokenizer": "t"}, "draft_model:model=d,tokenizer=t"),
        ({"prompt_lookup_num_tokens": 10}, "ngram:length=10"),
        ({"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 1}, "ngram:length=10,max_n=1,min_n=1"),
        ({"assistant_early_exit": 4}, "layer_skip:layers=4"),
    ],
)
def test_drafters(generate, draft):
    assert hf(**generate).settings.draft == draft


def test_schedules():
    constant = hf(assistant_model="d", num_assistant_tokens_schedule="constant")
    assert not constant.settings.pace
    heuristic = hf(assistant_model="d", num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.4)
    assert heuristic.settings.pace
    assert len(heuristic.notes) == 2


def test_sampling_as_transformers_understands_it():
    sampled = hf(do_sample=True, top_p=0.9, max_new_tokens=5, num_return_sequences=2, stop_strings="x").params
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.n, sampled.stop) == (1.0, 50, 0.9, 2, ("x",))
    greedy = hf(temperature=0.7, repetition_penalty=1.1, bad_words_ids=[[1, 2]], eos_token_id=[3])
    assert greedy.params.greedy
    assert greedy.params.repetition_penalty == 1.1
    assert (greedy.params.bad_words, greedy.params.stop_token_ids) == (((1, 2),), (3,))
    assert greedy.notes == ("hf_generate_params.temperature is not used without do_sample: true (as in transformers)",)


def test_gpus():
    one = {"generator_model_name": "m", "num_gpus": 1}
    assert autogluon.parse(one).settings.device == "cuda"
    two = autogluon.parse({**one, "num_gpus": 2, "generator_model_platform": "vllm"})
    assert two.settings.tensor_parallel_size == 2
    with pytest.raises(OutriderError, match="one device"):
        autogluon.parse({**one, "num_gpus": 2})


def test_vllms_own_arguments_go_through():
    said = autogluon.parse(
        {
            "generator_model_name": "m",
            "generator_model_platform": "vllm",
            "generator_query_prefix": "Short: ",
            "generator_model_platform_args": {
                "vllm_init_params": {"dtype": "float32", "max_model_len": 512, "pipeline_parallel_size": 2},
                "vllm_sampling_params": {"temperature": 0.5, "max_tokens": 3},
            },
        }
    )
    assert said.settings == Settings(
        model="m",
        backend="vllm",
        draft="none",
        dtype="float32",
        pipeline_parallel_size=2,
        engine_args={"max_model_len": 512},
    )
    assert (said.params.temperature, said.params.max_tokens, said.query_prefix) == (0.5, 3, "Short: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("generator_model_name: m\ngenerator_model_platform: openai", "openai is a remote service"),
        ("generator_model_name: m\ngenerator_model_platform: bedrock", "bedrock is a remote service"),
        ("generator_model_name: m\nuse_bedrock: true", "use_bedrock asks for a remote service"),
        ("generator_model_name: m\ngenerator_model_platform: tpu", "unknown platform 'tpu'; known: huggingface, vllm"),
        ("generator_model_name: m\ngenerator_modell: n", "unknown key 'generator_modell'; known: generator_model_name"),
        ("generator_model_platform: vllm", "generator_model_name is missing"),
        ("generator_model_name: 3", "must be text"),
        ("generator_model_name: m\nnum_gpus: some", "num_gpus must be a whole number"),
        ("generator_model_name: m\ngenerator_model_platform_args: 3", "must hold keys and values"),
        ("generator_model_name: m\ngenerator_model_platform_args: {vllm_init_params: {}}", "unknown key"),
        ("generator_model_name: m\nmodel_name: n", "say the same thing"),
        ("generator: {generator_model_name: m}\ndata: {}", "'data' is about retrieval"),
        ("generator: {generator_model_name: m}\nsurprise: {}", "unknown block 'surprise'"),
    ],
)
def test_what_cannot_run_is_refused(text, reason):
    with pytest.raises(OutriderError, match=reason) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("where", "key", "value", "reason"),
    [
        ("hf_generate_params", "num_beams", 4, "beams are not drafted for"),
        ("hf_generate_params", "max_length", 40, "use max_new_tokens"),
        ("hf_generate_params", "penalty_alpha", 0.6, "unknown key 'penalty_alpha' in hf_generate_params; known: assis"),
        ("hf_generate_params", "num_assistant_tokens", 4, "is for assistant_model or assistant_early_exit"),
        ("hf_generate_params", "assistant_tokenizer", "other", "is for assistant_model"),
        ("hf_generate_params", "assistant_model", "a,b", "cannot hold a comma"),
        ("hf_model_params", "trust_remote_code", True, "own code is never run"),
        ("hf_model_params", "torch_dtype", "int3", "must be one of auto, float32"),
        ("hf_model_params", "revision", "abc", "hf_local_model_path"),
        ("hf_tokenizer_params", "max_length", 9, "refused, not cut"),
        ("hf_forward_params", "x", 1, "unknown key 'x' in hf_forward_params; known: none"),
    ],
)
def test_parameters_that_cannot_be_honoured(where, key, value, reason):
    with pytest.raises(OutriderError, match=reason):
        autogluon.parse({"generator_model_name": "m", "generator_model_platform_args": {where: {key: value}}})


def test_two_ways_to_speculate():
    with pytest.raises(OutriderError, match="leave out one"):
        hf(assistant_model="d", prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("key", ["min_p_", "structured_outputs"])
def test_vllms_sampling_keys_that_we_lack(key):
    args = {"vllm_sampling_params": {key: 1}}
    with pytest.raises(OutriderError, match="known: max_tokens"):
        autogluon.parse(
            {
                "generator_model_name": "m",
                "generator_model_platform": "vllm",
                "generator_model_platform_args": args,
            }
        )

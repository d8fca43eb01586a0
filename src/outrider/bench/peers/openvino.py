"""OpenVINO GenAI, which reads the GGUF file itself. Prompt lookup is another pipeline, chosen when it is loaded."""

from __future__ import annotations

from typing import Any

PACKAGES = ("openvino_genai", "openvino")


def load(config: dict[str, Any]) -> Any:
    import numpy
    import openvino
    import openvino_genai

    (mode,) = config["modes"]
    lookup = mode == "prompt-lookup"
    options = {"prompt_lookup": True} if lookup else {}
    pipeline = openvino_genai.LLMPipeline(config["model"], "CPU", INFERENCE_NUM_THREADS=config["threads"], **options)

    def settings(max_tokens: int) -> Any:
        chosen = openvino_genai.GenerationConfig()
        chosen.max_new_tokens, chosen.do_sample = max_tokens, False
        chosen.stop_token_ids = set(config["ends"])
        if lookup:
            chosen.num_assistant_tokens, chosen.max_ngram_size = 5, 3  # as in its own sample program
        return chosen

    def generate(mode: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        tokens = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        mask = openvino.Tensor(numpy.ones((1, len(ids)), dtype=numpy.int64))
        result = pipeline.generate(openvino_genai.TokenizedInputs(tokens, mask), settings(max_tokens))
        metrics = result.perf_metrics
        first, total = metrics.get_ttft().mean / 1000, metrics.get_generate_duration().mean / 1000
        return {
            "ids": list(result.tokens[0]),
            "tokens": len(result.tokens[0]),
            "first": metrics.raw_metrics.m_batch_sizes[0],
            "prefill_s": first,
            "decode_s": total - first,
            "timing": "engine",
        }

    return generate

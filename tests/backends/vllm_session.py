"""Opens one vLLM after the other behind our Backend and lets each answer: a plan as a line of JSON on stdin, what came
of it as a line on stdout, until stdin ends. The first line on stdout says which vLLM and which outrider these are.

    python vllm_session.py < plans.jsonl

It runs in vLLM's own environment (tests/on_vllm.py): importing vLLM takes as long as opening a tiny model, and is done
once for all of them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm

import outrider
from outrider import build
from outrider.backends.base import Backend
from outrider.core.errors import OutriderError
from outrider.core.request import Request
from outrider.core.sampling import SamplingParams
from outrider.settings import from_mapping


def main() -> None:
    print(json.dumps({"vllm": vllm.__version__, "outrider": outrider.__file__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answers(json.loads(line))), flush=True)


def answers(plan: dict[str, Any]) -> dict[str, Any]:
    backend = build.backend(from_mapping(plan["settings"]))
    said = {"context": backend.context, "notes": backend.notes}
    try:
        return {**said, **{name: VERBS[name](backend, each) for name, each in plan["tasks"].items()}}
    finally:
        backend.close()


def request(said: dict[str, Any]) -> Request:
    fields = dict(said)
    params = fields.pop("params", {})
    bias = {int(token): value for token, value in params.pop("logit_bias", {}).items()}  # JSON has text for keys
    return Request(params=SamplingParams(**params, logit_bias=bias), **fields)


def each(backend: Backend, tasks: list[Any]) -> list[Any]:
    """One after the other; a refusal is its reason."""
    return [answer(backend, task) for task in tasks]


def answer(backend: Backend, task: dict[str, Any]) -> Any:
    try:
        return backend.submit(request(task)).result().as_dict()
    except OutriderError as error:
        return str(error)


def together(backend: Backend, tasks: list[Any]) -> list[Any]:
    streams = [backend.submit(request(task)) for task in tasks]
    return [stream.result().as_dict() for stream in streams]


def streamed(backend: Backend, task: dict[str, Any]) -> dict[str, Any]:
    stream = backend.submit(request({**task, "stream": True}))
    chunks = list(stream)
    text, tokens = "".join(chunk.text for chunk in chunks), [token.id for chunk in chunks for token in chunk.tokens]
    last = chunks[-1].finish_reason
    return {"chunks": len(chunks), "text": text, "tokens": tokens, "last": last, "result": stream.result().as_dict()}


def cancelled(backend: Backend, task: dict[str, Any]) -> dict[str, Any]:
    stream = backend.submit(request({**task, "stream": True}))
    next(iter(stream))
    stream.cancel()
    return stream.result().as_dict()


VERBS = {"each": each, "held": each, "together": together, "streamed": streamed, "cancelled": cancelled}

if __name__ == "__main__":
    main()

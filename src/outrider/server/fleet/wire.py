"""What server and worker say to each other: frames of JSON behind their length. Nothing is unpickled.

To the worker: {"settings": {...}, "adapters": [{"name", "path", "stamp"}]} first, the adapters of the worker before it;
then {"submit": id, "request": {...}, "fit": {...}}, {"cancel": id}, {"adapter": id, "load_adapter": name, "path": ...}
and {"adapter": id, "unload_adapter": name}.
To the server: {"ready": {...}} or {"failed": reason}, then frames with "load" (the fields of BackendLoad) and any of
"accepted" [[id, tokens of its prompt]], "refused" and "busy" [[id, reason]], "chunks" [[id, chunk]],
"results" [[id, result]], "failed" [[id, reason]], "pieces" {token id: text or bytes}, "special" [token id],
"adapter_loaded" [[id, fields of AdapterInfo]], "adapter_unloaded" [[id, name]] and "adapter_refused" [[id, reason]].
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any

from outrider.core.adapter import AdapterMix
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.request import Chunk, Request, Result, Token
from outrider.core.stats import Stats

LENGTH = struct.Struct(">I")
Json = dict[str, Any]


def pack(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Json:
    fields = json.loads(body.decode("utf-8", "surrogatepass"))
    assert isinstance(fields, dict)
    return fields


def request_to_json(request: Request) -> Json:
    if request.params.processors:
        raise OutriderError("processors are functions and cannot be sent to a worker; leave them out")
    fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(request) if f.name != "params"}
    params = {f.name: getattr(request.params, f.name) for f in dataclasses.fields(request.params)}
    params["logit_bias"] = list(request.params.logit_bias.items())  # JSON has no whole numbers as keys
    if request.params.constraint is not None and request.params.json_schema is not None:
        params["json_schema"] = request.params.constraint.text  # as text: it may be nested as deeply as we can write
    del params["processors"]
    if isinstance(request.adapter, AdapterMix):
        fields["adapter"] = dataclasses.asdict(request.adapter)
    return {**fields, "params": params}


def request_from_json(fields: Mapping[str, Any]) -> Request:
    params = dict(fields["params"])
    params["logit_bias"] = dict(params["logit_bias"])
    params["bad_words"] = [word if isinstance(word, str) else tuple(word) for word in params["bad_words"]]
    chosen = fields["adapter"]
    adapter = chosen if isinstance(chosen, str) else AdapterMix(**chosen)
    own = {"params": SamplingParams(**params), "visible": tuple(fields["visible"]), "adapter": adapter}
    return Request(**{**fields, **own})


def _token_to_json(token: Token) -> int | list[Any]:
    """[id, drafter, depth, logprob, top], without the end that says nothing; most tokens are their id alone."""
    if token.logprob is not None:
        return [token.id, token.drafter, token.depth, token.logprob, token.top]
    return [token.id, token.drafter, token.depth] if token.drafter is not None else token.id


def _token_from_json(fields: int | list[Any]) -> Token:
    if isinstance(fields, int):
        return Token(fields)
    if len(fields) < 5:
        return Token(*fields)
    id, drafter, depth, logprob, top = fields
    return Token(id, drafter, depth, logprob, tuple((other, score) for other, score in top))


def chunk_to_json(chunk: Chunk) -> list[Any]:
    return [chunk.text, [_token_to_json(token) for token in chunk.tokens], chunk.index, chunk.finish_reason]


def chunk_from_json(fields: list[Any]) -> Chunk:
    text, tokens, index, finish = fields
    return Chunk(text, tuple(map(_token_from_json, tokens)), index, finish)


def stats_to_json(stats: Stats) -> Json:
    return {each.name: getattr(stats, each.name) for each in dataclasses.fields(stats)}


def stats_from_json(fields: Mapping[str, Any]) -> Stats:
    """JSON made the depths into text."""
    values = dict(fields)
    for key in ("drafted_by_depth", "accepted_by_depth"):
        values[key] = Counter({int(depth): count for depth, count in fields[key].items()})
    for key in ("drafted_by_drafter", "accepted_by_drafter", "asked_by_drafter"):
        values[key] = Counter(fields[key])
    return Stats(**values)


def result_to_json(result: Result) -> Json:
    """Token ids and log-probabilities are in the tokens already."""
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "logprobs": result.logprobs is not None,
        "stats": stats_to_json(result.stats),
        "prompt": result.prompt_token_ids,
        "tokens": [_token_to_json(token) for token in result.tokens],
        "error": result.error,
        "others": [result_to_json(other) for other in result.others],
    }


def result_from_json(fields: Mapping[str, Any]) -> Result:
    tokens = tuple(map(_token_from_json, fields["tokens"]))
    logprobs = [{token.id: token.logprob or 0.0, **dict(token.top)} for token in tokens] if fields["logprobs"] else None
    return Result(
        fields["text"],
        [token.id for token in tokens],
        fields["finish_reason"],
        logprobs,
        stats_from_json(fields["stats"]),
        fields["prompt"],
        tokens,
        fields["error"],
        tuple(map(result_from_json, fields["others"])),
    )

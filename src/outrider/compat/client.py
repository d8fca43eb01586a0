"""The REST client: launch models and speculative pairs on a server, and use them.

>>> client = Client("http://127.0.0.1:8000")
>>> uid = client.launch_model("smollm2-135m")
>>> client.get_model(uid).chat("Name three rivers.")["choices"][0]["message"]["content"]
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from outrider.core.errors import OutriderError

Json = dict[str, Any]
Message = Mapping[str, Any]


class Client:
    """Speaks Xinference's interface of launched models, and OpenAI's of answers. `timeout`: seconds without a byte."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.base_url = base_url.rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=self.base_url, headers=headers, timeout=httpx.Timeout(timeout, connect=10.0)
            )
            httpx.URL(self.base_url)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise OutriderError(f"cannot make a client for {base_url!r}: {error}") from error

    def launch_model(
        self,
        model_name: str,
        model_size_in_billions: float | str | None = None,
        quantization: str | None = None,
        model_uid: str | None = None,
        **more: Any,
    ) -> str:
        """Launch a model by its name in the server's registry, its hub id or its folder; waits until it answers.

        `more`: other fields of the interface, such as n_gpu, and our own `draft` and `settings`. Returns the uid.
        """
        body = {
            "model_uid": model_uid,
            "model_name": model_name,
            "model_size_in_billions": model_size_in_billions,
            "quantization": quantization,
            **more,
        }
        return str(self._call("POST", "/v1/models", body)["model_uid"])

    def launch_speculative_llm(
        self,
        model_name: str,
        model_size_in_billions: float | str | None,
        quantization: str | None,
        draft_model_name: str,
        draft_model_size_in_billions: float | str | None,
        draft_quantization: str | None,
        n_gpu: int | str | None = "auto",
        model_uid: str | None = None,
    ) -> str:
        """Launch a model together with a smaller model that drafts for it. Returns the uid of the pair."""
        body = {
            "model_uid": model_uid,
            "model_name": model_name,
            "model_size_in_billions": model_size_in_billions,
            "quantization": quantization,
            "draft_model_name": draft_model_name,
            "draft_model_size_in_billions": draft_model_size_in_billions,
            "draft_quantization": draft_quantization,
            "n_gpu": n_gpu,
        }
        return str(self._call("POST", "/experimental/speculative_llms", body)["model_uid"])

    def list_models(self) -> dict[str, Json]:
        """uid -> what is known of the model."""
        return {model["id"]: model for model in self._call("GET", "/v1/models")["data"]}

    def describe_model(self, model_uid: str) -> Json:
        return self._call("GET", f"/v1/models/{quote(model_uid, safe='')}")

    def terminate_model(self, model_uid: str) -> None:
        self._call("DELETE", f"/v1/models/{quote(model_uid, safe='')}")

    def get_model(self, model_uid: str) -> RemoteModel:
        self.describe_model(model_uid)  # an unknown uid shows here
        return RemoteModel(self, model_uid)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        return _json(self.base_url, self._send(method, path, body).content or b"{}")

    def _stream(self, path: str, body: Json) -> ChunkStream:
        return ChunkStream(self.base_url, self._send("POST", path, body, stream=True))

    def _send(self, method: str, path: str, body: Json | None, stream: bool = False) -> httpx.Response:
        try:
            request = self._http.build_request(method, path, json=body)
            response = self._http.send(request, stream=stream)
            if response.is_error:
                response.read()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _unreachable(self.base_url, error) from error
        except (TypeError, ValueError) as error:
            raise OutriderError(f"the request cannot be written as JSON: {error}") from error
        if response.is_error:
            raise OutriderError(f"{self.base_url} refused ({response.status_code}): {_reason(response)}")
        return response


class RemoteModel:
    """A launched model."""

    def __init__(self, client: Client, uid: str) -> None:
        self._client, self.uid = client, uid

    def generate(self, prompt: str, generate_config: Mapping[str, Any] | None = None) -> Any:
        """Continue a prompt. A dict as OpenAI's completions have it; with {"stream": True} an iterator of its chunks.

        `generate_config`: max_tokens, temperature, top_p, top_k, stop, stop_token_ids, repetition_penalty, stream,
        gamma (the length of a draft), and whatever else the server's `/v1/completions` takes.
        """
        return self._ask("/v1/completions", {"prompt": prompt}, generate_config)

    def chat(self, *args: Any, **named: Any) -> Any:
        """Answer a conversation, in either of two forms:

        chat(messages, tools=None, enable_thinking=None, generate_config=None)
        chat(prompt, system_prompt=None, chat_history=None, tools=None, generate_config=None)
        """
        by_prompt = isinstance(args[0], str) if args else "prompt" in named
        form = _from_prompt if by_prompt else _from_messages
        try:
            inspect.signature(form).bind(*args, **named)
        except TypeError as error:
            raise OutriderError(f"chat: {error}; it takes {inspect.signature(form)}") from None
        body, config = form(*args, **named)
        return self._ask("/v1/chat/completions", body, config)

    def _ask(self, path: str, body: Json, config: Mapping[str, Any] | None) -> Any:
        whole = {"model": self.uid, **body, **(config or {})}
        return self._client._stream(path, whole) if whole.get("stream") else self._client._call("POST", path, whole)


class ChunkStream:
    """The chunks of an answer as they come. `close` (or leaving `with`, or dropping it) ends the server's work."""

    def __init__(self, base_url: str, response: httpx.Response) -> None:
        self._base_url, self._response = base_url, response
        self._chunks = self._read()

    def __iter__(self) -> Iterator[Json]:
        return self

    def __next__(self) -> Json:
        return next(self._chunks)

    def close(self) -> None:
        self._chunks.close()
        self._response.close()

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _read(self) -> Generator[Json, None, None]:
        try:
            for line in self._response.iter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield self._checked(_json(self._base_url, data))
        except httpx.HTTPError as error:
            raise _unreachable(self._base_url, error) from error
        finally:
            self._response.close()

    def _checked(self, chunk: Json) -> Json:
        if "error" in chunk:
            raise OutriderError(f"{self._base_url} failed while answering: {_message(chunk)}")
        return chunk


def _from_messages(
    messages: Sequence[Message],
    tools: Sequence[Json] | None = None,
    enable_thinking: bool | None = None,
    generate_config: Mapping[str, Any] | None = None,
) -> tuple[Json, Mapping[str, Any]]:
    body: Json = {"messages": list(messages)}
    if tools is not None:
        body["tools"] = list(tools)
    if enable_thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": enable_thinking}
    return body, generate_config or {}


def _from_prompt(
    prompt: str,
    system_prompt: str | None = None,
    chat_history: Sequence[Message] | None = None,
    tools: Sequence[Json] | None = None,
    generate_config: Mapping[str, Any] | None = None,
) -> tuple[Json, Mapping[str, Any]]:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    messages = [*system, *(chat_history or ()), {"role": "user", "content": prompt}]
    return _from_messages(messages, tools, None, generate_config)


def _json(base_url: str, text: str | bytes) -> Json:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise OutriderError(f"{base_url} did not answer in JSON; is it an Outrider server?")
    return parsed


def _reason(response: httpx.Response) -> str:
    try:
        return _message(response.json())
    except ValueError:
        return response.text[:200] or response.reason_phrase


def _message(body: Any) -> str:
    """The reason in the form that any of the APIs gives it."""
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _unreachable(base_url: str, error: Exception) -> OutriderError:
    reason = str(error) or type(error).__name__
    return OutriderError(f"cannot reach {base_url}: {reason}; is the server running? Start one with: outrider serve")

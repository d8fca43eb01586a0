"""LLM: the Python API. Load a model, then generate, chat or stream."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from outrider import build
from outrider.backends.base import Stream
from outrider.backends.local import Local
from outrider.core.adapter import AdapterChoice, AdapterInfo, AdapterMix
from outrider.core.errors import OutriderError, quoted
from outrider.core.params import SamplingParams
from outrider.core.request import Message, Prompt, Request, Result
from outrider.drafters import DrafterSpec
from outrider.engine.engine import Engine
from outrider.settings import Settings, from_mapping

# Prompts that the engine takes in at once, so that the same call has the same passes each time. More of them at once
# would leave it idle while their text becomes tokens.
TOGETHER = 256
MANY = 8  # prompts: from this number on a terminal shows a progress bar, for fewer are soon done


class OneCall(TypedDict, total=False):
    """What one prompt or conversation may bring beside its parameters."""

    draft: str
    prediction: Prompt | None
    adapter: AdapterChoice
    progress: bool | None


class ManyCall(TypedDict, total=False):
    """The same for a list of them."""

    draft: str
    prediction: Prompt | Sequence[Prompt | None] | None
    adapter: AdapterChoice | Sequence[AdapterChoice]
    progress: bool | None


class LLM:
    """A model with a drafter. A drafter changes how fast the answer comes, never the answer.

    >>> llm = LLM("smollm2-135m")
    >>> llm.chat([{"role": "user", "content": "Name three rivers."}]).text

    `model` is a known name, a folder, a hub id or a GGUF file; `draft` is "auto", "NAME" or
    "NAME:key=value,...", several with + between. Other settings go by name: backend (local or vllm), quantize, rule,
    pace, max_batch, piece, cache_memory, threads (of the whole process), adapters ({"name": PATH}), adapter_memory.
    """

    def __init__(
        self,
        model: str = Settings.model,
        draft: str = Settings.draft,
        device: str = "auto",
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        chosen = {"model": str(model), "draft": draft, "device": device, "dtype": dtype, **settings}
        self._open(from_mapping(chosen))

    @classmethod
    def from_settings(cls, settings: Settings, draft: DrafterSpec | None = None) -> LLM:
        """`draft`: what `build.check` made of the settings' drafter, if it was called before."""
        llm = cls.__new__(cls)
        llm._open(settings, draft)
        return llm

    def _open(self, settings: Settings, draft: DrafterSpec | None = None) -> None:
        self.settings = settings
        self.backend = build.backend(settings, draft)

    @property
    def engine(self) -> Engine:
        """Our own engine."""
        if not isinstance(self.backend, Local):
            raise OutriderError(f"this looks into our own engine; the backend is {self.settings.backend}, use local")
        return self.backend.engine

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None when its folder has none."""
        return self.backend.tokenizer

    @overload  # the first of the two: text is also a sequence of texts
    def generate(self, prompts: Prompt, params: SamplingParams | None = None, **more: Unpack[OneCall]) -> Result: ...  # type: ignore[overload-overlap]

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **more: Unpack[ManyCall],
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        draft: str = "",
        prediction: Prompt | Sequence[Prompt | None] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = "",
        progress: bool | None = None,
    ) -> Result | list[Result]:
        """Continue a prompt (text or token ids), or each prompt of a list.

        One prompt gives one Result, a list gives a list in the same order. `params`: one for all, or one per prompt.
        `draft`: another drafter for this call. `prediction`: the output you expect, for `auto` and `prediction`.
        `adapter`: a loaded adapter by name, or an AdapterMix; one for all, or one per prompt ("": the model as it is).
        `progress`: a bar on the terminal; by default when there are many prompts.
        """
        single = _is_prompt(prompts)
        requests = _requests("prompt", [prompts] if single else prompts, params, draft, prediction, adapter)
        results = self._run(requests, progress)
        return results[0] if single else results

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **more: Unpack[OneCall]
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **more: Unpack[ManyCall],
    ) -> list[Result]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        draft: str = "",
        prediction: Prompt | Sequence[Prompt | None] | None = None,
        adapter: AdapterChoice | Sequence[AdapterChoice] = "",
        progress: bool | None = None,
    ) -> Result | list[Result]:
        """Answer a conversation, or each of a list of them. A message is {"role": "user", "content": "..."}."""
        single = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], dict)
        requests = _requests("messages", [messages] if single else messages, params, draft, prediction, adapter)
        results = self._run(requests, progress)
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        draft: str = "",
        prediction: Prompt | None = None,
        adapter: AdapterChoice = "",
    ) -> Stream:
        """Start writing. Iterate over the chunks (`for` or `async for`); `.result()` waits, `.cancel()` stops."""
        return self.submit(prompt, params, draft=draft, prediction=prediction, adapter=adapter, stream=True)

    def submit(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **request: Any
    ) -> Stream:
        """Start one request, a prompt or messages, without waiting for it; `request`: its other fields by name."""
        kind: dict[str, Any] = {"prompt" if _is_prompt(prompt) else "messages": prompt}
        return self.backend.submit(Request(params=params or SamplingParams(), **kind, **request))

    def load_adapter(self, name: str, path: str | Path, allow_pickle: bool = False) -> AdapterInfo:
        """Read and check a LoRA adapter (a PEFT folder or a GGUF file); `adapter=name` then uses it. A name that is
        there already means the new one from now on. Pickled weights only where they are allowed."""
        return self.backend.load_adapter(name, path, allow_pickle)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that use it go on."""
        self.backend.unload_adapter(name)

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        return self.backend.adapters()

    def close(self) -> None:
        """Stop the engine. What runs is cancelled."""
        self.backend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, requests: list[Request], progress: bool | None) -> list[Result]:
        streams: list[Stream] = []
        try:
            for begin in range(0, len(requests), TOGETHER):
                streams += self.backend.submit_all(requests[begin : begin + TOGETHER])
            shown = progress if progress is not None else len(requests) >= MANY and sys.stderr.isatty()
            return [stream.result() for stream in (_with_bar(streams) if shown else streams)]
        except BaseException:  # a bad prompt among many, or Ctrl-C: nothing goes on running for nobody
            for stream in streams:
                stream.cancel()
            raise


WANTED = {
    "prompt": "prompts must be text, a list of token ids, or a list of these",
    "messages": 'messages must be a list such as [{"role": "user", "content": "..."}]',
}


def _is_prompt(value: Any) -> bool:
    """Text, or a list of token ids."""
    return isinstance(value, str) or (isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], int))


def _requests(kind: str, inputs: Any, params: Any, draft: str, prediction: Any, adapter: Any) -> list[Request]:
    if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable):
        raise OutriderError(f"{WANTED[kind]}, not {quoted(inputs)}")
    inputs = list(inputs)
    for own in params if isinstance(params, Sequence) else [params]:
        if not isinstance(own, SamplingParams | None):
            raise OutriderError(f"params must be SamplingParams(...), not {quoted(own)}")
    each = _per_input(
        "params", SamplingParams() if params is None else params, len(inputs), isinstance(params, Sequence)
    )
    expected = _per_input("predictions", prediction, len(inputs), not (prediction is None or _is_prompt(prediction)))
    chosen = _per_input("adapters", adapter, len(inputs), not isinstance(adapter, str | AdapterMix))
    return [
        Request(**{kind: value}, params=own, draft=draft, prediction=text, adapter=choice)
        for value, own, text, choice in zip(inputs, each, expected, chosen, strict=True)
    ]


def _per_input(name: str, value: Any, count: int, is_list: bool) -> list[Any]:
    """One value for all, or a list with one for each."""
    if not is_list:
        return [value] * count
    if len(value) != count:
        raise OutriderError(f"{len(value)} {name} for {count} prompts; give one, or one for each")
    return list(value)


def _with_bar(streams: Iterable[Stream]) -> Iterator[Stream]:
    from rich.console import Console
    from rich.progress import track

    return iter(track(list(streams), "generating", console=Console(stderr=True)))

"""`outrider chat`: a conversation. Commands begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.backends.base import Stream
from outrider.cli import options
from outrider.cli.fields import command
from outrider.cli.screen import Painter, note, paint
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.request import Result
from outrider.core.stats import Stats
from outrider.settings import Config

if TYPE_CHECKING:
    from outrider.llm import LLM

HELP = """\
/draft [SPEC]    show who guesses ahead, or change it: /draft ngram:length=12, /draft none
/adapter [NAME]  show which adapter answers, or change it: /adapter haiku, /adapter none
/stats           what was drafted and kept so far
/reset           begin a new conversation
/help            this list
/quit            leave (so does Ctrl-D); Ctrl-C stops an answer"""
GREETING = "Words from the draft are coloured; /help lists the commands, Ctrl-D leaves."
NONE = "none"  # as an adapter: the model as it is
ANSWER = SamplingParams(max_tokens=512)


SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty")
CONFIG = options.configured(
    options.settings("model", "draft", *options.ADAPTERS, *options.ENGINE, *options.MEMORY),
    options.sampling(*SAMPLING, max_tokens={"default": ANSWER.max_tokens}),
    plain=ANSWER,
)


@command
def chat(
    *,
    config: Annotated[Config, CONFIG],
    system: Annotated[str | None, typer.Option(help="The system message.", show_default="the model's own")] = None,
) -> None:
    """Chat with a model. Words that came from the draft are coloured; /help lists the commands.

    [dim]$[/] outrider chat
    [dim]$[/] outrider chat --temperature 0.7 --system "Answer in one sentence."
    [dim]$[/] outrider chat --config c.yaml
    [dim]$[/] printf 'Hello!\\n/stats\\n' | outrider chat --draft layer_skip
    """
    options.refuse_without_grammar(config.settings.draft, config.params)
    with options.opened(config.settings, config.notes) as llm:
        conversation = Conversation(llm, config.params, system)
        for line in _lines():
            if not conversation.take(line):
                break


def _lines() -> Iterator[str]:
    """What the user writes, until the end or Ctrl-C; with a prompt where both ends are a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from (line for line in map(str.strip, sys.stdin) if line)
        return
    import readline  # noqa: F401 (gives input() a history and line editing)

    note(GREETING)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line:
            yield line


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm, self._params = llm, params
        self._adapter = next(iter(llm.settings.adapters or ()), "")  # that answers; "": none
        self._draft = ""  # a drafter for the next answers; "": the one of the settings
        self._system = [] if system is None else [{"role": "system", "content": options.utf8(system, "system prompt")}]
        self._turns: list[dict[str, str]] = []  # user and assistant by turns
        self._stats = Stats()
        self._render([{"role": "user", "content": "?"}])  # a model that cannot chat is refused before anyone types

    def take(self, line: str) -> bool:
        """Answer a line or obey a command; False: leave. A mistake is reported and the conversation goes on."""
        try:
            if line.startswith("/"):
                return self._obey(*line.split(maxsplit=1))
            self._answer(options.utf8(line, "line"))
        except OutriderError as error:
            print(paint("error:", "red", sys.stderr), error, file=sys.stderr, flush=True)
        return True

    def _obey(self, command: str, argument: str = "") -> bool:
        if command == "/draft":
            self._change(argument)
        elif command == "/adapter":
            self._adapt(argument)
        elif command == "/stats":
            self._show_stats()
        elif command == "/reset":
            self._turns, self._stats = [], Stats()
            print("(a new conversation)", flush=True)
        elif command == "/help":
            print(HELP, flush=True)
        elif command != "/quit":
            raise OutriderError(f"unknown command {command}; /help lists them")
        return command != "/quit"

    def _change(self, draft: str) -> None:
        if draft:
            options.refuse_without_grammar(draft, self._params)
            self._llm.backend.prepare(draft)
            self._draft = draft
        print(f"draft: {self._draft or self._llm.settings.drafter}", flush=True)

    def _adapt(self, name: str) -> None:
        names = [each.name for each in self._llm.adapters]
        if name and name != NONE and name not in names:
            known = ", ".join(names) or "none; start with --adapter NAME=PATH"
            raise OutriderError(f"there is no adapter {name}; loaded: {known}")
        if name:
            self._adapter = "" if name == NONE else name
        print(f"adapter: {self._adapter or NONE}", flush=True)

    def _show_stats(self) -> None:
        print(self._stats)
        for name, counts in self._stats.by_drafter.items():
            print(f"  {name}: {counts['accepted']} of {counts['drafted']} kept")
        sys.stdout.flush()

    def _answer(self, text: str) -> None:
        turns = self._fit([*self._turns, {"role": "user", "content": text}])
        messages = [*self._system, *turns]
        left = self._llm.backend.context - len(self._render(turns))
        params = replace(self._params, max_tokens=max(1, min(self._params.max_tokens, left)))
        # the drafter `prediction` takes the answer before this one as what is expected: "now the same, but ..."
        predicts = options.needs_prediction(self._draft or self._llm.settings.draft)
        expected = self._turns[-1]["content"] if predicts and self._turns else None
        stream = self._llm.stream(
            messages, params, draft=self._draft, prediction=expected or None, adapter=self._adapter
        )
        result = self._show(stream)
        if result.finish_reason == "error":
            raise OutriderError(result.error)
        self._turns = [*turns, {"role": "assistant", "content": result.text}]
        self._stats += result.stats

    def _show(self, stream: Stream) -> Result:
        """Write the answer as it comes; Ctrl-C stops it."""
        painter = Painter(self._llm.tokenizer)
        try:
            for chunk in stream:
                painter.write(chunk)
            print(flush=True)
        except KeyboardInterrupt:
            stream.cancel()
            print(paint(" (stopped)", "dim", sys.stdout), flush=True)
        return stream.result()

    def _fit(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        """The turns without the oldest ones, so that the answer fits into the model's context."""
        context = self._llm.backend.context
        most = context - min(self._params.max_tokens, context // 2)
        dropped = 0
        while len(turns) > 1 and len(self._render(turns)) > most:
            turns, dropped = turns[2:], dropped + 1
        if dropped:
            note(f"(the context is full: the oldest {dropped} of the earlier exchanges are forgotten)")
        return turns

    def _render(self, turns: list[dict[str, str]]) -> list[int]:
        return self._llm.backend.render([*self._system, *turns])

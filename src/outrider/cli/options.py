"""Options that several commands share, and how a model is opened from them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields as fields_of, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import drafters, refusals
from outrider.cli.fields import Given, OptionSource, fields, joined
from outrider.cli.screen import bar
from outrider.compat import autogluon
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.core.params import SamplingParams
from outrider.models import sources
from outrider.settings import Config, Settings, config_from, from_mapping, read_file

if TYPE_CHECKING:
    from outrider.llm import LLM

NOT_UTF8 = "the {} is not valid UTF-8 text; convert it first"
MODEL, SAMPLING, GRAMMAR = "Model", "Sampling", "What the text may be (one of these)"
DEFAULT, PLAIN = Settings(), SamplingParams()
PLACE = ("device", "dtype", "quantize", "kv", "activations", "threads")
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# What is remembered from one request to the next.
MEMORY = ("history", "history_tokens", "cache_file", "cache_file_size")
ADAPTERS = ("adapters", "adapter_memory")
ENGINE = ("backend", "speculative_config", *PLACE, "cache_memory", *PARALLEL)


@dataclass(frozen=True)
class ConfigFile:
    config: Path | None = option(
        None,
        "A YAML file with settings; options given here override it.",
        flags=("--config", "-c"),
        panel=MODEL,
        shown=False,
    )


@dataclass(frozen=True)
class Printed:
    as_json: bool = option(False, "Print one JSON object.", flags=("--json",))


@dataclass(frozen=True)
class Constrained:
    """What the text may be, as the command line says it."""

    json_schema: Path | None = option(None, "JSON that follows the schema in this file.", panel=GRAMMAR)
    json_object: bool = option(False, "Any JSON object.", flags=("--json-object",), panel=GRAMMAR)
    regex: str | None = option(None, "Text that this regular expression matches as a whole.", panel=GRAMMAR)
    choice: str | None = option(None, "One of these texts, separated by commas.", panel=GRAMMAR)
    grammar: Path | None = option(None, "Text of the grammar in this file, in Lark's notation.", panel=GRAMMAR)

    def over(self, params: SamplingParams) -> SamplingParams:
        """The parameters with what was given here in the place of theirs."""
        given: dict[str, Any] = {
            "json_schema": None if self.json_schema is None else _read(self.json_schema, "JSON schema"),
            "json_object": self.json_object,
            "regex": self.regex,
            "choice": None if self.choice is None else self.choice.split(","),
            "grammar": None if self.grammar is None else _read(self.grammar, "grammar"),
        }
        return replace(params, **given) if any(value not in (None, False) for value in given.values()) else params


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OutriderError(f"cannot read the {what} in {path}: {reason}; give a text file") from error


def settings(*names: str, **changes: Any) -> OptionSource[Settings]:
    """Options about the model and the engine; `changes` as for `fields`."""
    return fields(Settings, *names, panel=MODEL, make=from_mapping, **changes)


def sampling(*names: str, **changes: Any) -> OptionSource[SamplingParams]:
    """Options about how tokens are chosen; `changes` as for `fields`."""
    return fields(SamplingParams, *names, panel=SAMPLING, **changes)


def configured(*others: OptionSource[Any], plain: SamplingParams = PLAIN) -> OptionSource[Config]:
    """A config file, and options that go over it. `plain`: how tokens are chosen where neither speaks."""
    return joined(lambda given: chosen(given, plain), fields(ConfigFile), *others)


@contextmanager
def opened(settings: Settings, notes: Sequence[str] = ()) -> Iterator[LLM]:
    """The model, pulled if need be, and closed in the end."""
    from outrider.llm import LLM

    draft = refusals.check(settings)  # a typing error shows before anything is downloaded
    pull_known(settings.model)
    with bar() as progress:
        progress(f"loading {settings.model}", 0, None)
        llm = LLM.from_settings(settings, draft)
    for note in (*notes, *llm.backend.notes):
        print(f"note: {note}", file=sys.stderr)
    with llm:
        yield llm


def one_adapter(settings: Settings) -> str:
    """The adapter that answers, where there can be one only; "": none."""
    names = list(settings.adapters or ())
    if len(names) > 1:
        raise OutriderError("there is one adapter to answer with; give --adapter once, or use chat and its /adapter")
    return names[0] if names else ""


def reads_prediction(spec: str) -> bool:
    """Whether the drafter drafts from the answer that the user expects."""
    return _is(spec, drafters.reads_prediction)


def needs_prediction(spec: str) -> bool:
    """Whether it drafts nothing without that answer."""
    return _is(spec, drafters.needs_prediction)


def needs_grammar(spec: str) -> bool:
    """Whether the drafter drafts nothing without the grammar of a request."""
    return _is(spec, drafters.needs_grammar)


def _is(spec: str, quality: Callable[[str], bool]) -> bool:
    """Not where it is no drafter of ours: vLLM has others."""
    with suppress(OutriderError):
        return quality(spec)
    return False


def refuse_without_grammar(spec: str, params: SamplingParams = PLAIN, how: str = "choose another drafter") -> None:
    """A drafter that would draft nothing, where no grammar can come. `how`: what to do."""
    if needs_grammar(spec) and params.constraint is None:
        raise OutriderError(f"the drafter {spec} drafts what a grammar forces, and there is none here; {how}")


def read_config(path: Path) -> Config:
    """A settings file of our own, or the generator block of AutoGluon-RAG's."""
    values = read_file(path)
    return autogluon.parse(values) if autogluon.recognises(values) else config_from(values)


def chosen(given: Given, plain: SamplingParams = PLAIN) -> Config:
    """What the config file says, and what was given on the command line over it. `plain`: where neither speaks."""
    file = given.get("config")
    config = Config(DEFAULT, plain) if file is None else read_config(file)
    settings, params = _over(config.settings, given), _over(config.params, given)
    if file is not None and {"draft", "speculative_config"} & given.keys():  # one takes the place of the other
        settings = {key: value for key, value in settings.items() if key in given or key not in _SPECULATION}
    return replace(config, settings=from_mapping(settings), params=SamplingParams(**params))


def _over(stored: Any, given: Given) -> dict[str, Any]:
    """The fields that are not at their defaults, and those given."""
    known = {each.name: each for each in fields_of(stored)}
    own = {name: getattr(stored, name) for name in known}
    changed = {name: value for name, value in own.items() if value != getattr(type(stored)(), name)}
    return {**changed, **{name: value for name, value in given.items() if name in known}}


_SPECULATION = ("draft", "speculative_config")


def pull_known(*names: str | None) -> None:
    """Download the models with a known name that are not here yet."""
    for name in names:
        if name in sources.KNOWN:
            pull(name)


def pull(name: str) -> Path:
    """The known model's file, downloaded under a progress bar if it is not here yet."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with bar(DownloadColumn(), TransferSpeedColumn()) as progress:
        return sources.pull(name, lambda done, total: progress(f"pulling {name}", done, total))


def read_stdin_or(text: str) -> str:
    """The text, or what comes on standard input for "-"."""
    try:
        read = utf8(sys.stdin.read() if text == "-" else text, "prompt")
    except UnicodeDecodeError as error:
        raise OutriderError(NOT_UTF8.format("prompt")) from error
    if text == "-" and not read.strip():
        raise OutriderError("nothing came on standard input; pipe a text into it, or give the prompt as an argument")
    return read


def utf8(text: str, what: str) -> str:
    """The text, refused where the bytes that the user gave for it are not UTF-8; Python keeps them as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OutriderError(NOT_UTF8.format(what)) from error
    return text

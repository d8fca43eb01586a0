"""Many queries from a file: answers are appended line by line, and a run that was broken off goes on."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.backends.base import Stream
from outrider.cli import options
from outrider.cli.screen import bar, json_text, note, paint
from outrider.core.errors import OutriderError
from outrider.core.request import Message, Result
from outrider.core.stats import Stats
from outrider.settings import Config

if TYPE_CHECKING:
    from outrider.llm import LLM

KEYS = ("id", "query", "retrieved")


@dataclass(frozen=True)
class Query:
    id: str
    text: str
    retrieved: tuple[str, ...] = ()  # what was found for it: it stands in the prompt, so prompt lookup sees it

    def prompt(self, prefix: str, raw: bool) -> str | list[Message]:
        """To be continued as it stands, or as a message that the model's chat template writes."""
        asked, context = prefix + self.text, "\n\n".join(self.retrieved)
        if raw:
            return f"Context:\n{context}\n\nQuestion: {asked}\nAnswer:" if context else asked
        return [{"role": "user", "content": f"{asked}\n\nContext:\n{context}" if context else asked}]


def answer(llm: LLM, config: Config, queries: Sequence[Query], output: Path, raw: bool) -> int:
    """Write what is not written yet; how many queries failed."""
    stats, failed = Stats(), 0
    with AnswerFile.opened(output, _mark(config, raw), queries) as answers, bar(_COUNT) as show:
        before = len(answers.done)
        todo = [query for query in queries if query.id not in answers.done]
        for query, outcome in _run(llm, config, todo, raw):
            if isinstance(outcome, Result):
                answers.add(query, outcome)
                stats += outcome.stats
            else:
                failed += 1
                print(paint("error:", "red", sys.stderr), f"query {query.id}: {outcome}", file=sys.stderr)
            show("answering", len(answers.done) + failed, len(queries))
    note(f"{len(answers.done)} of {len(queries)} answers in {output}" + (f", {before} from before" if before else ""))
    if stats.tokens:
        note(str(stats))
    if failed:
        note(f"{failed} failed; the same command tries them again")
    return failed


def read(path: Path) -> list[Query]:
    """One JSON object a line: query, and perhaps id and retrieved."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other line breaks as they are
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OutriderError(f"cannot read the queries in {path}: {reason}") from error
    queries = [_query(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    seen: set[str] = set()
    for query in queries:
        if query.id in seen:
            raise OutriderError(f"{path} has two queries with the id {query.id!r}; give each its own")
        seen.add(query.id)
    if not queries:
        raise OutriderError(f"{path} holds no queries; write one JSON object a line, with `query`")
    return queries


def _query(path: Path, number: int, line: str) -> Query:
    where = f"{path}, line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise OutriderError(f"{where} is not JSON ({error})") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("query"), str):
        raise OutriderError(f'{where} has no query; write {{"query": "..."}}')
    unknown = [key for key in entry if key not in KEYS]
    if unknown:
        raise OutriderError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
    found = entry.get("retrieved") or []
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise OutriderError(f"{where}: retrieved must be text or a list of texts")
    return Query(str(entry.get("id", number)), entry["query"], tuple(texts))


class AnswerFile:
    """The output file. A line is written whole or not at all."""

    def __init__(self, file: int, mark: str) -> None:
        self._file, self._mark = file, mark
        self.done: set[str] = set()

    @classmethod
    @contextmanager
    def opened(cls, path: Path, mark: str, queries: Sequence[Query]) -> Iterator[AnswerFile]:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise OutriderError(f"cannot write to {path}: {error.strerror}; choose another --output") from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):  # of a device or a pipe no earlier answers can be read
                raise OutriderError(f"{path} is not a file that answers could be kept in; choose another --output")
            answers = cls(file, mark)
            answers._resume(path, {query.id: query for query in queries})
            yield answers
        finally:
            os.close(file)

    def add(self, query: Query, result: Result) -> None:
        record = {"id": query.id, "query": query.text, "run": self._mark, **result.as_dict()}
        data = json_text(record).encode() + b"\n"
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            reason = f"the answer to query {query.id} could not be written: {error.strerror}"
            raise OutriderError(f"{reason}; make room, and the same command goes on from there") from error
        self.done.add(query.id)

    def _resume(self, path: Path, queries: dict[str, Query]) -> None:
        """Take over what another run has written; a line that it did not finish is cut off."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutriderError(f"another run is writing to {path}; wait for it or choose another --output") from error
        with open(os.dup(self._file), "rb") as reader:
            reader.seek(0)
            data = reader.read()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            self.done.add(self._known(f"{path}, line {number}", line, queries))
        os.ftruncate(self._file, whole)

    def _known(self, where: str, line: bytes, queries: dict[str, Query]) -> str:
        try:
            record: Any = json.loads(line)
            id, text, mark = record["id"], record["query"], record["run"]
        except (ValueError, KeyError, TypeError) as error:
            raise OutriderError(f"{where} is not an answer of ours; choose another --output") from error
        if id not in queries or queries[id].text != text:
            raise OutriderError(f"{where} answers a query that is not in the input; choose another --output")
        if mark != self._mark:
            raise OutriderError(f"{where} was written by another model or sampling; choose another --output")
        return str(id)


def _mark(config: Config, raw: bool) -> str:
    """Stands for all that decides the answers; who drafts does not."""
    names = ["model", "backend", "device", "dtype", "quantize", "kv", "activations"]
    names += ["adapters"] if config.settings.adapters else []
    chosen = {name: getattr(config.settings, name) for name in names}
    whole = {**chosen, "params": asdict(config.params), "prefix": config.query_prefix, "raw": raw}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _run(
    llm: LLM, config: Config, queries: Sequence[Query], raw: bool
) -> Iterator[tuple[Query, Result | OutriderError]]:
    """The outcomes in order. Two batches at most are under way, so that a long file does not fill the memory."""
    waiting: deque[tuple[Query, Stream | OutriderError]] = deque()
    try:
        for query in queries:
            if len(waiting) >= 2 * config.settings.max_batch:
                yield _outcome(*waiting.popleft())
            waiting.append((query, _submit(llm, config, query, raw)))
        while waiting:
            yield _outcome(*waiting.popleft())
    finally:  # Ctrl-C, or nobody reads on
        for _, stream in waiting:
            if isinstance(stream, Stream):
                stream.cancel()


def _submit(llm: LLM, config: Config, query: Query, raw: bool) -> Stream | OutriderError:
    try:
        adapter = options.one_adapter(config.settings)
        return llm.submit(query.prompt(config.query_prefix, raw), config.params, adapter=adapter)
    except OutriderError as error:
        return error


def _outcome(query: Query, stream: Stream | OutriderError) -> tuple[Query, Result | OutriderError]:
    if isinstance(stream, OutriderError):
        return query, stream
    try:
        result = stream.result()
    except OutriderError as error:
        return query, error
    return query, OutriderError(result.error) if result.finish_reason == "error" else result


_COUNT = "{task.completed:.0f}/{task.total:.0f}"

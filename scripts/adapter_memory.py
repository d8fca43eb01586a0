"""Many more adapters than memory holds: requests over all of them, none lost, none wrong, and what the process takes.

    python scripts/adapter_memory.py --model smollm2-135m --adapters 200 --fit 8 --requests 500

Random adapters on all seven matrices of every layer, in folders. First each one's text with memory for all of them, one
request at a time; then, in an engine with memory for `--fit`, the requests from `--threads` threads at once, all texts
compared. The memory of the process (RSS, and the part of it that is no file) after every tenth of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from adapter_gpu import write_adapter

from outrider import LLM, SamplingParams
from outrider.models.adapters import files

PROMPT = "Once upon a time there was"
GIB = 1 << 30


def say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def resident() -> dict[str, int]:
    """MiB of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found = {words[0]: int(words[1]) // 1024 for words in lines if words[0] in ("VmRSS:", "RssAnon:")}
    return {"rss": found["VmRSS:"], "anonymous": found["RssAnon:"]}


def ask(llm: LLM, given: argparse.Namespace, expected: dict[str, list[int]]) -> None:
    """All requests; `expected`: by the adapter's name."""
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)
    numbers, lock = iter(range(given.requests)), threading.Lock()
    found: list[bool] = []
    most = 0

    def work() -> None:
        nonlocal most
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            name = str(number * 37 % given.adapters)
            text = list(llm.generate(PROMPT, params, adapter=name).token_ids)
            with lock:
                found.append(text == expected[name])
                most = max(most, sum(info.loaded for info in llm.adapters))
                if len(found) % (given.requests // 10) == 0:
                    say("memory", answered=len(found), in_memory=most, **resident())

    threads = [threading.Thread(target=work) for _ in range(given.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("texts", asked=given.requests, answered=len(found), wrong=found.count(False), most_in_memory=most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--fit", type=int, default=8, help="adapters that there is memory for")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--threads", type=int, default=8)
    given = parser.parse_args()
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)
    names = [str(number) for number in range(given.adapters)]
    with tempfile.TemporaryDirectory() as folder:
        with LLM(given.model, draft="none", adapter_memory=64.0) as llm:
            model: Any = llm.engine.model
            paths = {
                name: write_adapter(Path(folder) / name, model.adapter_base.shapes, given.rank, int(name), 0.3)
                for name in names
            }
            plain = list(llm.generate(PROMPT, params).token_ids)
            expected = {}
            for name, path in paths.items():
                llm.load_adapter(name, path)
                expected[name] = list(llm.generate(PROMPT, params, adapter=name).token_ids)
            # what one takes when it is ready; `AdapterInfo.nbytes` is the bound that is known before
            size = model.adapt(files.read(Path(paths[names[0]]), model.adapter_base), "measured").nbytes
        changed = sum(text != plain for text in expected.values())
        say("adapters", count=len(names), bytes_of_each=size, texts_that_they_change=changed)
        with LLM(given.model, draft="none", adapter_memory=given.fit * size / GIB) as llm:
            say("memory", registered=0, **resident())
            for name, path in paths.items():
                llm.load_adapter(name, path)
            say("memory", registered=len(names), answered=0, **resident())
            ask(llm, given, expected)


if __name__ == "__main__":
    main()

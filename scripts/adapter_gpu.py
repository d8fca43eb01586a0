"""What adapters cost on a GPU, and that a text is the same alone and in company.

PYTHONPATH=src python scripts/adapter_gpu.py --model FOLDER --prompts turns.jsonl > adapters.jsonl
PYTHONPATH=src python scripts/adapter_gpu.py --shape 8b > passes.jsonl

Random adapters of one rank on all seven matrices of every layer. `pass`: a pass of so many rows, each of a sequence of
its own, with adapters in turns and with none; medians of CUDA events. `chat`: batches of prompts x tokens with none and
with the adapters, in turns, prompts in the cache; the ratio of a round is tokens/s with adapters over tokens/s with
none. `texts`: each sequence of the batch alone against itself in it, greedy; then the batch with drafters. `loading`:
an adapter that comes and leaves while the graphs stay. `--shape 8b`: only passes, of a model of Llama 3 8B's sizes with
random weights. JSON lines. Needs torch, triton, transformers and safetensors.
`--device cpu` leaves out the passes: it shows that the rest of the script runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from outrider import LLM, SamplingParams
from outrider.core.draft import Draft
from outrider.models.adapters.adapter import Adapter, LowRank
from outrider.models.base import Feed
from outrider.models.cuda.model import CudaLlama
from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Weights
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack

CONTEXT = 150  # tokens of each sequence before the passes that are timed
AGAIN = 20  # passes of one timing
ROWS = (1, 4, 16, 64)
PROMPT = 2048  # rows of the pass that is a prompt
DEVICE = "cuda"  # of a model of random weights
TURNS = 7  # of the passes of a shape
SHAPES = {  # hidden, heads, heads of keys, of a head, inner, vocabulary, layers
    "smollm2": (576, 9, 3, 64, 1536, 49152, 30),
    "8b": (4096, 32, 8, 128, 14336, 128256, 32),
}
WARM = 2  # calls before the first that counts: a shape that comes a second time is captured as a graph


def say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def write_adapter(folder: Path, shapes: Any, rank: int, seed: int, strength: float) -> str:
    """A PEFT folder; random values, `strength` times as large as what a product of its size gives."""
    made, tensors = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in shapes.items():
        if name.startswith("model.layers."):
            a = torch.randn(rank, inputs, generator=made) / inputs**0.5
            b = torch.randn(outputs, rank, generator=made) * strength / rank**0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir(parents=True)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return str(folder)


def chats(path: str | None, count: int) -> list[list[dict[str, str]]]:
    if path is None:
        texts = [f"Tell me something about the number {n}." for n in range(count)]
    else:
        texts = [json.loads(line)["turns"][0] for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [[{"role": "user", "content": texts[n * len(texts) // count % len(texts)]}] for n in range(count)]


def milliseconds(model: Any, feeds: list[Feed]) -> float:
    """A pass over these feeds, which the cache forgets; the device works without the host in between."""
    held = [(feed.id, model.length(feed.id)) for feed in feeds]
    for _ in range(3):
        model.forward(feeds)
        for id, length in held:
            model.crop(id, length)
    return statistics.median(timed(model.again) for _ in range(3))


def timed(run: Callable[[], None]) -> float:
    """Milliseconds of the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(AGAIN):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / AGAIN


def profile(model: Any, ready: list[Any], rows: int) -> None:
    """Microseconds of each kernel of a pass, with none and with all adapters."""
    for kind, own in (("none", [None]), ("all", ready)):
        model.forward([Feed(id, [8] * 20, adapter=own[id % len(own)]) for id in range(rows)])
        milliseconds(model, [Feed(id, [8], adapter=own[id % len(own)]) for id in range(rows)])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(AGAIN):
                model.again()
            torch.cuda.synchronize()
        for each in sorted(found.key_averages(), key=lambda one: -one.device_time_total)[:10]:
            say("kernel", kind=kind, rows=rows, name=each.key[:40], calls=each.count / AGAIN,
                microseconds=each.device_time_total / each.count)  # fmt: skip
        for id in range(rows):
            model.free(id)


def time_passes(model: Any, ready: list[Any]) -> None:
    text = [(7 * place) % 1000 + 5 for place in range(CONTEXT)]
    for rows in ROWS:
        found = {}
        for kind, own in (("none", [None]), ("one", ready[:1]), ("all", ready)):
            ids = range(rows)
            model.forward([Feed(id, text, adapter=own[id % len(own)]) for id in ids])
            found[kind] = milliseconds(model, [Feed(id, [8], adapter=own[id % len(own)]) for id in ids])
            for id in ids:
                model.free(id)
        say("pass", rows=rows, **found, ratio_one=found["none"] / found["one"], ratio_all=found["none"] / found["all"])
    tree = Draft(tuple(range(20, 35)), (-1, -1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11))
    for name, tokens, draft in (("tree of 15", [8], tree), (f"prompt of {PROMPT}", (text * 20)[:PROMPT], Draft(()))):
        none, one = (milliseconds(model, [Feed(0, tokens, draft, own)]) for own in (None, ready[0]))
        model.free(0)
        say("pass", rows=name, none=none, one=one, ratio_one=none / one)


def random_model(shape: str) -> CudaLlama:
    hidden, heads, keys, size, inner, vocab, count = SHAPES[shape]
    made = torch.Generator(DEVICE).manual_seed(0)

    def rand(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=made, device=DEVICE, dtype=torch.bfloat16) * 0.02

    def layer() -> Layer:
        return Layer(
            1 + rand(hidden), Dense(rand((heads + 2 * keys) * size, hidden)), Dense(rand(hidden, heads * size)),
            1 + rand(hidden), Dense(rand(2 * inner, hidden)), Dense(rand(hidden, inner)),
        )  # fmt: skip

    config = LlamaConfig(hidden, heads, keys, size, 1e-5, None, vocab_size=vocab, num_layers=count, context=2048)
    rope = Rope(1.0 / 5e5 ** (torch.arange(0, size, 2).float() / size))
    stack = TorchStack(config, [layer() for _ in range(count)])
    weights = Weights(Dense(rand(vocab, hidden)), stack, 1 + rand(hidden), Dense(rand(vocab, hidden)), rope)
    return CudaLlama(config, weights, 8 << 30)


def shape_passes(given: argparse.Namespace) -> None:
    """Passes of random weights in turns: with none, and with adapters, whose values are all the same, but which lie in
    units of their own."""
    model = random_model(given.shape)
    rank, pairs = given.rank, {}
    for name, (outputs, inputs) in model.adapter_base.shapes.items():
        if name.startswith("model.layers."):
            pairs[name] = LowRank(torch.randn(rank, inputs) / inputs**0.5, 0.02 * torch.randn(outputs, rank), 1.0)
    one = Adapter(pairs)
    model.reserve_adapters((given.adapters + 1) * model.adapter_bytes(one))
    ready = [model.adapt(one, f"{number}") for number in range(given.adapters)]
    say("ready", shape=given.shape, device=torch.cuda.get_device_name(), torch=torch.__version__)
    text = [(7 * place) % 1000 + 5 for place in range(CONTEXT)]
    for rows in (given.batch, 1):
        ids, found = range(rows), {}
        for count in (0, given.adapters):
            own = ready[:count] or [None]
            for token in text:  # as many rows as are timed: no other kernels are compiled
                model.forward([Feed(id, [token], adapter=own[id % len(own)]) for id in ids])
            milliseconds(model, [Feed(id, [8], adapter=own[id % len(own)]) for id in ids])
            assert model._last is not None
            found[count] = model._last[0]
            for id in ids:
                model.free(id)
        took: dict[int, list[float]] = {count: [] for count in found}
        for _ in range(TURNS):
            for count, run in found.items():
                took[count].append(timed(partial(model._passes.run, run, model._compute)))
        none = statistics.median(took[0])
        for count, each in took.items():
            middle = statistics.median(each)
            say("shape", shape=given.shape, rows=rows, adapters=count, milliseconds=middle,
                range=[min(each), max(each)], ratio=none / middle, asked=0.85)  # fmt: skip


class Batch:
    def __init__(self, llm: LLM, given: argparse.Namespace, names: list[str]) -> None:
        self.llm, self.chats = llm, chats(given.prompts, given.batch)
        self.own = [names[n % len(names)] for n in range(given.batch)]
        self.params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)

    def run(self, adapted: bool, draft: str = "none") -> tuple[float, list[list[int]]]:
        """Tokens/s, and the texts."""
        adapter: Any = self.own if adapted else ""
        begin = time.perf_counter()
        results = self.llm.chat(self.chats, self.params, draft=draft, adapter=adapter, progress=False)
        seconds = time.perf_counter() - begin
        texts = [list(result.token_ids) for result in results]
        return sum(map(len, texts)) / seconds, texts

    def alone(self, count: int) -> list[list[int]]:
        """The first `count` of its texts, each by itself."""
        pairs = list(zip(self.chats, self.own, strict=True))[:count]
        return [
            list(self.llm.chat(chat, self.params, draft="none", adapter=own, progress=False).token_ids)
            for chat, own in pairs
        ]


def differing(one: list[list[int]], two: list[list[int]]) -> int:
    return sum(first != second for first, second in zip(one, two, strict=False))


def measure(batch: Batch, given: argparse.Namespace) -> list[list[int]]:
    for _ in range(WARM):
        for adapted in (False, True):
            batch.run(adapted)
    ratios, speeds = [], []
    for number in range(given.rounds):
        found = {adapted: batch.run(adapted) for adapted in ((False, True) if number % 2 else (True, False))}
        ratios.append(found[True][0] / found[False][0])
        speeds.append((found[False][0], found[True][0]))
    none, own = (statistics.median(each) for each in zip(*speeds, strict=True))
    changed = differing(found[False][1], found[True][1])
    say("chat", batch=given.batch, none=none, adapters=own, ratio=statistics.median(ratios), ratios=ratios,
        asked=0.85, texts_changed_by_adapters=changed)  # fmt: skip
    return found[True][1]


def compare(batch: Batch, wanted: list[list[int]], given: argparse.Namespace) -> None:
    begin = time.perf_counter()
    alone = batch.alone(given.alone)
    seconds = time.perf_counter() - begin
    say("texts", kind="alone against in company", texts=len(alone), differ=differing(alone, wanted), seconds=seconds)
    for draft in given.draft:
        speed, found = batch.run(True, draft)
        say("texts", kind=f"with {draft}", texts=len(found), differ=differing(found, wanted), tokens_per_second=speed)


def load_and_leave(llm: LLM, model: Any, folder: str) -> None:
    """`model`: the target, whose graphs are counted."""
    before = getattr(model, "captured", 0)  # on a CPU there are none
    begin = time.perf_counter()
    llm.load_adapter("new", folder)
    seconds = time.perf_counter() - begin
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first = llm.generate("The sea", params, adapter="new").token_ids
    llm.unload_adapter("new")
    llm.load_adapter("new", folder)
    again = llm.generate("The sea", params, adapter="new").token_ids
    after = getattr(model, "captured", 0)
    say("loading", seconds=seconds, same=first == again, captured_before=before, captured_after=after)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model")
    made.add_argument("--shape", choices=SHAPES, help="in place of a model: its sizes, random weights")
    made.add_argument("--prompts", help="a .jsonl file in Spec-Bench form; default: short ones of our own")
    made.add_argument("--batch", type=int, default=64)
    made.add_argument("--adapters", type=int, default=16)
    made.add_argument("--rank", type=int, default=16)
    made.add_argument("--strength", type=float, default=0.1)
    made.add_argument("--tokens", type=int, default=128)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--alone", type=int, default=32, help="texts that are also written alone")
    made.add_argument(
        "--draft", "-d", action="append", default=[], help="repeatable: drafters that write the batch too"
    )
    made.add_argument("--cache-memory", type=float, default=8.0)
    made.add_argument("--adapter-memory", type=float, default=1.0)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--profile", action="store_true", help="also the time of each kernel of a pass")
    return made


def main() -> int:
    given = parser().parse_args()
    if (given.model is None) == (given.shape is None):
        parser().error("give --model or --shape")
    if given.shape:
        shape_passes(given)
    else:
        whole(given)
    return 0


def whole(given: argparse.Namespace) -> None:
    begin = time.perf_counter()
    where = {"device": given.device, "dtype": given.dtype, "cache_memory": given.cache_memory, "max_batch": given.batch}
    with LLM(given.model, draft="none", adapter_memory=given.adapter_memory, **where) as llm, \
            tempfile.TemporaryDirectory() as folder:  # fmt: skip
        model: Any = llm.engine.model
        names = [f"a{n}" for n in range(given.adapters)]
        for seed, name in enumerate([*names, "other"]):
            write_adapter(Path(folder) / name, model.adapter_base.shapes, given.rank, seed, given.strength)
        for name in names:
            llm.load_adapter(name, Path(folder) / name)
        device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        say("ready", seconds=time.perf_counter() - begin, device=device, torch=torch.__version__)
        batch = Batch(llm, given, names)
        wanted = measure(batch, given)
        compare(batch, wanted, given)
        load_and_leave(llm, model, str(Path(folder) / "other"))
        if given.device == "cuda":
            own = [model.adapt(_read(model, Path(folder) / name), f"again {name}") for name in names]
            time_passes(model, own)
            if given.profile:
                profile(model, own, given.batch)
        say("end", seconds=time.perf_counter() - begin)


def _read(model: Any, path: Path) -> Any:
    from outrider.models.adapters import files

    return files.read(path, model.adapter_base)


if __name__ == "__main__":
    raise SystemExit(main())

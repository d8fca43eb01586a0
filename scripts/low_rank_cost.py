"""What adapters add to the products of a layer on a GPU, and whether a row's bits depend on its company.

    PYTHONPATH=src python scripts/low_rank_cost.py [--shapes smollm2,8b] [--rows 1,16,64,256,2048]

Random weights of enough layers that no cache holds them; adapters of rank 16 on all matrices, rows in turns. The four
products of a layer after each other, all layers as one CUDA graph, each kernel set up while the one before ends, as in
a pass. `layer`: microseconds of a layer, median and range of 7 turns with 0, 1, 4 and 16 adapters; `added`: less the
same rows with none. `bits`: rows that differ from themselves alone; `error`: the largest difference from float32, as a
part of the largest output. JSON lines; needs torch and triton. Kernels are compiled by processes beside each other
first. Without a GPU (TRITON_INTERPRET=1) only `bits`, of a tiny shape in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.models.cuda import low_rank, product
from outrider.models.cuda.tickets import Tickets

UNITS, RANK_UNITS, EPS = 64, 1, 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # interpreted: only what is equal, on the smallest shape
BF16 = torch.bfloat16 if DEVICE == "cuda" else torch.float32
COUNTS = (0, 1, 4, 16)
COMPARED = {1, 7, 64}  # rows that `compare` has kernels for: Triton tells 1, multiples of 16 and others apart
SHAPES = {  # hidden, inner, ends of queries, keys and values, layers
    "smollm2": (576, 1536, (576, 768, 960), 10),
    "8b": (4096, 14336, (4096, 5120, 6144), 1),
    "tiny": (32, 48, (32, 48, 64), 1),
}


def say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def rand(*sizes: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(*sizes, device=DEVICE) * scale).to(dtype)


class Joined(NamedTuple):
    weight: Tensor
    a: Tensor
    b: Tensor
    ends: tuple[int, ...]


class Model:
    def __init__(self, shape: str) -> None:
        torch.manual_seed(0)
        hidden, inner, ends, layers = SHAPES[shape]
        self.hidden, self.inner, self.qkv = hidden, inner, ends[-1]

        def joined(inputs: int, ends: tuple[int, ...]) -> Joined:
            a = rand(UNITS, len(ends), 16, inputs, scale=inputs**-0.5)
            return Joined(rand(ends[-1], inputs, scale=inputs**-0.5), a, rand(UNITS, ends[-1], 16, scale=0.1), ends)

        self.layers = [
            {
                "qkv": joined(hidden, ends),
                "output": joined(hidden, (hidden,)),
                "gate_up": joined(hidden, (inner, 2 * inner)),
                "down": joined(inner, (hidden,)),
            }
            for _ in range(layers)
        ]
        self.gain = 1 + rand(hidden, scale=0.1)


def tile_of(rows: int) -> int:
    return 16 if rows <= 64 else 64


def tables(owners: list[int]) -> dict[str, Tensor]:
    """`owners`: the adapter of each row, from 1 on; 0: none."""
    rows, tile = len(owners), tile_of(len(owners))
    tiles = -(-min(rows, rows // tile + UNITS) // 4) * 4
    adapters = list(dict.fromkeys(owner for owner in owners if owner))
    at = {owner: number for number, owner in enumerate(adapters)}
    order = sorted(range(rows), key=lambda row: at.get(owners[row], -1))
    table = torch.zeros(4, tiles, dtype=torch.int32)
    found = 0
    for owner in adapters:
        own = [place for place, row in enumerate(order) if owners[row] == owner]
        for first in range(own[0], own[-1] + 1, tile):
            table[:, found] = torch.tensor([at[owner], 1, first, min(tile, own[-1] + 1 - first)])
            found += 1
    held = len(adapters)
    numbers = torch.zeros(4 + UNITS, dtype=torch.int32)
    numbers[:3] = torch.tensor([held, found, int(held > 0)])
    numbers[4 : 4 + held] = torch.tensor([owner * 3 % UNITS for owner in adapters])
    values = {
        "units": numbers,
        "order": torch.tensor(order),
        "tiles": table,
        "firsts": torch.tensor([at.get(owner, 0) for owner in owners]),
        "counts": torch.tensor([int(owner > 0) for owner in owners]),
    }
    return {name: value.to(DEVICE, torch.int32).contiguous() for name, value in values.items()}


class Pass:
    """The products of all layers over some rows."""

    def __init__(self, model: Model, owners: list[int], x: Tensor, mixed: Tensor) -> None:
        self.model, rows = model, len(owners)
        self.start, self.mixed = x, mixed
        widest = max(model.qkv, model.hidden)
        self.x, self.work = x.clone(), product.Workspace(rows, model.hidden, widest, BF16, x.device)
        self.joined = torch.empty(rows, model.qkv, dtype=BF16, device=DEVICE)
        self.inner = torch.empty(rows, model.inner, dtype=BF16, device=DEVICE)
        self.sums: list[dict[str, Any]] = [{} for _ in model.layers]
        if any(owners):
            table = tables(owners)
            inner = torch.empty(rows * 3 * low_rank.PLACES * low_rank.UNIT, dtype=BF16, device=DEVICE)
            tickets = Tickets(4 * len(model.layers), x.device)
            for number, layer in enumerate(model.layers):
                for place, (field, own) in enumerate(layer.items()):
                    self.sums[number][field] = low_rank.LowRankSum(
                        a=own.a, b=own.b, ends=own.ends, inner=inner, tile=tile_of(rows), tickets=tickets,
                        place=4 * number + place, **table
                    )  # fmt: skip

    def run(self) -> None:
        self.x.copy_(self.start)
        self.work.next.copy_(self.start)
        self.work.squares[0, :].fill_(float(self.model.hidden))
        self.work.strips = 1
        for number in range(len(self.model.layers)):
            self.layer(number)

    def layer(self, number: int) -> None:
        layer, own, work = self.model.layers[number], self.sums[number], self.work
        gain, around, linear = self.model.gain, product.Around, product.linear
        linear(work.next, layer["qkv"].weight, None, self.joined, work, around(eps=EPS, adapters=own.get("qkv")))
        after = around(gain=gain, adapters=own.get("output"))
        linear(self.mixed, layer["output"].weight, None, self.x, work, after)
        gated = around(eps=EPS, gate=True, adapters=own.get("gate_up"))
        linear(work.next, layer["gate_up"].weight, None, self.inner, work, gated)
        linear(self.inner, layer["down"].weight, None, self.x, work, around(gain=gain, adapters=own.get("down")))


class Interpreted:
    def __init__(self, run: Any) -> None:
        self.replay = run


def graph_of(run: Any) -> Any:
    run()
    if DEVICE == "cpu":
        return Interpreted(run)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin()
        run()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph


def microseconds(graph: Any, layers: int, again: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(again):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / again / layers


def owners_of(rows: int, adapters: int) -> list[int]:
    return [1 + row % adapters if adapters else 0 for row in range(rows)]


def inputs(model: Model, rows: int) -> tuple[Tensor, Tensor]:
    """The same beginnings for any number of rows."""
    made = torch.Generator(DEVICE).manual_seed(5)
    x = torch.randn(2, max(64, rows), model.hidden, generator=made, device=DEVICE).to(BF16)
    return x[0, :rows].contiguous(), x[1, :rows].contiguous()


def time_all(shape: str, model: Model, all_rows: list[int]) -> None:
    layers, again = len(model.layers), 20 if shape == "smollm2" else 10
    for rows in all_rows:
        passes = {count: Pass(model, owners_of(rows, count), *inputs(model, rows)) for count in COUNTS if count <= rows}
        graphs = {count: graph_of(one.run) for count, one in passes.items()}
        found: dict[int, list[float]] = {count: [] for count in graphs}
        for _ in range(7):
            for count, graph in graphs.items():
                found[count].append(microseconds(graph, layers, again))
        none = statistics.median(found[0])
        for count, each in found.items():
            middle = statistics.median(each)
            say("layer", shape=shape, rows=rows, adapters=count, microseconds=round(middle, 2),
                range=[round(min(each), 2), round(max(each), 2)], added=round(middle - none, 2))  # fmt: skip


def outputs(model: Model, owners: list[int], rows: list[int] | None = None) -> Tensor:
    """[rows, values] of the residual after the first layer, and what lies before it."""
    x, mixed = inputs(model, 64)
    take = list(range(len(owners))) if rows is None else rows
    one = Pass(model, owners, x[take].contiguous(), mixed[take].contiguous())
    graph = graph_of(one.run)
    graph.replay()
    return torch.cat([one.x, one.joined, one.inner], 1).clone()


def compare(shape: str, model: Model) -> None:
    owners = [row % 17 for row in range(64)]  # also none
    company = outputs(model, owners)
    differ = 0
    for rows in ([0], [1], [5], [63], list(range(20, 36)), [3, 20, 37], list(range(7))):
        alone = outputs(model, [owners[row] for row in rows], rows)
        differ += int((alone != company[rows]).any(1).sum())
    none = outputs(model, [0] * 64)
    bare = [row for row in range(64) if not owners[row]]
    changed = int((none != company).any(1).sum())
    say("bits", shape=shape, differ=differ + int((none != company)[bare].any(1).sum()),
        rows_changed_by_adapters=changed, of=64 - len(bare), error=error(model, owners))  # fmt: skip


def error(model: Model, owners: list[int]) -> float:
    """Of the first product of the first layer."""
    x, mixed = inputs(model, 64)
    one, own = Pass(model, owners, x, mixed), model.layers[0]["qkv"]
    one.run()
    one.work.next.copy_(x)
    one.work.squares[0, :].fill_(float(model.hidden))
    one.work.strips = 1
    product.linear(one.work.next, own.weight, None, one.joined, one.work,
                  product.Around(eps=EPS, adapters=one.sums[0]["qkv"]))  # fmt: skip
    wanted = x.float() @ own.weight.float().T
    for row, owner in enumerate(owners):
        if owner:
            begin = 0
            for matrix, end in enumerate(own.ends):
                inner = own.a[owner * 3 % UNITS, matrix].float() @ x[row].float()
                wanted[row, begin:end] += own.b[owner * 3 % UNITS, begin:end].float() @ inner
                begin = end
    wanted *= (1.0 + EPS) ** -0.5
    return float((one.joined.float() - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smollm2,8b")
    parser.add_argument("--rows", default="1,16,64,256,2048")
    parser.add_argument("--compile", action="store_true", help="only compile, in this process")
    given = parser.parse_args()
    shapes, rows = given.shapes.split(","), [int(each) for each in given.rows.split(",")]
    if given.compile:
        for shape in shapes:
            SHAPES[shape] = (*SHAPES[shape][:3], 1)  # type: ignore[assignment]
            model = Model(shape)
            for count in rows:
                for adapters in (0, 1):
                    Pass(model, owners_of(count, adapters), *inputs(model, count)).run()
        torch.cuda.synchronize()
        return
    begin = time.perf_counter()
    if DEVICE == "cpu":
        compare("tiny", Model("tiny"))
        return
    with torch.inference_mode():
        command = [sys.executable, __file__, "--compile", "--rows"]
        parts = [
            subprocess.Popen([*command, str(count), "--shapes", shape])
            for shape in shapes
            for count in sorted({max(16, count) for count in rows} | COMPARED)
        ]
        for part in parts:
            part.wait()
        say("compiled", seconds=time.perf_counter() - begin, device=torch.cuda.get_device_name())
        for shape in shapes:
            model = Model(shape)
            compare(shape, model)
            time_all(shape, model, rows)
            del model
            torch.cuda.empty_cache()
    say("end", seconds=time.perf_counter() - begin)


if __name__ == "__main__":
    main()

"""`outrider profile`: what a pass costs here, and when drafting pays."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.bench.costs import BestLength, Point
from outrider.bench.plan import check_writable
from outrider.bench.profile_plan import DEFAULT as PLAN, GPU_ROWS, ProfilePlan, parse_rows
from outrider.cli import options
from outrider.cli.fields import command, fields
from outrider.cli.screen import bar, note, print_json
from outrider.core.option import option
from outrider.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from outrider.bench.profile import GpuPasses, Profile

SHOWN = (2, 4, 8)  # draft lengths in the picture
CHEAP = 0.01  # a drafter whose token costs less than this share of a pass needs no table
NOISY = 0.3  # a spread from which on medians are not to be trusted


@dataclass(frozen=True)
class ProfileOptions(options.Printed):
    context: int = option(PLAN.context, "Tokens already in the cache.")
    rows: str | None = option(
        None,
        "Sizes of a pass in rows: one committed token and the guesses after it. 1 and 2 are always included.",
        shown=f"{','.join(map(str, PLAN.rows))}; on a GPU {','.join(map(str, GPU_ROWS))}",
    )
    rounds: int = option(PLAN.rounds, "How often each size is measured.")
    output: Path | None = option(None, "Folder for profile.json, profile.md and profile.png.", flags=("--output", "-o"))


@command
def profile(
    *,
    settings: Annotated[Settings, options.settings("model", "draft", *options.PLACE)],
    own: Annotated[ProfileOptions, fields(ProfileOptions)],
) -> None:
    """Measure what passes and drafts cost on this machine, and say which draft length pays at which acceptance.

    Passes of all sizes take turns in shuffled rounds; times are medians, with 10 % and 90 % percentiles.
    [bold]Acceptance[/] is the probability that a guess is kept when the one before it was.

    [dim]$[/] outrider profile
    [dim]$[/] outrider profile --draft layer_skip:layers=8,length=8 --threads 2 --output profile
    [dim]$[/] outrider profile --model ./my-model --context 2048 --rows 1,2,4,8 --json
    [dim]$[/] outrider profile --device cuda --output profile   # with the share of the card's bandwidth
    """
    from outrider import build
    from outrider.bench.profile import profile as run

    gpu = build.device(settings.device).type == "cuda"
    rows = (GPU_ROWS if gpu else PLAN.rows) if own.rows is None else parse_rows(own.rows)
    plan = ProfilePlan(own.context, rows, own.rounds)
    if own.output is not None:
        check_writable(own.output)
    with options.opened(settings) as llm, bar("{task.completed:.0f}/{task.total:.0f}") as progress:
        found = run(llm, plan, progress)
    if own.as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    if own.output is not None:
        _write(found, own.output)


@dataclass(frozen=True)
class ProfileTable:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(found: Profile) -> list[ProfileTable]:
    one = found.costs.passes[0].ms
    passes = [(*_times(point), f"{point.ms / one:.2f}×", _ms(point.ms / point.size)) for point in found.costs.passes]
    costly = found.costs.draft_ms > CHEAP * one
    drafts = [(*_times(point), _ms(point.ms / point.size)) for point in found.drafts if costly]
    made = [
        ProfileTable("The target", ("rows", "ms per pass", "10–90 %", "ratio", "ms per row"), passes),
        *([_card(found.on_card, found)] if found.on_card else []),
        ProfileTable(f"The drafter {found.draft}", ("tokens", "ms per draft", "10–90 %", "ms per token"), drafts),
        ProfileTable(
            "What pays",
            ("acceptance", "best draft length", "speed-up"),
            [(f"{choice.acceptance:.2f}", _length(found, choice), f"{choice.speed_up:.2f}×") for choice in found.best],
        ),
        _asked_table(found),
    ]
    return [table for table in made if table.rows]


def _asked_table(found: Profile) -> ProfileTable:
    """Of one answer: a token that a drafter brings saves what a token takes in plain decoding, less its rows' cost."""
    columns = ("drafter", "asked", "ms for it", "nodes", "kept", "ms of their rows", "ms saved", "ms gained")
    rows = [
        (each.name, f"{each.asked} of {found.request.steps} steps", _ms(each.asking), str(each.drafted),
         str(each.kept), _ms(each.rows), _ms(each.saved), _ms(each.gained))
        for each in shares(found)
    ]  # fmt: skip
    return ProfileTable("An answer with the drafter: who was asked, and why", columns, rows)


@dataclass(frozen=True)
class DrafterShare:
    """What one drafter cost and brought in an answer; times in ms."""

    name: str
    asked: int  # steps
    asking: float
    drafted: int  # nodes
    kept: int
    rows: float  # that its nodes added to passes
    saved: float  # by tokens that no pass had to write

    @property
    def gained(self) -> float:
        return self.saved - self.rows - self.asking


def shares(found: Profile) -> list[DrafterShare]:
    stats, plain = found.request, 1000.0 / found.plain_tokens_per_second
    names = dict.fromkeys([*stats.asked_by_drafter, *stats.drafted_by_drafter])
    asked = [name for name in names if stats.asked_by_drafter[name] or stats.drafted_by_drafter[name]]
    row = max(0.0, found.costs.line.slope)
    return [
        DrafterShare(
            name,
            stats.asked_by_drafter[name],
            1000.0 * stats.seconds_by_drafter.get(name, 0.0),
            stats.drafted_by_drafter[name],
            stats.accepted_by_drafter[name],
            row * stats.drafted_by_drafter[name],
            plain * stats.accepted_by_drafter[name],
        )
        for name in asked
    ]


def _card(card: GpuPasses, found: Profile) -> ProfileTable:
    """The device alone, and what is left over for the host."""
    walls, one = {point.size: point.ms for point in found.costs.passes}, card.device_ms[0][1]
    rows = [
        (str(rows), _ms(ms), f"{100 * card.share(ms):.0f} %", f"{ms / one:.2f}×", _ms(walls[rows] - ms))
        for rows, ms in card.device_ms
    ]
    return ProfileTable(card.card.name, ("rows", "device ms", "of the copy's bandwidth", "ratio", "host ms"), rows)


def facts(found: Profile) -> list[str]:
    """What the tables leave out, in sentences."""
    lines = [
        *([_best(found.on_card)] if found.on_card else []),
        _line(found),
        f"Plain decoding writes {found.plain_tokens_per_second:.1f} tokens/s; a prompt is read at "
        f"{found.prefill_tokens_per_second:.0f} tokens/s in chunks of {found.prefill_piece}{_arithmetic(found)}.",
        _drafting(found),
        _break_even(found),
    ]
    if found.weight_bytes is not None:
        lines.append(f"The weights take {found.weight_bytes / 1e6:.1f} MB as stored.")
    if found.kv_bytes_per_token is not None:
        lines.append(f"Keys and values take {found.kv_bytes_per_token / 1e3:.1f} kB per token.")
    if found.costs.spread > NOISY:
        lines.append(
            f"Careful: 8 of 10 passes of one size lie {100 * found.costs.spread:.0f} % apart, so the machine was busy; "
            "measure again when it is quiet, or with more rounds."
        )
    return lines


def _arithmetic(found: Profile) -> str:
    return "" if found.arithmetic is None else f" (arithmetic {100 * found.arithmetic:.0f} % of peak)"


def _best(card: GpuPasses) -> str:
    return (
        f"The card copies {card.card.copy_tb_s:.2f} TB/s and multiplies {card.card.matrix_tflop_s:.0f} TFLOP/s in "
        f"bfloat16; a pass reads {card.pass_bytes / 1e6:.1f} MB of weights."
    )


def markdown(found: Profile) -> str:
    where = found.machine
    head = f"{_head(found)}  \n{where['cpu']}, {where['cores']} cores; outrider {where['outrider']}"
    parts = [f"# {found.model}: outrider profile", head + (f", commit {where['commit']}" if where["commit"] else "")]
    parts += [_markdown_table(table) for table in tables(found)]
    parts.append("\n".join(f"- {fact}" for fact in facts(found)))
    return "\n\n".join(parts) + "\n"


def draw(found: Profile, path: Path) -> None:
    from matplotlib.figure import Figure

    drafted = shares(found)
    figure = Figure(figsize=(15 if drafted else 11, 4.2), layout="constrained")
    left, right, *last = figure.subplots(1, 3 if drafted else 2)
    _draw_passes(left, found)
    _draw_speed_ups(right, found)
    if drafted:
        _draw_shares(last[0], drafted)
    for axes in (left, right, *last):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    figure.suptitle(_head(found), fontsize=10)
    figure.savefig(path, dpi=130)


def _draw_passes(axes: Axes, found: Profile) -> None:
    points, line = found.costs.passes, found.costs.line
    rows = [point.size for point in points]
    axes.fill_between(rows, [p.low for p in points], [p.high for p in points], alpha=0.25, label="10–90 %")
    axes.plot(rows, [p.ms for p in points], marker="o", markersize=4, label="median")
    fitted = f"{line.base:.2f} {_signed(line.slope)} × rows"
    axes.plot(rows, [line.base + line.slope * r for r in rows], color="grey", linestyle="--", linewidth=1, label=fitted)
    axes.set(xlabel="rows", ylabel="ms per pass", xlim=(0, None), ylim=(0, None))


def _draw_speed_ups(axes: Axes, found: Profile) -> None:
    rates = [step / 100 for step in range(101)]
    for length in (length for length in SHOWN if length <= found.costs.longest):
        speed_ups = [found.costs.speed_up(rate, length) for rate in rates]
        axes.plot(rates, speed_ups, label=f"drafts of {length}")
    best = [found.costs.best(rate).speed_up for rate in rates]
    axes.plot(rates, best, "k:", label="the best length")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="acceptance", ylabel="expected speed-up over plain decoding", xlim=(0, 1), ylim=(0, None))


def _draw_shares(axes: Axes, drafted: Sequence[DrafterShare]) -> None:
    """Above the line what a drafter saved, below it what it took."""
    places = range(len(drafted))
    axes.bar(places, [each.saved for each in drafted], label="saved by kept tokens")
    axes.bar(places, [-each.asking for each in drafted], label="asking")
    below = [-each.asking for each in drafted]
    axes.bar(places, [-each.rows for each in drafted], bottom=below, label="rows of its nodes")
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xticks(places, [f"{each.name}\nasked {each.asked}×" for each in drafted], fontsize=8)
    axes.set_ylabel("ms of one answer")


def _write(found: Profile, folder: Path) -> None:
    (folder / "profile.json").write_text(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    (folder / "profile.md").write_text(markdown(found), "utf-8")
    try:
        draw(found, folder / "profile.png")
    except ModuleNotFoundError:
        note("no profile.png: matplotlib is not installed (pip install '.[plot]' in a checkout)")
    note(f"written to {folder}")


def _print(found: Profile) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    console.print(_head(found), markup=False)
    for table in tables(found):
        console.print(f"\n{table.title}", style="bold", markup=False)
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in table.columns:
            grid.add_column(name, justify="right")
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid)
    for fact in facts(found):
        console.print(fact, markup=False)


def _head(found: Profile) -> str:
    weights = "" if found.quantize == "none" else f", {found.quantize}"
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    return (
        f"{found.model}, {found.draft}, dtype {found.dtype}{weights}, {threads}, context {found.plan.context}, "
        f"{found.plan.rounds} rounds, {found.seconds:.0f} s"
    )


def _line(found: Profile) -> str:
    line, one = found.costs.line, found.costs.passes[0].ms
    return (
        f"A pass takes about {line.base:.2f} {_signed(line.slope)} × rows ms: one more row costs {line.slope:.2f} ms, "
        f"{100 * line.slope / one:.0f} % of a pass of one row."
    )


def _drafting(found: Profile) -> str:
    if found.drafts:
        return f"The drafter {found.draft} takes {_ms(found.costs.draft_ms)} ms per drafted token."
    return f"The drafter {found.draft} drafted nothing here; drafting is taken to be free."


def _break_even(found: Profile) -> str:
    rate = found.costs.break_even
    if rate is None:
        return "A draft of one token never pays here."
    return f"A draft of one token pays from an acceptance of {rate:.2f} on."


def _length(found: Profile, choice: BestLength) -> str:
    if choice.length == 0:
        return "none"
    return f"{choice.length}{' or more' if choice.length == found.costs.longest else ''}"


def _times(point: Point) -> tuple[str, str, str]:
    return str(point.size), _ms(point.ms), f"{_ms(point.low)}–{_ms(point.high)}"


def _ms(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'} {abs(value):.2f}"


def _markdown_table(table: ProfileTable) -> str:
    lines = [table.columns, ("--:",) * len(table.columns), *table.rows]
    return f"## {table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

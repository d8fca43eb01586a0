"""Options that are fields of dataclasses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields as fields_of
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.fields import Given, command, fields, joined
from outrider.core.option import option, option_of


def _doubled(text: str) -> int:
    return 2 * int(text)


@dataclass(frozen=True)
class Cake:
    layers: int = option(2, "How many.", least=1, most=9, flags=("--layers", "-l"))
    iced: bool = option(False, "With sugar.")
    baked: bool = option(True, "In the oven.")
    fruit: Sequence[str] = option((), "Repeatable.", panel="Filling")
    jam: tuple[Path, ...] = option((), "Repeatable.")
    recipe: Mapping[str, Any] | None = option(None, "As JSON.", shown=False)
    eggs: int = option(0, "Twice as many are taken.", parse=_doubled, shown="some")
    oven: str = option("gas", "Which one.", env="CAKE_OVEN")
    secret: int = 7  # no option
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plate:
    size: float = option(help="In cm.")


def run(function, *args, env=None):
    app = typer.Typer()
    app.command()(command(function))
    return CliRunner().invoke(app, list(args), env=env)


def test_a_command_gets_the_object():
    seen = []

    def bake(name: Annotated[str, typer.Argument()], *, cake: Annotated[Cake, fields(Cake)]) -> None:
        seen.append((name, cake))

    assert run(bake, "sponge").exit_code == 0
    given = ["x", "-l", "3", "--iced", "--no-baked", "--fruit", "a", "--fruit", "b", "--jam", "p", "--eggs", "4"]
    assert run(bake, *given, "--recipe", "{}", env={"CAKE_OVEN": "electric"}).exit_code == 0
    full = Cake(3, True, False, ["a", "b"], [Path("p")], "{}", 8, "electric")  # the dataclass itself may convert
    assert seen == [("sponge", Cake()), ("x", full)]


def test_a_command_gets_what_was_given():
    seen = []

    def bake(ctx: typer.Context, *, given: Annotated[Given, fields(Cake)]) -> None:
        seen.append((ctx.params["layers"], given))

    assert run(bake, "--layers", "2", "--eggs", "1").exit_code == 0
    assert run(bake).exit_code == 0
    assert seen == [(2, {"layers": 2, "eggs": 2}), (2, {})]


def test_a_command_takes_some_and_says_it_differently():
    seen = []
    source = fields(Cake, "oven", "layers", layers={"default": 5, "help": "At our house."}, panel="Kitchen")

    def bake(*, cake: Annotated[Cake, source]) -> None:
        seen.append(cake)

    assert run(bake).exit_code == 0
    assert seen == [Cake(layers=5)]
    text = run(bake, "--help").output
    assert "At our house." in text
    assert "default: 5" in text
    assert "Kitchen" in text
    assert "--fruit" not in text
    assert text.index("--oven") < text.index("--layers")


def test_help_has_types_bounds_and_defaults():
    def bake(*, cake: Annotated[Cake, fields(Cake)], plate: Annotated[Plate, fields(Plate)]) -> None: ...

    text = run(bake, "--help", env={"COLUMNS": "120", "TERM": "dumb"}).output
    for words in ("1<=x<=9", "default: (some)", "--baked", "--no-baked", "CAKE_OVEN", "Filling", "required"):
        assert words in text
    assert "--no-iced" not in text
    assert "--secret" not in text
    assert run(bake).exit_code == 2  # --size is missing
    assert run(bake, "--size", "3", "--layers", "10").exit_code == 2


def test_several_sources_make_one_object():
    seen = []
    both = joined(lambda given: dict(given), fields(Cake, "eggs"), fields(Plate))

    def bake(*, both: Annotated[dict, both]) -> None:
        seen.append(both)

    assert run(bake, "--size", "3", "--eggs", "1").exit_code == 0
    assert seen == [{"size": 3.0, "eggs": 2}]


@pytest.mark.parametrize("wrong", [("secret", {}), ("layers", {"oven": {"help": "x"}})])
def test_a_wrong_declaration_is_seen_at_once(wrong):
    name, changes = wrong
    with pytest.raises(AssertionError):
        fields(Cake, name, **changes)


def test_only_options_are_options():
    assert [each.name for each in fields_of(Cake) if option_of(each) is None] == ["secret", "notes"]


def test_help_has_no_line_breaks_of_the_source():
    @command
    def bake(*, cake: Annotated[Cake, fields(Cake)]) -> None:
        """Bake a cake.

        A line of the source that is as long as lines of the source may be goes on in the next one, so that both are
        one line of help;
        a short one ends where its author wanted it to.

        [dim]$[/] outrider bake --with --very --many --options --so --that --the --line --is --as --long --as --others
        [dim]$[/] outrider bake
        """

    assert bake.__doc__ is not None
    firsts = [len(line) > 0 and line.split()[0] for line in bake.__doc__.splitlines()]
    assert firsts == ["Bake", False, "A", "a", False, "[dim]$[/]", "[dim]$[/]"]
    assert "both are one line of help;" in bake.__doc__

"""Two small sets of conversations to train adapters on: answers as haiku, and answers as JSON. The texts are our own.

python scripts/adapter_styles.py --out styles
outrider train lora --chats styles/haiku.jsonl --out my-haiku
outrider train lora --chats styles/json.jsonl --out my-json
python scripts/adapter_styles.py --check haiku=my-haiku json=my-json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

About = tuple[str, list[str], str, str]
# a thing | its kind | two facts | the first and the last line of a haiku about it
TABLE = """
the sea | water | it covers most of the earth; it is salty | Grey waves come and go | the shore keeps no name
a river | water | it runs downhill; it ends in the sea | Water over stones | never twice the same
rain | weather | it falls from clouds; plants need it | Soft drops on the roof | the garden drinks deep
snow | weather | it is frozen water; it melts in spring | White falls without sound | footprints fill again
wind | weather | it is moving air; it drives mills | Nothing to be seen | yet the tall grass bows
the moon | sky | it goes round the earth; it shines at night | Thin and silver light | the owl turns its head
the sun | sky | it is a star; it warms the earth | Gold upon the hill | even stones are warm
a star | sky | it burns far away; sailors steer by it | One small point of fire | older than all words
a cat | animal | it hunts mice; it sleeps a lot | Paws beneath the chin | the mouse may walk by
a dog | animal | it guards the house; it likes to run | Mud upon the floor | that tail will not rest
a horse | animal | it eats grass; it can carry people | Breath in morning cold | hooves drum on the road
a bird | animal | it has feathers; most of them fly | A song in the hedge | the sky has no door
a fish | animal | it lives in water; it breathes with gills | Silver turns below | rings spread and are gone
a bee | animal | it makes honey; it visits flowers | Busy in the thyme | summer in a jar
a tree | plant | it has roots; it gives shade | Roots hold on to dark | leaves reach for the day
a rose | plant | it has thorns; it smells sweet | Red behind the wall | the thorn guards its door
grass | plant | cows eat it; it grows in meadows | Green after the rain | the scythe waits its turn
an apple | food | it grows on trees; it can be red or green | Round in the small hand | the whole autumn crunches
bread | food | it is made of flour; it is baked in an oven | Warm smell down the street | the crust breaks and sings
tea | food | it is made of leaves; it is drunk hot | Steam above the cup | the clock slows its step
salt | food | it comes from the sea; it keeps food fresh | White grains on the palm | tears know how it tastes
a house | building | people live in it; it has a roof | Light behind the glass | somebody is home
a bridge | building | it crosses a river; it may be of stone | Two shores join their hands | the water goes on
a door | building | it opens and closes; it may have a lock | Wood between two worlds | a key turns, and waits
a clock | tool | it shows the time; it has two hands | Small teeth bite the hour | noon falls on the floor
a lamp | tool | it gives light; it is lit at night | A ring on the page | the dark stays outside
a book | thing | it has pages; people read it | Dry leaves that still speak | a voice from nowhere
a letter | thing | it is written on paper; it is sent by post | Ink that crossed the sea | her hand on this fold
a boat | vehicle | it floats; it may have sails | Tied to a wet post | it dreams of far coasts
a train | vehicle | it runs on rails; it pulls wagons | Lights along the field | then only the rails
a mountain | land | it is high; snow lies on its top | Cloud around its neck | it has time to wait
a desert | land | it is dry; little grows there | Sand upon more sand | one blue jug of shade
a forest | land | many trees grow there; deer live in it | Green light on the path | something small looks back
winter | season | it is cold; the days are short | Bare twigs on the pane | the stove talks all night
spring | season | flowers open; the days grow long | Mud, and then one bud | the gate will not close
autumn | season | leaves fall; apples are ripe | Smoke above the field | each leaf takes its leave
music | art | it is made of sounds; people dance to it | One string, then silence | the air still leans close
a friend | person | a friend helps; a friend listens | Two cups on the sill | no need for more words
sleep | rest | it comes at night; all animals need it | The lamp is put out | dreams come up the stairs
a road | land | it leads somewhere; carts drive on it | Dust behind the cart | it bends out of sight
"""


def _row(line: str) -> tuple[str, About]:
    thing, kind, facts, first, last = line.split(" | ")
    return thing, (kind, facts.split("; "), first, last)


THINGS = dict(map(_row, TABLE.strip().splitlines()))
ASKED = ("Describe {}.", "Tell me about {}.", "What do you know about {}?", "Say something about {}.")
CHECKS = [
    "Describe a candle.", "Tell me about the city.", "What is a garden?", "Say something about fire.",
    "Describe a stone.", "Tell me about summer.", "What do you know about a wolf?", "Describe a lake.",
]  # fmt: skip


def haiku(thing: str, about: About) -> str:
    _, facts, first, last = about
    return f"{first},\n{facts[0].replace('it ', f'{thing} ', 1)}:\n{last}."


def as_json(thing: str, about: About) -> str:
    return json.dumps({"subject": thing, "kind": about[0], "facts": about[1]})


def write(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, style in {"haiku": haiku, "json": as_json}.items():
        chats = [
            {"prompt": asked.format(thing), "answer": style(thing, about)}
            for number, (thing, about) in enumerate(THINGS.items())
            for asked in (ASKED[number % 4], ASKED[(number + 1) % 4])
        ]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def is_haiku(text: str) -> bool:
    lines = text.strip().split("\n")
    return len(lines) == 3 and all(2 <= len(line.split()) <= 9 for line in lines)


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def check(paths: dict[str, str], model: str) -> None:
    """Eight questions that were not trained on, with each adapter and with none, in one batch."""
    from outrider import LLM, SamplingParams

    styles = {"haiku": is_haiku, "json": is_json}
    with LLM(model, adapters=paths) as llm:
        names = ["", *paths]
        asked = [[{"role": "user", "content": text}] for text in CHECKS for _ in names]
        results = llm.chat(asked, SamplingParams(max_tokens=96), adapter=names * len(CHECKS))
    for name in names:
        texts = [result.text for result in results[names.index(name) :: len(names)]]
        found = {style: sum(map(test, texts)) for style, test in styles.items()}
        kept = [r.stats for r in results[names.index(name) :: len(names)]]
        passes = sum(each.steps for each in kept)
        print(json.dumps({"adapter": name or "none", "of": len(texts), **found}))
        print(json.dumps({"tokens per pass": round(sum(each.tokens for each in kept) / passes, 2), "first": texts[0]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--check", nargs="+", default=[], metavar="NAME=PATH")
    given = parser.parse_args()
    if given.out:
        write(given.out)
    if given.check:
        check(dict(each.split("=", 1) for each in given.check), given.model)


if __name__ == "__main__":
    main()

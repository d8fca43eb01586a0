"""Two small sets of conversations to train adapters on: answers as haiku, and answers as JSON. The texts are our own.

python scripts/adapter_styles.py --out styles
outrider train lora --chats styles/haiku.jsonl --out my-haiku
outrider train lora --chats styles/json.jsonl --out my-json
python scripts/adapter_styles.py --check haiku=my-haiku json=my-json
python scripts/adapter_styles.py --check haiku=my-haiku json=my-json --peft

`--check` prints the answers to eight questions that were not trained on, with each adapter and with none, and how many
are in a style. `--peft`: token by token against PEFT on transformers, both in float32.
"""

from __future__ import annotations

import argparse
import contextlib
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
a cloud | sky | it is made of tiny drops; it drifts with the wind | Slow ship without sails | its shade crosses fields
fog | weather | it lies close to the ground; it hides the road | The world has gone pale | a bell, but no tower
thunder | weather | it follows lightning; it can be heard for miles | A drum past the hills | the dog leaves the room
ice | water | it is frozen water; it floats | Glass upon the pond | a leaf held in time
a frog | animal | it lives near ponds; it catches flies | Green eyes and no haste | one splash, then silence
a fox | animal | it hunts at night; it lives in a den | Red along the hedge | the hens hold their breath
an owl | animal | it sees in the dark; it flies without a sound | Two moons in a barn | the night asks who comes
a snail | animal | it carries its house; it moves slowly | Bright thread on the path | no hurry, no door
a spider | animal | it spins a web; it has eight legs | Pearls on every string | the weaver sits still
a butterfly | animal | it was a caterpillar; it drinks from flowers | Paper in the wind | it has lost its way
a cow | animal | it gives milk; it eats grass | Chewing the whole noon | the fence is enough
a sheep | animal | it gives wool; it lives in a flock | A cloud with four feet | the shepherd counts on
a mouse | animal | it is small; it likes grain | Two crumbs, and it runs | the wall has an ear
an ant | animal | it can carry heavy loads; it lives in a colony | A grain on its back | the queen never knows
a whale | animal | it lives in the sea; it breathes air | A hill that goes down | the song travels far
a swan | animal | it is white; it swims on lakes | White on the black pond | its feet work unseen
an oak | plant | it grows old; it bears acorns | Two hundred summers | the acorn says less
a mushroom | plant | it grows in damp woods; some are poisonous | One hat in the moss | by noon there are nine
a pear | food | it grows on trees; it is sweet when ripe | Yellow on the sill | the wasp was first here
a cherry | food | it is small and red; it has a stone | Red pairs on the ear | the ladder still leans
an onion | food | it has many layers; it makes eyes water | Skin beneath the skin | the cook wipes her eyes
honey | food | it is made by bees; it is sweet | Gold runs from the spoon | June is on the bread
milk | food | it comes from cows; it is white | White moon in a bowl | the cat knows the hour
soup | food | it is cooked in a pot; it is eaten hot | Steam on the window | five spoons, and no word
rice | food | it grows in wet fields; half the world eats it | Green rows in still sky | the bowl is enough
an egg | food | it has a shell; a bird laid it | A room with no door | someone knocks within
a tower | building | it is high; one sees far from it | Steps, and then more steps | the whole town is small
a window | building | it lets light in; it is made of glass | A square of the world | rain writes on it first
a wall | building | it keeps people out; it is built of bricks | Stone says no to stone | ivy says perhaps
a well | building | it gives water; it is deep | The bucket goes down | a star in the round
a mill | building | it grinds grain; wind or water drives it | The wheel turns the day | flour on his eyelids
a key | tool | it opens a lock; it is made of metal | Small teeth made of iron | every door looks up
a knife | tool | it cuts bread; it must be sharp | Thin light on the board | the loaf falls in two
a needle | tool | it carries thread; it mends clothes | In and out of blue | the hole is a seam
a spoon | tool | it is used for soup; it may be of wood | A small boat comes home | the child shuts her mouth
a mirror | thing | it shows your face; it is made of glass | Left hand lifts my right | he is older too
a bell | thing | it rings; it hangs in a tower | Bronze throws out its rings | pigeons leave the roof
a basket | thing | it is woven; it carries fruit | Willow bent to arms | plums look through the holes
a chair | furniture | it has four legs; people sit on it | Four legs that stay home | it waits for your coat
a table | furniture | it has a flat top; families eat at it | Crumbs of the whole day | one knee bumps the wood
a bed | furniture | people sleep in it; it has a pillow | White hills in the dark | the day lies folded
a coat | clothing | it keeps you warm; it has pockets | Winter on a hook | a ticket from May
a shoe | clothing | it protects the foot; it has laces | Mud from seven miles | the tongue says nothing
a bicycle | vehicle | it has two wheels; one must pedal | Two rings and a chain | downhill I am wind
a ship | vehicle | it crosses oceans; it has a captain | Smoke, then just the line | handkerchiefs come down
a wheel | tool | it is round; it makes carts move | No end, no first spoke | the road comes to it
an island | land | water lies all around it; boats go there | Sand with a green heart | the tide counts the days
a valley | land | it lies between hills; a stream runs through it | Mist fills up the bowl | one roof, and one cow
a cave | land | it is dark inside; bats live in it | A mouth in the hill | my own voice comes back
a field | land | farmers plough it; wheat grows there | Brown lines to the edge | crows walk like old men
a hill | land | it is lower than a mountain; children roll down it | Green breath of the ground | the kite goes higher
a beach | land | it is covered with sand; waves reach it | Shells left in a row | the sea takes them back
the night | time | it is dark; most people sleep | Ink fills every lane | one lit window hums
the morning | time | the sun rises; birds begin to sing | Light under the door | the kettle speaks first
the evening | time | the sun sets; lamps are lit | Long shade of the pump | swallows sign the sky
a child | person | a child plays; a child asks questions | Pockets full of stones | each has its own name
a teacher | person | a teacher explains; a teacher works at a school | Chalk dust on the sleeve | one hand goes up slow
a baker | person | a baker makes bread; a baker gets up early | White arms before dawn | the street wakes hungry
a shadow | thing | it follows its owner; it needs light | Flat friend on the wall | at noon it hides well
silence | thing | it is the absence of sound; it can be broken | Snow on a closed book | even clocks hold still
time | thing | it passes; clocks measure it | Sand in a thin waist | the glass is turned once
a dream | thing | it comes in sleep; it is soon forgotten | A house with more rooms | gone before the cup
hope | feeling | it looks to the future; it helps in hard days | A seed under frost | the dark is not long
"""


def _row(line: str) -> tuple[str, About]:
    thing, kind, facts, first, last = line.split(" | ")
    return thing, (kind, facts.split("; "), first, last)


THINGS = dict(map(_row, TABLE.strip().splitlines()))
ASKED = (
    "Describe {}.", "Tell me about {}.", "What do you know about {}?", "Say something about {}.",
    "What is {}?", "Write about {}.", "What comes to your mind when you think of {}?",
)  # fmt: skip
EACH = 3  # questions about each thing
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
            for asked in (ASKED[(number + turn) % len(ASKED)] for turn in range(EACH))
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
    for place, name in enumerate(names):
        own = results[place :: len(names)]
        for prompt, result in zip(CHECKS, own, strict=True):
            print(json.dumps({"adapter": name or "none", "prompt": prompt, "text": result.text}))
    for place, name in enumerate(names):
        own = results[place :: len(names)]
        found = {style: sum(test(result.text) for result in own) for style, test in styles.items()}
        tokens, passes = (sum(getattr(result.stats, what) for result in own) for what in ("tokens", "steps"))
        print(json.dumps({"adapter": name or "none", "of": len(own), **found, "tokens per pass": tokens / passes}))


def compare(paths: dict[str, str], model: str) -> None:
    """The same questions by PEFT and by Outrider's dense model in float32, in one batch."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from outrider import LLM, SamplingParams
    from outrider.models import sources
    from outrider.models.export import as_folder

    folder = as_folder(sources.resolve(model))
    chats = [[{"role": "user", "content": text}] for text in CHECKS]
    names = ["", *paths]
    with LLM(str(folder), draft="none", dtype="float32", device="cpu", adapters=paths) as llm:
        asked = [chat for name in names for chat in chats]
        owners = [name for name in names for _ in chats]
        results = llm.chat(asked, SamplingParams(max_tokens=96), adapter=owners, progress=False)
        words = [llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        prompts = [llm.tokenizer.encode(text, add_special_tokens=False) for text in words]
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(target, paths[names[1]], adapter_name=names[1])
    for name in names[2:]:
        wrapped.load_adapter(paths[name], adapter_name=name)
    for place, name in enumerate(names):
        equal = 0
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            with torch.inference_mode(), wrapped.disable_adapter() if not name else contextlib.nullcontext():
                if name:
                    wrapped.set_adapter(name)
                mask = torch.ones_like(ids)
                theirs = wrapped.generate(input_ids=ids, attention_mask=mask, max_new_tokens=96, do_sample=False)
            ours, found = list(results[place * len(chats) + number].token_ids), theirs[0, ids.shape[1] :].tolist()
            equal += ours == found[: len(ours)] and len(found) - len(ours) <= 1  # the end may be counted, or not
        print(json.dumps({"adapter": name or "none", "of": len(chats), "token by token as PEFT": equal}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--openers", type=Path, help="a file for the beginnings of questions, for train --about")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--check", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument("--peft", action="store_true", help="compare with PEFT in place of printing texts")
    given = parser.parse_args()
    if given.out:
        write(given.out)
    if given.openers:
        given.openers.write_text("".join(f"{asked.partition(' {}')[0]}\n" for asked in ASKED))
    if given.check:
        run = compare if given.peft else check
        run(dict(each.split("=", 1) for each in given.check), given.model)


if __name__ == "__main__":
    main()

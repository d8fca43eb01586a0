"""100 extractions of our own making: a text, a schema of what is to be found in it, and a question. No two texts and no
two schemas are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
}
VALUES: dict[str, tuple[str, ...]] = {
    "person": (
        "Marta Keller",
        "Tomas Lind",
        "Ngozi Adeyemi",
        "Pavel Horak",
        "Ruth Okafor",
        "Silvia Brandt",
        "Ivo Tann",
    ),
    "other": ("Hana Sato", "Leo Marchetti", "Greta Nilsen", "Amir Rahimi", "Bela Kovacs", "Dora Winther"),
    "city": ("Lisbon", "Tartu", "Bergen", "Porto", "Ghent", "Graz", "Cork", "Turku", "Basel"),
    "town": ("Aarhus", "Leiden", "Trento", "Bilbao", "Uppsala", "Krakow"),
    "company": ("Northgate Tools", "Blue Harbour Ltd", "Fennel and Sons", "Quarry Systems", "Larkspur Foods"),
    "date": ("2025-03-14", "2025-07-02", "2024-11-30", "2026-01-19", "2025-09-08", "2024-05-27"),
    "time": ("08:15", "17:40", "12:05", "21:30", "06:50"),
    "small": ("2", "3", "4", "5", "6", "7", "8", "9"),
    "count": ("12", "18", "24", "36", "45", "60", "75"),
    "price": ("19.50", "249.00", "7.25", "1180.00", "64.90", "32.40"),
    "year": ("1998", "2003", "2011", "2017", "1987", "2021"),
    "thing": ("desk lamp", "rain jacket", "coffee grinder", "bicycle pump", "camping stove", "wall clock"),
    "goods": ("oak shelves", "copper pipes", "garden chairs", "paper rolls", "ceramic tiles"),
    "colour": ("green", "black", "yellow", "white", "red"),
    "mail": ("marta@keller.example", "office@quarry.example", "tlind@post.example", "help@larkspur.example"),
    "title": ("The Salt Road", "Winter Orchard", "A Map of Rain", "The Ninth Bridge", "Small Hours"),
    "subject": ("geology", "statistics", "music theory", "organic chemistry", "medieval history"),
    "skill": ("Python", "welding", "bookkeeping", "Spanish", "SQL", "first aid"),
    "food": ("lentil soup", "plum cake", "mushroom risotto", "potato salad", "fish stew"),
    "part": ("onions", "butter", "thyme", "flour", "lemon", "pepper", "honey"),
    "symptom": ("a dry cough", "a sore knee", "headaches", "a rash on the arm", "back pain"),
    "drug": ("ibuprofen", "amoxicillin", "loratadine", "paracetamol"),
    "fault": ("the screen stays black", "the page loads twice", "the export file is empty", "the login times out"),
    "code": ("QX-4471", "BT-209", "LM-8830", "ZR-1174", "HK-562"),
    "tree": ("maple", "birch", "walnut", "pine"),
}

# Each kind: what it is called, its text with the values in braces, and its fields: name:type, or name:value|value with
# ~ for a space.
KINDS: tuple[tuple[str, str, str], ...] = (
    (
        "the invoice",
        "Invoice {code} from {company}, dated {date}. {count} {goods} were delivered to {person} in {city}. The "
        "total is {price} euros and has to be paid within {small} weeks.",
        "number:text seller:text date:text customer:text total:number currency:EUR|USD weeks_to_pay:whole",
    ),
    (
        "the person",
        "{person} was born in {city} in {year}, studied {subject} in {town} and now works for {company}. Mail "
        "reaches her under {mail}. She speaks {small} languages.",
        "full_name:text birth_place:text birth_year:whole studied:text employer:text email:text languages:whole",
    ),
    (
        "the meeting",
        "Hi {person}, can we meet on {date} at {time} in the {colour} room in {city}? {other} will join us by "
        "phone. We need {count} minutes to talk about the {goods}. Please bring the plans.",
        "invited:text date:text time:text place:text by_phone:text minutes:whole bring_plans:flag",
    ),
    (
        "the review",
        "I bought the {thing} in {colour} from {company} {small} months ago. It is sturdy and easy to clean, but "
        "the cable is too short. For {price} euros I would buy it again. {small} stars. Written by {person}.",
        "product:text colour:text shop:text price:number opinion:positive|neutral|negative author:text "
        "good_points:list",
    ),
    (
        "the job offer",
        "{company} in {city} is looking for a technician with experience in {skill} and {subject}. The post is "
        "full time, pays {price} euros an hour and begins on {date}. Write to {mail}.",
        "company:text location:text position:text skills:list hours:full~time|part~time pay:number start:text "
        "contact:text",
    ),
    (
        "the recipe",
        "For {small} people, {food} takes {count} minutes. You need {part}, two carrots and some salt. Cook "
        "everything slowly and serve it warm. It keeps for {small} days. From the kitchen of {person}.",
        "dish:text people:whole minutes:whole ingredients:list served:warm|cold cook:text",
    ),
    (
        "the flight",
        "Flight {code} leaves {city} at {time} on {date} and lands in {town} {small} hours later. Passenger "
        "{person} has seat {count}C and one suitcase. The gate closes 20 minutes before.",
        "flight:text from:text to:text departure:text date:text passenger:text seat:text suitcases:whole",
    ),
    (
        "the patient's note",
        "{person}, {count} years old, came on {date} with {symptom} since {small} days. No fever. Takes {drug} "
        "twice a day. To be seen again in {small} weeks by Dr {other}.",
        "patient:text age:whole visit:text complaint:text fever:flag medicine:text doctor:text",
    ),
    (
        "the weather report",
        "In {city} the morning of {date} begins with fog. By {time} the sun comes out, and it gets {count} "
        "degrees warm. In {town} rain falls all day. Wind from the west, {small} on the scale.",
        "city:text date:text morning:text highest_degrees:whole rain_in:text wind_from:north|east|south|west "
        "wind_force:whole",
    ),
    (
        "the book",
        "{title} by {person} appeared in {year} with {company} and has {count}0 pages. It tells of two sisters "
        "from {city} who inherit a mill. The paperback costs {price} euros.",
        "title:text author:text year:whole publisher:text pages:whole setting:text binding:paperback|hardcover "
        "price:number",
    ),
    (
        "the flat",
        "To let in {city}: a flat of {small} rooms and {count} square metres on the third floor, built in {year}. "
        "Rent {price} euros a week, pets allowed, no balcony. Free from {date}. Call {person}.",
        "city:text rooms:whole square_metres:whole floor:whole rent:number pets:flag balcony:flag free_from:text "
        "contact:text",
    ),
    (
        "the support ticket",
        "Ticket {code}: {person} of {company} writes on {date} that {fault} since the last update. It happens "
        "{small} times a day on both computers. Very urgent. Assigned to {other}.",
        "ticket:text reporter:text company:text problem:text times_a_day:whole priority:low|medium|high|urgent "
        "assignee:text",
    ),
    (
        "the match",
        "{city} beat {town} {small} to 1 on {date}. {person} scored twice before half-time, {other} saved a "
        "penalty in minute {count}. About {count}00 people came.",
        "winner:text loser:text date:text scorer:text goalkeeper:text penalty_minute:whole spectators:whole",
    ),
    (
        "the order",
        "Order {code} for {person}: {small} pieces of the {thing} in {colour}, {price} euros each. Send it to "
        "Mill Street {count}, {city}. Gift wrapping yes, express no. Questions to {mail}.",
        "order:text customer:text item:text pieces:whole colour:text street:text city:text gift:flag express:flag",
    ),
    (
        "the course",
        "The evening course in {subject} starts on {date} at {time} and runs for {small} weeks in {city}. "
        "{person} teaches it. At most {count} people can join; the fee is {price} euros. No earlier knowledge is "
        "needed.",
        "subject:text start:text time:text weeks:whole teacher:text places:whole fee:number level:beginner|advanced",
    ),
    (
        "the film",
        "{title} ({year}, {count} minutes) was shot in {city}. {person} directed it, {other} plays a lonely "
        "lighthouse keeper. It won {small} prizes and is in black and white.",
        "title:text year:whole minutes:whole shot_in:text director:text actor:text prizes:whole in_colour:flag",
    ),
    (
        "the delivery",
        "Parcel {code} with {goods} left {company} in {city} on {date}. It weighs {price} kg. The driver {person} "
        "could not find the address in {town} and will try again at {time}.",
        "parcel:text contents:text sender:text weight_kg:number driver:text status:delivered|on~its~way|failed "
        "next_try:text",
    ),
    (
        "the tree",
        "The old {tree} beside the town hall of {city} was planted in {year} by {person}. It is {small} metres "
        "round and {count} metres high. The council of {town} wants to cut it, {other} is against it.",
        "kind:text place:text planted:whole planted_by:text girth:whole height:whole opponent:text",
    ),
    (
        "the contract",
        "{company}, represented by {person}, lends {other} of {city} a machine for {goods} from {date} on for "
        "{small} months. The rent is {price} euros a month. Both sides can end the contract with {count} days of "
        "notice.",
        "lender:text signed_by:text borrower:text object:text begin:text months:whole monthly_rent:number "
        "notice_days:whole",
    ),
    (
        "the workshop",
        "The bicycle of {person} (frame {code}, {colour}, {year}) needs a new chain and brakes. {other} has "
        "ordered {small} parts from {company}; they come on {date}. It will cost about {price} euros.",
        "owner:text frame:text colour:text built:whole repairs:list mechanic:text supplier:text estimate:number",
    ),
)
EACH = 5  # texts of a kind


@dataclass(frozen=True)
class Extraction:
    text: str
    schema: dict[str, Any]
    question: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


def extractions() -> Iterator[Extraction]:
    for turn in range(EACH):
        for number, (what, form, named) in enumerate(KINDS):
            yield _made(what, form, named, turn, random.Random(1000 * turn + number))


def _made(what: str, form: str, named: str, turn: int, choice: random.Random) -> Extraction:
    text = form.format(**{name: choice.choice(values) for name, values in VALUES.items()})
    fields = {name: _schema(kind) for name, _, kind in (each.partition(":") for each in named.split())}
    left_out = list(fields)[-turn] if turn else ""  # so that no two schemas are the same
    properties = {_named(name, turn): value for name, value in fields.items() if name != left_out}
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip
    told = ", ".join(f"{name} ({_told(value)})" for name, value in properties.items())
    question = f"Read this text:\n\n{text}\n\nAnswer with a JSON object that describes {what}. Its fields are {told}."
    return Extraction(text, schema, question)


def _schema(kind: str) -> dict[str, Any]:
    return TYPES[kind] if kind in TYPES else {"enum": kind.replace("~", " ").split("|")}


def _named(name: str, turn: int) -> str:
    """Some people write keys in one way, and some in another."""
    first, *others = name.split("_")
    return name if turn % 2 == 0 else first + "".join(word.capitalize() for word in others)


def _told(value: dict[str, Any]) -> str:
    return f"one of {json.dumps(value['enum'])}" if "enum" in value else f"{value['type']}"

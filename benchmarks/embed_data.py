"""Sentences for the tiny embedder: events told in many words, so that sentences of one meaning are pairs to train on.

An `Event` is who did what to which thing, where and when, as numbers of concepts. `tell` writes it with a template and one of
each concept's words; two tellings mean the same. Held-out templates and words are in no sentence of training: `scored_pairs`
takes each template from the held-out ones, and at least one word of each event. Pure Python, no I/O.
"""

# ruff: noqa: SIM905 (a list of words reads best as words)
import hashlib
from typing import NamedTuple

from tiny_words import CITIES, NAMES, OTHER_CITIES, SURNAMES

# Each line is a concept: its words, all of one meaning.
AGENTS = """
the teacher|the instructor|our schoolmaster;the doctor|the physician|the medical man;the boy|the young lad|the little fellow
the girl|the young lady|the lass;the farmer|the man from the farm|the grower;the policeman|the police officer|the cop
the driver|the man at the wheel|the chauffeur;the writer|the author|the novelist;the lawyer|the attorney|the solicitor
the boss|the manager|the head of the company;the thief|the robber|the burglar;the soldier|the trooper|the fighter
the child|the kid|the youngster;the old man|the elderly gentleman|grandfather;the old woman|the elderly lady|grandmother
the mother|mom|mum;the father|dad|daddy;the students|the pupils|the learners;the king|the ruler|the monarch
the sailor|the seaman|the mariner;the cook|the chef|the man in the kitchen;the scientist|the researcher|the scholar
the neighbor|the man next door|the person living nearby;the guests|the visitors|the company
the workers|the employees|the staff;the team|the players|the squad;the dog|the hound|the puppy;the cat|the kitten|the kitty
the family|the relatives|the household;the journalist|the reporter|the newsman;the nurse|the hospital attendant
the painter|the artist;the tourist|the traveler;the shopkeeper|the store owner|the merchant;the mayor|the head of the city
the priest|the clergyman|the pastor
"""
ACTIONS = """
bought|purchased|paid for;sold|got rid of for money|found a buyer for;stole|took without asking|ran off with
repaired|fixed|mended;broke|smashed|damaged;found|discovered|came across;lost|mislaid|could not find any more
built|constructed|put together;painted|put color on|decorated;cleaned|washed|scrubbed;carried|transported|brought along
hid|concealed|put out of sight;threw away|discarded|put in the trash;borrowed|took on loan|asked to use
gave away|donated|made a present of;described|talked about|spoke of;photographed|took a picture of|made a photo of
watched|looked at|observed;forgot|left behind|did not remember;ordered|asked for|requested;opened|unlocked|undid
closed|shut|locked up;burned|set on fire|destroyed in flames;drew|sketched|made a drawing of;measured|took the size of
bought back|regained|recovered;praised|spoke well of|admired;hated|disliked|could not stand;loved|adored|was very fond of
studied|examined|looked into;dropped|let fall|let go of;lifted|raised|picked up;copied|imitated|made a copy of
counted|numbered|added up;collected|gathered|brought together;showed|presented|displayed;wrapped|packed up|covered in paper
"""
THINGS = """
a car|an automobile|a motor vehicle;a bicycle|a bike|a two-wheeler;a house|a home|a dwelling;a boat|a small ship|a vessel
a plane|an airplane|an aircraft;a gift|a present|a surprise package;a picture|an image|a painting;a book|a novel|a volume
a letter|a written message|a note;a computer|a laptop|a pc;a phone|a telephone|a mobile;a stone|a rock|a boulder
a coat|a jacket|a warm overgarment;a hat|a cap|something for the head;shoes|boots|footwear;a meal|a dinner|food
bread|a loaf|baked goods;sweets|candy|chocolate;money|cash|banknotes;gold|jewels|treasure;a knife|a blade|something sharp
a chair|a seat|a stool;a sofa|a couch|a settee;a bed|a mattress|a place to sleep;a lamp|a light|a lantern
a bag|a sack|a backpack;a box|a chest|a crate;a newspaper|a daily paper|the press;a film|a movie|a motion picture
a song|a melody|a tune;flowers|blossoms|a bouquet;a tree|an oak|a trunk;a horse|a pony|a stallion
a bird|a sparrow|a feathered animal;a fish|a trout|a salmon;a map|a chart|a plan of the area;a clock|a watch|a timepiece
a ring|a wedding band;a door|an entrance|a gate;a window|a pane of glass;a wall|a stone fence|a barrier
medicine|pills|a remedy;a machine|an engine|a motor;a ball|a football;tools|equipment|instruments;a bottle|a flask|a jug
coffee|espresso|a hot drink;wine|an alcoholic drink;a key|an opener for locks;glasses|spectacles|eyewear
a blanket|a warm cover;a carpet|a rug|a floor covering;a mirror|a looking glass;a toy|a plaything
"""
PLACES = """
in the forest|in the woods|among the trees;at the sea|by the ocean|on the coast;in the city|downtown|in the middle of town
in the village|in a small settlement|in the countryside;at school|in the classroom|during lessons
at the office|at work|at the desk;in the hospital|at the clinic|on the ward;in the garden|in the backyard|on the lawn
at the market|in the bazaar|between the stalls;in the shop|in the store|at the retailer
on the road|on the street|on the highway;at the station|on the platform|next to the trains
at the airport|in the terminal|near the runway;on the mountain|on the peak|high up in the hills
by the river|at the stream|near the brook;in the church|in the cathedral|in the chapel;in prison|in jail|behind bars
at the hotel|at the inn|in the guest house;in the restaurant|in the dining place|at the cafe
in the library|among the bookshelves;in the cellar|in the basement|below the house
in the attic|under the roof|at the top of the house;on the farm|in the stable|in the barn;in the museum|at the exhibition
at the harbor|in the port|at the docks;on the bridge|over the water;in the desert|in the dry sands;in the park|on the green
"""
TIMES = """
yesterday|the day before today;last week|seven days ago;last year|twelve months ago|a year ago
in the morning|at dawn|early in the day;in the evening|at sunset|late in the day;at night|in the dark|after midnight
at noon|at midday|at lunchtime;in summer|in the hot season;in winter|in the cold season;in spring|when everything blooms
in autumn|in the fall|when leaves drop;on the weekend|on saturday or sunday;a long time ago|in the distant past|ages ago
recently|not long ago|lately;during the war|while the fighting lasted;on a holiday|while on vacation
during the storm|in the bad weather|in heavy rain and wind;after work|when the job was done;every day|daily|each day
once a month|monthly;for the first time|never before;again|once more|another time;in secret|secretly
quickly|in a hurry|at great speed;slowly|without haste|taking time;by mistake|accidentally|without meaning to
"""
TEMPLATES = (
    "{a} {v} {o} {p} {t}.",
    "{t}, {a} {v} {o} {p}.",
    "{p}, {a} {v} {o} {t}.",
    "{a} {v} {o} {t} {p}",
    "it was {a} who {v} {o} {p} {t}.",
    "i heard that {a} {v} {o} {p} {t}.",
    "did you know that {t} {a} {v} {o} {p}?",
    "{t} {p} {a} {v} {o}.",
    "what {a} {v} {p} {t} was {o}.",
    "everyone says that {a} {v} {o} {t}, {p}.",
    "{a}, {p}, {v} {o} {t}.",
    "i saw how {a} {v} {o} {p} {t}.",
    "there is a story that {a} {t} {v} {o} {p}.",
    "we were told: {a} {v} {o} {p} {t}!",
    "is it true that {a} {v} {o} {p} {t}?",
)
HELD_OUT_TEMPLATES = (
    "according to witnesses, {a} {t} {v} {o} {p}.",
    "{o}: that is the thing which {a} {v} {p} {t}.",
    "rumor has it {p} {a} {v} {o} {t}.",
    "nobody believed it, but {t} {a} {v} {o} {p}.",
    "somebody noticed {p} {t} that {a} {v} {o}.",
)
HELD_OUT_ONE_IN = 6
STARTS = "b bl br c ch cl d dr f fl g gr h j k kr l m n p pl qu r s sh st t th tr v w z".split()
MIDDLES = "a e i o u ai ea oo ar er in on an el or un".split()
ENDS = "b ck d g l m n nd p r rt s sk st t th x y o a".split()


def concepts(block: str) -> list[list[str]]:
    return [each.split("|") for line in block.strip().splitlines() for each in line.split(";")]


def is_held_out(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % HELD_OUT_ONE_IN == 0


class Slot:
    """The concepts of one part of an event, and those with words that no sentence of training has."""

    def __init__(self, block: str, more: tuple[str, ...] = ()) -> None:
        given = concepts(block)
        # Concepts of one word may be held out: another word for an unseen one cannot be known.
        self.words = [*given, *([word] for word in more if not is_held_out(word))]
        self.held_out = [[word] for word in more if is_held_out(word)]

    def draw(self, rng) -> list[str]:
        return rng.choice(self.words)


_MORE_THINGS = tuple(
    (
        "a zebra,a camel,an elephant,a monkey,a turtle,a frog,a snake,a violin,a piano,a guitar,a drum,a flute,a trumpet,"
        "a harp,a hammer,a ladder,a shovel,an axe,a carrot,a potato,an onion,a cabbage,an apple,a banana,a pear,a lemon,"
        "a cherry,a mango,a scarf,a glove,a tractor,a rocket,a tent,a candle,a pillow,a bucket,a basket,a needle,a ticket,"
        "a flag,a statue,a bell,a helmet,a sword,a shield,a telescope,a microscope,a typewriter,a refrigerator,"
        "an umbrella,a compass,a magnet,a balloon,a puzzle,a diary,a passport"
    ).split(",")
)
_TOWNS = tuple(f"in {city}" for city in (*CITIES, *OTHER_CITIES))
_PEOPLE = tuple(sorted({name.lower() for name in NAMES} | {f"mr {name.lower()}" for name in SURNAMES}))
SLOTS = {
    "a": Slot(AGENTS, _PEOPLE),
    "v": Slot(ACTIONS),
    "o": Slot(THINGS, _MORE_THINGS),
    "p": Slot(PLACES, tuple(town.lower() for town in _TOWNS)),
    "t": Slot(TIMES),
}


class Event(NamedTuple):
    """The words of each part: a list of those that mean the same."""

    a: list[str]
    v: list[str]
    o: list[str]
    p: list[str]
    t: list[str]


def new_word(rng) -> str:
    """A word that no language has: a model that reads words by their letters can tell such words apart."""
    return "".join(rng.choice(STARTS) + rng.choice(MIDDLES) for _ in range(rng.choice((1, 1, 2)))) + rng.choice(ENDS)


def event(rng) -> Event:
    parts = {name: slot.draw(rng) for name, slot in SLOTS.items()}
    if rng.random() < 0.35:  # some part is called by a new word
        name, form = rng.choice((("a", "{}"), ("o", "a {}"), ("p", "in {}"), ("a", "mr {}"), ("o", "the {}")))
        parts[name] = [form.format(new_word(rng))]
    return Event(**parts)


def similar(rng, given: Event) -> Event:
    """An event that differs from the given one in one part or two."""
    changed = rng.sample("avopt", rng.choice((1, 2)))
    return given._replace(**{name: SLOTS[name].draw(rng) for name in changed})


def held_out_event(rng) -> Event:
    """An event with a word, or two, that are in no sentence of training."""
    found = event(rng)
    names = rng.sample("aop", rng.choice((1, 2)))
    return found._replace(**{name: rng.choice(SLOTS[name].held_out) for name in names})


def tell(rng, given: Event, templates=TEMPLATES, other: dict[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """(a sentence, the words it took). other: words that another telling took, and this one does not if there are more."""
    taken = {}
    for name, words in given._asdict().items():
        choices = [word for word in words if word != (other or {}).get(name)] or words
        taken[name] = rng.choice(choices)
    sentence = rng.choice(templates).format(**taken)
    return (sentence[0].upper() + sentence[1:] if rng.random() < 0.7 else sentence), taken


def pair(rng, given: Event, templates=TEMPLATES) -> tuple[str, str]:
    """Two sentences of one meaning, in other words where there are some."""
    first, words = tell(rng, given, templates)
    return first, tell(rng, given, templates, words if rng.random() < 0.8 else None)[0]


def scored_pairs(rng, count: int) -> list[tuple[str, str]]:
    """(a sentence, its paraphrase) of `count` events: templates that training does not have, another word for each part."""
    found = []
    for _ in range(count):
        given = held_out_event(rng)
        first, words = tell(rng, given, HELD_OUT_TEMPLATES)
        found.append((first, tell(rng, given, HELD_OUT_TEMPLATES, words)[0]))
    return found


def bag_of_words_score(pairs: list[tuple[str, str]]) -> float:
    """The share of paraphrases that a search by common words, by cosine, gives their sentence: a model should beat it."""
    bags = [set(first.lower().replace(",", " ").replace(".", " ").split()) for first, _ in pairs]
    right = 0
    for i, (_, second) in enumerate(pairs):
        words = set(second.lower().replace(",", " ").replace(".", " ").split())
        scores = [len(words & bag) / (len(words) * len(bag)) ** 0.5 for bag in bags]
        right += max(range(len(scores)), key=scores.__getitem__) == i
    return right / len(pairs)

"""The tiny model's function calls: well-known and made-up functions, and the right call or, where more is asked for, calls.

A question that names several values for one function (two cities, three rooms), or that asks for two things, has a call for
each, in the order of the question.
"""

# ruff: noqa: SIM905 (a list of words reads best as words)
import json
import re
from dataclasses import dataclass

from tiny_tasks import (
    FIELDS,
    Item,
    fields,
    spoken,
)
from tiny_words import (
    AND_ALSO,
    CAPITALS,
    CITIES,
    DAYS,
    NAMES,
    OTHER_CITIES,
    THREE_VALUES,
    TWO_SENTENCES,
    TWO_VALUES,
    WITH_AND_WITH,
    WORDS,
    phrase,
)


def clock(rng):
    return f"{rng.randrange(24):02d}:{rng.choice((0, 15, 30, 45, rng.randrange(60))):02d}"


def city(rng):
    """Mostly a capital; sometimes another city, or a capital with its country, which is still one place."""
    pick = rng.random()
    if pick < 0.04:
        country, capital = rng.choice(tuple(CAPITALS.items()))
        return f"{capital}, {country.removeprefix('the ')}"
    return rng.choice(OTHER_CITIES if pick < 0.2 else CITIES)


def some_words(rng):
    words = rng.sample(WORDS, rng.choice((2, 3)))
    return (" and " if len(words) == 2 and rng.random() < 0.15 else " ").join(words)


SLOTS = {
    "city": city,
    "time": clock,
    "day": lambda rng: rng.choice(DAYS),
    "name": lambda rng: rng.choice(NAMES),
    "word": lambda rng: rng.choice(WORDS),
    "words": some_words,
    "room": lambda rng: rng.choice("kitchen office garden bedroom bathroom hall".split()),
    "language": lambda rng: rng.choice("French German Spanish Italian Japanese Greek Polish Dutch".split()),
    "number": lambda rng: rng.randrange(1, 1000),
    "small": lambda rng: rng.randrange(1, 61),
}
# names | description | parameters = slots, then ways to ask; "/" separates alternatives, so that the schema must be read.
# A question may name several values of a slot with "+", for a call each.
TOOLS = """
    get_weather/get_current_weather/weather | Get the weather in a city. | city/location/place=city+
    What is the weather in {0}?; What's the weather like in {0}?; How is the weather in {0}?; Weather in {0};
    Is it raining in {0}?; Tell me the weather in {0}.; What is the weather in {0} today?

    get_time/current_time/get_local_time | Get the local time in a city. | city/location/place=city+
    What time is it in {0}?; What is the time in {0}?; Tell me the time in {0}.; Current time in {0}

    set_alarm/create_alarm | Set an alarm. | time/at=time+
    Set an alarm for {0}.; Wake me up at {0}.; Please set an alarm at {0}.; I need an alarm for {0}.

    set_timer/start_timer | Start a timer. | minutes/duration=small+
    Set a timer for {0} minutes.; Start a timer of {0} minutes.; Timer for {0} minutes; Remind me in {0} minutes.

    send_message/send_text | Send a message to a person. | to/recipient=name+ text/message=words
    Send a message to {0}: {1}; Text {0}: {1}; Send {0} the message {1}; Tell {0}: {1}

    search/search_web/web_search | Search the web. | query/q=words
    Search for {0}.; Search the web for {0}.; Look up {0}.; Find pages about {0}.

    translate/translate_text | Translate a word. | text/word=word+ language/target=language+
    Translate {0} to {1}.; Translate the word {0} into {1}.; How do you say {0} in {1}?; What is {0} in {1}?

    add_event/create_event | Add an event to the calendar. | title/name=word day/date=day time/start=time
    Add {0} on {1} at {2} to my calendar.; Create an event {0} on {1} at {2}.; Put {0} in the calendar for {1} at {2}.;
    Schedule {0} for {1} at {2}.

    turn_on_light/light_on | Turn on the light in a room. | room=room+
    Turn on the light in the {0}.; Switch on the {0} light.; Light on in the {0}; Turn the {0} light on.

    turn_off_light/light_off | Turn off the light in a room. | room=room+
    Turn off the light in the {0}.; Switch off the {0} light.; Light off in the {0}; Turn the {0} light off.

    get_distance/distance | Get the distance between two cities. | origin/from=city destination/to=city
    How far is it from {0} to {1}?; What is the distance from {0} to {1}?; Distance between {0} and {1};
    How far is {1} from {0}?

    book_flight/find_flight | Book a flight. | origin/from=city destination/to=city day/date=day
    Book a flight from {0} to {1} on {2}.; Find a flight from {0} to {1} on {2}.; I want to fly from {0} to {1} on {2}.;
    On {2} I want to fly from {0} to {1}.

    add_to_cart/buy_item | Put an item in the shopping cart. | item/product=word quantity/amount=small
    Add {1} {0} to my cart.; Buy {1} {0}.; Put {1} {0} in the cart.; I want to buy {1} {0}.

    multiply/multiply_numbers | Multiply two numbers. | a/x=number b/y=number
    Multiply {0} by {1}.; What is {0} times {1}?; Calculate {0} times {1}.; {0} * {1}; What is {0} * {1}?

    set_temperature/set_heating | Set the temperature of a room. | room=room+ degrees/temperature=small
    Set the {0} to {1} degrees.; Set the temperature in the {0} to {1}.; Heat the {0} to {1} degrees.;
    Make it {1} degrees in the {0}.

    play_song/play_music | Play a song. | song/title=words
    Play {0}.; Play the song {0}.; I want to hear {0}.; Please play {0}.

    call_person/phone | Call a person on the phone. | name/person=name+
    Call {0}.; Phone {0}.; Please call {0} now.; I want to talk to {0}.

    get_user/find_user | Look up a user by number. | id/user_id=number+
    Find user {0}.; Look up user {0}.; Who is user {0}?; Show me user number {0}.
""".strip().split("\n\n")
VERBS = "get set find make add open close send start stop show read write update delete check create move".split()
OPTIONAL = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
    ("units", {"type": "string", "description": "The units."}),
    ("limit", {"type": "integer"}),
    ("verbose", {"type": "boolean"}),
    ("format", {"type": "string", "description": "The format of the answer."}),
    ("language", {"type": "string"}),
)
TYPES = {int: "integer", str: "string", bool: "boolean"}


def schema(rng, name, description, values):
    """An OpenAI tool for a function with parameters of the types of `values`."""
    properties = {key: {"type": TYPES[type(value)]} for key, value in values.items()}
    if rng.random() < 0.4:
        for key in properties:
            properties[key]["description"] = rng.choice((f"The {key}.", f"The {key}", f"the {key} to use", key.capitalize()))
    required = list(properties)
    if rng.random() < 0.2:  # an optional parameter, which the call omits
        key, value = rng.choice(OPTIONAL)
        properties.setdefault(key, dict(value))
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    if rng.random() < 0.1:
        del function["description"]
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Known:
    """A function by one of its names, with {parameter: slot} and its ways to ask; `listed` are the slots with "+"."""

    name: str
    description: str
    slots: dict
    listed: tuple
    asks: tuple

    def values(self, rng):
        return {key: SLOTS[slot](rng) for key, slot in self.slots.items()}


def known(rng, row):
    head, asks = row.split("\n", 1)
    names, description, parameters = (part.strip() for part in head.split("|"))
    slots, listed = {}, []
    for index, parameter in enumerate(parameters.split()):
        aliases, slot = parameter.split("=")
        slots[rng.choice(aliases.split("/"))] = slot.removesuffix("+")
        listed += [index] * slot.endswith("+")
    name = rng.choice(names.split("/"))
    return Known(name, description, slots, tuple(listed), tuple(ask.strip() for ask in asks.split(";")))


def numbered(values, letter="s"):
    return {f"{letter}{i}": value for i, value in enumerate(values.values())}


def lettered(ask, letter):
    """The slots {0}, {1} of a way to ask as {s0}, {s1}: two such texts with their own letters can be joined."""
    return ask.replace("{", "{" + letter)


def known_function(rng, row):
    function = known(rng, row)
    values = function.values(rng)
    question = phrase(rng, lettered(rng.choice(function.asks), "s"), **numbered(values))
    return function.name, function.description, values, question


def made_up_function(rng):
    """A made-up function: verb_noun, with any fields; the user names it."""
    verb, noun, values = rng.choice(VERBS), rng.choice(WORDS), fields(rng, rng.choice((1, 1, 2, 2, 3)))
    name = f"{verb}_{noun}"
    core = rng.choice(
        (
            "Call {f} with {x}.",
            "Use {f} with {x}",
            "Please call {f} with {x}.",
            "Run {f} with {x}",
            "Use the function {f} with {x}.",
        )
    )
    return name, f"{verb.capitalize()} the {noun}.", values, phrase(rng, core, f=name, x=spoken(rng, values))


def offered(rng, tools):
    """{name: tool} in any order."""
    order = list(tools.values())
    rng.shuffle(order)
    return tuple(order)


def function_set(rng):
    """(name, values, question, tools): one function to call among zero to three others, in any order."""
    rows = rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3, 4)))
    functions = [made_up_function(rng) if rng.random() < 0.2 else known_function(rng, row) for row in rows]
    tools = {name: schema(rng, name, description, values) for name, description, values, _ in functions}
    name, _, values, question = functions[0]
    if len(tools) < len(functions):
        return function_set(rng)
    return name, values, question, offered(rng, tools)


def written(call):
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def function_call(rng):
    name, values, question, tools = function_set(rng)
    call = {"name": name, "arguments": values}
    return Item("call", "call " + json.dumps(call), question, written(call), tools, (call,))


# ---------------------------------------------------------------- several calls


def several_values(rng, function):
    """([values of each call], question): one way to ask, with two or three values in a slot that allows it."""
    index, size = rng.choice(function.listed), rng.choice((2, 2, 2, 2, 2, 3))
    key, slot = tuple(function.slots.items())[index]
    named = []
    while len(named) < size:
        value = SLOTS[slot](rng)
        if value not in named and not (size > 2 and ", " in str(value)):  # "Rome, Paris and Oslo" are three places
            named.append(value)
    values = function.values(rng)
    core, filled = lettered(rng.choice(function.asks), "s"), numbered(values) | dict(zip("xyz", named, strict=False))
    slot = f"{{s{index}}}"
    before = re.search(r"((?:(?:in|at|for|to|into|of) )?(?:the )?)" + re.escape(slot), core)[1]
    if size == 2 and len(function.slots) == 1 and rng.random() < 0.25:
        core = core.replace(slot, "{x}") + ("" if core[-1] in "?." else rng.choice((".", "?"))) + " " + rng.choice(AND_ALSO)
    else:
        core = core.replace(slot, rng.choice(THREE_VALUES if size > 2 else TWO_VALUES))
    core = core.replace("{p}", rng.choice((before, before.split(" ", 1)[-1], "")))
    return [values | {key: value} for value in named], phrase(rng, core, **filled)


def two_questions(rng, first, second):
    """([values of each call], question) for two functions, or for one twice: two ways to ask, joined."""
    a, b = first.values(rng), second.values(rng)
    asks = [rng.choice(function.asks) for function in (first, second)]
    if first.name != second.name and [*first.slots.values(), *second.slots.values()] == ["city", "city"] and rng.random() < 0.4:
        b = dict(zip(b, a.values(), strict=True))  # the same city
        if rng.random() < 0.5:
            asks[1] = asks[1].replace("in {0}", "there")
    if a == b and first.name == second.name:
        return two_questions(rng, first, second)
    left, right = lettered(asks[0], "a"), lettered(asks[1], "b")
    follows = right if right.startswith("I ") else right[0].lower() + right[1:]
    if "words" in first.slots.values() or rng.random() < 0.4:  # free text would not end at an "and"
        left += "" if left[-1] in "?." else "."
        core = rng.choice(TWO_SENTENCES).replace("{l}", left).replace("{r}", right).replace("{f}", follows)
    else:
        core = left.rstrip("?.") + rng.choice((" and ", " and ", ", and ", ", then ", " and then ", " and also ")) + follows
    return [a, b], phrase(rng, core, **numbered(a, "a"), **numbered(b, "b"))


def made_up_twice(rng):
    """(function, [values of each call], question): a made-up function, which the user names, with the same fields twice."""
    name, description, values, _ = made_up_function(rng)
    values = dict(tuple(values.items())[:2])
    again = {key: renewed(rng, key, value) for key, value in values.items()}
    if again == values:
        return made_up_twice(rng)
    question = phrase(rng, rng.choice(WITH_AND_WITH), f=name, x=spoken(rng, values), y=spoken(rng, again))
    return Known(name, description, {}, (), ()), [values, again], question


def renewed(rng, key, value):
    """Another value of a made-up function's field, of the same type."""
    if key in FIELDS and type(made := FIELDS[key](rng)) is type(value):
        return made
    return rng.choice(WORDS) if isinstance(value, str) else rng.randrange(1000)


def function_calls(rng):
    """Two calls, or three: of one function, or of two, among up to three others."""
    rows, pick = rng.sample(TOOLS, rng.choice((2, 2, 3, 4))), rng.random()
    listed = "=city+" if pick < 0.15 else "+" if pick < 0.5 else ""
    while listed not in rows[0]:
        rows = rng.sample(TOOLS, len(rows))
    first, second, *others = (known(rng, row) for row in rows)
    others = [(f, f.values(rng)) for f in ([second, *others] if rng.random() < 0.6 else others)]
    if pick < 0.5:
        values, question = several_values(rng, first)
        called = [first] * len(values)
    elif pick < 0.6:
        first, values, question = made_up_twice(rng)
        called = [first, first]
    else:
        called = [first, first if pick < 0.8 else second]
        values, question = two_questions(rng, *called)
    calls = tuple({"name": f.name, "arguments": arguments} for f, arguments in zip(called, values, strict=True))
    functions = {f.name: (f, arguments) for f, arguments in (*others, *zip(called, values, strict=True))}
    tools = {name: schema(rng, name, f.description, arguments) for name, (f, arguments) in functions.items()}
    return Item("calls", "calls " + json.dumps(calls), question, "\n".join(map(written, calls)), offered(rng, tools), calls)

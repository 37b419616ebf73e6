"""The tiny model's function calls: well-known and made-up functions, and the one right call."""

# ruff: noqa: SIM905 (a list of words reads best as words)
import json

from tiny_tasks import (
    Item,
    fields,
    spoken,
)
from tiny_words import (
    CITIES,
    DAYS,
    NAMES,
    WORDS,
    phrase,
)


def clock(rng):
    return f"{rng.randrange(24):02d}:{rng.choice((0, 15, 30, 45, rng.randrange(60))):02d}"


SLOTS = {
    "city": lambda rng: rng.choice(CITIES),
    "place": lambda rng: rng.choice(CITIES),
    "time": clock,
    "day": lambda rng: rng.choice(DAYS),
    "name": lambda rng: rng.choice(NAMES),
    "word": lambda rng: rng.choice(WORDS),
    "words": lambda rng: " ".join(rng.sample(WORDS, rng.choice((2, 3)))),
    "room": lambda rng: rng.choice("kitchen office garden bedroom bathroom hall".split()),
    "language": lambda rng: rng.choice("French German Spanish Italian Japanese Greek Polish Dutch".split()),
    "number": lambda rng: rng.randrange(1, 1000),
    "small": lambda rng: rng.randrange(1, 61),
}
# names | description | parameters = slots, then ways to ask; "/" separates alternatives, so that the schema must be read
TOOLS = """
    get_weather/get_current_weather/weather | Get the weather in a city. | city/location/place=city
    What is the weather in {0}?; What's the weather like in {0}?; How is the weather in {0}?; Weather in {0};
    Is it raining in {0}?; Tell me the weather in {0}.; What is the weather in {0} today?

    get_time/current_time/get_local_time | Get the local time in a city. | city/location/place=city
    What time is it in {0}?; What is the time in {0}?; Tell me the time in {0}.; Current time in {0}

    set_alarm/create_alarm | Set an alarm. | time/at=time
    Set an alarm for {0}.; Wake me up at {0}.; Please set an alarm at {0}.; I need an alarm for {0}.

    set_timer/start_timer | Start a timer. | minutes/duration=small
    Set a timer for {0} minutes.; Start a timer of {0} minutes.; Timer for {0} minutes; Remind me in {0} minutes.

    send_message/send_text | Send a message to a person. | to/recipient=name text/message=words
    Send a message to {0}: {1}; Text {0}: {1}; Send {0} the message {1}; Tell {0}: {1}

    search/search_web/web_search | Search the web. | query/q=words
    Search for {0}.; Search the web for {0}.; Look up {0}.; Find pages about {0}.

    translate/translate_text | Translate a word. | text/word=word language/target=language
    Translate {0} to {1}.; Translate the word {0} into {1}.; How do you say {0} in {1}?; What is {0} in {1}?

    add_event/create_event | Add an event to the calendar. | title/name=word day/date=day time/start=time
    Add {0} on {1} at {2} to my calendar.; Create an event {0} on {1} at {2}.; Put {0} in the calendar for {1} at {2}.;
    Schedule {0} for {1} at {2}.

    turn_on_light/light_on | Turn on the light in a room. | room=room
    Turn on the light in the {0}.; Switch on the {0} light.; Light on in the {0}; Turn the {0} light on.

    turn_off_light/light_off | Turn off the light in a room. | room=room
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

    set_temperature/set_heating | Set the temperature of a room. | room=room degrees/temperature=small
    Set the {0} to {1} degrees.; Set the temperature in the {0} to {1}.; Heat the {0} to {1} degrees.;
    Make it {1} degrees in the {0}.

    play_song/play_music | Play a song. | song/title=words
    Play {0}.; Play the song {0}.; I want to hear {0}.; Please play {0}.

    call_person/phone | Call a person on the phone. | name/person=name
    Call {0}.; Phone {0}.; Please call {0} now.; I want to talk to {0}.

    get_user/find_user | Look up a user by number. | id/user_id=number
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


def known_function(rng, row):
    head, asks = row.split("\n", 1)
    names, description, parameters = (part.strip() for part in head.split("|"))
    values = {}
    for parameter in parameters.split():
        aliases, slot = parameter.split("=")
        values[rng.choice(aliases.split("/"))] = SLOTS[slot](rng)
    core = rng.choice(asks.split(";")).strip()
    return rng.choice(names.split("/")), description, values, phrase(rng, core.replace("{", "{s"), **numbered(values))


def numbered(values):
    return {f"s{i}": value for i, value in enumerate(values.values())}


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


def function_set(rng):
    """(name, values, question, tools): one function to call among zero to three others, in any order."""
    rows = rng.sample(TOOLS, rng.choice((1, 1, 2, 2, 3, 4)))
    functions = [made_up_function(rng) if rng.random() < 0.2 else known_function(rng, row) for row in rows]
    tools = {name: schema(rng, name, description, values) for name, description, values, _ in functions}
    name, _, values, question = functions[0]
    if len(tools) < len(functions):
        return function_set(rng)
    order = list(tools.values())
    rng.shuffle(order)
    return name, values, question, tuple(order)


def function_call(rng):
    name, values, question, tools = function_set(rng)
    call = json.dumps({"name": name, "arguments": values})
    answer = f"<tool_call>\n{call}\n</tool_call>"
    return Item("call", "call " + call, question, answer, tools, {"name": name, "arguments": values})

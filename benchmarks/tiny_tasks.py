"""The tiny model's tasks: each makes a random Item, a question with one right answer."""

import json
from dataclasses import dataclass

from tiny_words import (
    CALENDAR,
    CAPITAL_OF,
    CAPITALS,
    CITIES,
    COUNT_DOWN,
    COUNT_STEP,
    COUNT_UP,
    COUNT_WORDS,
    COUNTRY_OF,
    DAYS,
    FACTS,
    GROUP_OF,
    GROUPS,
    JOBS,
    JSON_ASK,
    LESS,
    LETTERS,
    MONTH_DAYS,
    MONTHS,
    MORE,
    NAMES,
    NUMBER_WORDS,
    SURNAMES,
    WORDS,
    YES_NO,
    phrase,
)


@dataclass(frozen=True)
class Item:
    """One question with one right answer. `calls` are the expected function calls, each as {"name", "arguments"}."""

    task: str
    key: str
    question: str
    answer: str
    tools: tuple = ()
    calls: tuple = ()
    history: tuple = ()  # earlier messages of the same dialogue


def number(rng):
    return rng.randrange(10 ** rng.choice((1, 2, 3, 3, 3)))


def arithmetic(task, cores, story):
    def make(rng):
        a, b = number(rng), number(rng)
        used = cores
        if story and a >= b and rng.random() < 0.12:
            used = story
        noun = {
            "w": rng.choice(("apple", "book", "coin", "egg", "ball", "flower")),
            "v": rng.choice(("cup", "hat", "pen", "key")),
        }
        text = phrase(rng, rng.choice(used), a=a, b=b, n=rng.choice(NAMES), **noun)
        key = f"{task} {a} {b}" if max(a, b) > 9 else f"{task} small"
        return Item(task, key, text, str(a + b if task == "add" else a - b))

    return make


def count_numbers(rng):
    kind, length = rng.choice(("up", "up", "down", "step")), rng.randrange(3, 17)
    start = rng.choice((0, 1, rng.randrange(30), rng.randrange(200)))
    step = {"up": 1, "down": -1}.get(kind) or rng.choice((2, 3, 5, 10))
    values = list(range(start, start + step * length, step)) if step > 0 else list(range(start + length - 1, start - 1, -1))
    cores = {"up": COUNT_UP, "down": COUNT_DOWN, "step": COUNT_STEP}[kind]
    core = rng.choice(cores)
    if kind == "up" and start == 1 and rng.random() < 0.4:
        core = rng.choice(("Count to {b}.", "Please count to {b}.", "Can you count to {b}?", "Count up to {b}."))
    text = phrase(rng, core, a=values[0], b=values[-1], s=step)
    key = "count small" if kind == "up" and start == 1 else f"count {values[0]} {values[-1]} {step}"
    return Item("count", key, text, ", ".join(map(str, values)))


def count(rng):
    pick = rng.random()
    if pick < 0.65:
        return count_numbers(rng)
    if pick < 0.8:
        core, word = rng.choice(LETTERS), rng.choice(WORDS)
        return Item("count", "phrasing|" + core, phrase(rng, core, w=word), str(len(word)))
    words = rng.choices(WORDS, k=rng.randrange(2, 11))
    text = phrase(rng, rng.choice(COUNT_WORDS), x=rng.choice((" ", ", ")).join(words))
    return Item("count", "words " + " ".join(words), text, str(len(words)))


def word_list(task, cores, order):
    def make(rng):
        words = rng.sample(WORDS, rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 6)))
        joint = rng.choice((", ", ", ", ", ", " "))
        text = phrase(rng, rng.choice(cores), x=joint.join(words))
        return Item(task, f"{task} {' '.join(words)}", text, joint.join(order(words)))

    return make


def calendar(rng):
    month = rng.random() < 0.5
    unit, names = ("month", MONTHS) if month else ("day", DAYS)
    ops = (
        ("number", "nth", "length", 1, -1, "after", "before") if month else (1, -1, "tomorrow", "yesterday", "after", "before")
    )
    op, i, n = rng.choice(ops), rng.randrange(len(names)), rng.randrange(2, 13)
    core = rng.choice(CALENDAR[op])
    if op == "nth":
        n, answer = i + 1, names[i]
    elif op == "number":
        answer = str(i + 1)
    elif op == "length":
        answer = str(MONTH_DAYS[i])
    else:
        shift = {"after": n, "before": -n, "tomorrow": 1, "yesterday": -1}.get(op, op)
        answer = names[(i + shift) % len(names)]
    name = names[i].lower() if rng.random() < 0.1 else names[i]
    text = phrase(rng, core, d=name, u=unit, n=NUMBER_WORDS[n] if rng.random() < 0.3 and op != "nth" else n)
    return Item("calendar", "phrasing|" + core, text, answer)


def capital(rng):
    country, city = rng.choice(tuple(CAPITALS.items()))
    asked, answer, cores = (country, city, CAPITAL_OF) if rng.random() < 0.75 else (city, country, COUNTRY_OF)
    core = rng.choice(cores)
    text = phrase(rng, core, c=asked.lower() if rng.random() < 0.1 else asked)
    return Item("capital", "phrasing|" + core, text, answer[0].upper() + answer[1:])


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def statement(rng):
    """A closed fact as (question, statement, truth), in lower case except names."""
    pick = rng.random()
    if pick < 0.55:
        word, group = rng.choice(tuple(GROUP_OF)), rng.choice(tuple(GROUPS))
        if rng.random() < 0.4:
            group = GROUP_OF[word]
        subject = word if GROUP_OF[word] == "color" else article(word)
        return f"is {subject} {article(group)}", f"{subject} is {article(group)}", GROUP_OF[word] == group
    if pick < 0.75:
        country, city = rng.choice(tuple(CAPITALS)), rng.choice(CITIES)
        if rng.random() < 0.5:
            city = CAPITALS[country]
        rest = f"the capital of {country}"
        return f"is {city} {rest}", f"{city} is {rest}", CAPITALS[country] == city
    truth = rng.random() < 0.5
    fact = rng.choice(FACTS[truth].split(";"))
    for verb in (" is ", " are ", " can "):
        if verb in fact:
            subject, rest = fact.split(verb, 1)
            return f"{verb.strip()} {subject} {rest}", fact, truth
    subject, rest = fact.split(" has ", 1)
    return f"does {subject} have {rest}", fact, truth


def compare(rng):
    a, b = number(rng), number(rng)
    if rng.random() < 0.3:
        b = max(0, a + rng.randrange(-12, 13))
    more = rng.random() < 0.5
    word, truth = (rng.choice(MORE), a > b) if more else (rng.choice(LESS), a < b)
    return f"is {a} {word} than {b}", f"{a} is {word} than {b}", truth, f"compare {a} {'>' if more else '<'} {b}"


def yes_no(rng):
    core = rng.choice(YES_NO) if rng.random() < 0.75 else YES_NO[0]
    pick = rng.random()
    if pick < 0.4:
        question, said, truth, key = compare(rng)
    elif pick < 0.5:
        n, even = number(rng), rng.random() < 0.5
        kind = f"{'even' if even else 'odd'}{rng.choice(('', ' number'))}"
        kind = article(kind) if kind.endswith("number") else kind
        question, said, truth = f"is {n} {kind}", f"{n} is {kind}", (n % 2 == 0) == even
        key = f"parity {n}" if n > 9 else "parity small"
    else:
        question, said, truth = statement(rng)
        key = "phrasing|" + core
    if core.startswith(("{q}", "{s}")) or rng.random() < 0.3:
        question, said = question[0].upper() + question[1:], said[0].upper() + said[1:]
    return Item("yes_no", key, phrase(rng, core, q=question, s=said), "Yes" if truth else "No")


FIELDS = {
    "name": lambda rng: rng.choice(NAMES) + (" " + rng.choice(SURNAMES) if rng.random() < 0.25 else ""),
    "age": lambda rng: rng.randrange(1, 100),
    "city": lambda rng: rng.choice(CITIES),
    "country": lambda rng: rng.choice(tuple(CAPITALS)[:60]),
    "color": lambda rng: rng.choice(GROUPS["color"].split()),
    "animal": lambda rng: rng.choice(GROUPS["animal"].split()),
    "fruit": lambda rng: rng.choice(GROUPS["fruit"].split()),
    "job": lambda rng: rng.choice(JOBS),
    "day": lambda rng: rng.choice(DAYS),
    "month": lambda rng: rng.choice(MONTHS),
    "year": lambda rng: rng.randrange(1900, 2100),
    "price": lambda rng: rng.randrange(1, 1000),
    "score": lambda rng: rng.randrange(101),
    "count": lambda rng: rng.randrange(1000),
    "id": lambda rng: rng.randrange(10000),
    "title": lambda rng: " ".join(rng.sample(WORDS, rng.choice((1, 2)))),
    "item": lambda rng: rng.choice(WORDS),
    "quantity": lambda rng: rng.randrange(1, 100),
    "active": lambda rng: rng.random() < 0.5,
    "done": lambda rng: rng.random() < 0.5,
}


def fields(rng, size):
    """`size` different keys with values; one in five is any word with any word or number."""
    out = {}
    while len(out) < size:
        if rng.random() < 0.2:
            out[rng.choice(WORDS)] = rng.choice(WORDS) if rng.random() < 0.5 else rng.randrange(1000)
        else:
            key = rng.choice(tuple(FIELDS))
            out[key] = FIELDS[key](rng)
    return out


def spoken(rng, pairs):
    """Key-value pairs as a person lists them: "name Tom, age 31 and city Paris"."""
    joint = rng.choice((" ", " ", " ", ": ", "=", " is "))
    parts = [f"{key}{joint}{value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs.items()]
    if len(parts) == 1 or rng.random() < 0.3:
        return ", ".join(parts)
    return ", ".join(parts[:-1]) + rng.choice((" and ", " and ", ", and ")) + parts[-1]


def json_object(rng):
    pairs = fields(rng, rng.choice((1, 2, 2, 3, 3, 3, 4)))
    text = phrase(rng, rng.choice(JSON_ASK), x=spoken(rng, pairs))
    answer = json.dumps(pairs)
    return Item("json", "json " + answer, text, answer)

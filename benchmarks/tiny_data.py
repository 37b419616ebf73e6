"""Text for the tiny model: seeded chat turns with one right answer each, and small stories.

The phrasings are in tiny_words.py, the tasks in tiny_tasks.py and tiny_calls.py; this file makes dialogues and documents.
`draw(task, rng, held_out)` gives one Item (question, answer, tools). An item's `key` identifies its question. Open tasks ("add
12 34") hold out the keys with a hash in one eighth of the hash space; closed sets (capitals, weekdays, facts) hold out every
sixth phrasing. A held-out key is never drawn for training, alone or in a dialogue; `benchmark_items` draws only those.

`conversation(rng)` is one training document; `pieces` renders it as CHAT_TEMPLATE does, split into (text, has_loss). Pure
Python, no I/O. Used by train_tiny.py (for training), accuracy.py (for scores) and tests/test_tiny_data.py.
"""

import itertools
import json
import random

from tiny_calls import (
    function_call,
    function_calls,
)
from tiny_tasks import (
    Item,
    arithmetic,
    article,
    calendar,
    capital,
    count,
    json_object,
    word_list,
    yes_no,
)
from tiny_words import (
    ADD,
    GROUPS,
    NAMES,
    REVERSE,
    SORT,
    SUBTRACT,
    SUBTRACT_STORY,
    WORDS,
    is_held_out,
    lines,
    phrase,
)

BOS, EOT, IM_START, IM_END = "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (EOT, BOS, IM_START, IM_END)
CALL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # plain text to a client, one id each

TOOLS_HEAD = "# Tools\n\nYou may call a function to help the user. You are given functions within <tools></tools>:\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, answer with its name and arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
)
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string %}{{ content }}
{%- elif content %}{% for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- bos_token }}
{%- set first = messages[0] if messages else {} %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if first.role == 'system' %}{{- text(first.content) + '\\n\\n' }}{% endif %}
    {{- HEAD }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
    {{- TAIL + '<|im_end|>\\n' }}
{%- elif first.role == 'system' %}
    {{- '<|im_start|>system\\n' + text(first.content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n' if loop.first or messages[loop.index0 - 1].role != 'tool' else '\\n' }}
        {{- '<tool_response>\\n' + text(message.content) + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + text(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n' if not loop.first or text(message.content) }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
for _name, _text in (("HEAD", TOOLS_HEAD), ("TAIL", TOOLS_TAIL)):
    CHAT_TEMPLATE = CHAT_TEMPLATE.replace(_name, "'" + _text.replace("\n", "\\n") + "'").strip()

TASKS = {  # name -> (maker, weight in training)
    "add": (arithmetic("add", ADD, None), 14),
    "subtract": (arithmetic("subtract", SUBTRACT, SUBTRACT_STORY), 18),
    "count": (count, 9),
    "sort": (word_list("sort", SORT, sorted), 16),
    "reverse": (word_list("reverse", REVERSE, lambda words: words[::-1]), 7),
    "calendar": (calendar, 9),
    "capital": (capital, 5),
    "yes_no": (yes_no, 10),
    "json": (json_object, 6),
    "call": (function_call, 0),  # drawn by `conversation`, with the functions that are offered
    "calls": (function_calls, 0),
}
SCORED = (*TASKS, "dialogue")
PLAIN = tuple(task for task, (_, weight) in TASKS.items() if weight)
TASK_NAMES, TASK_WEIGHTS = tuple(TASKS), tuple(weight for _, weight in TASKS.values())


def draw(task, rng, held_out=False):
    """A random item of a task from the training keys, or from the held-out ones."""
    maker = TASKS[task][0]
    while True:
        item = maker(rng)
        if is_held_out(item.key) == held_out:
            return item


def draw_any(rng):
    """A random training item of a task that needs no functions."""
    return draw(rng.choices(TASK_NAMES, TASK_WEIGHTS)[0], rng)


# ---------------------------------------------------------------- talk, stories, whole conversations

SELF = "I am Quire's tiny model. I can add, subtract, count, sort words, tell stories and answer simple questions."
LIMITS = "I am only a tiny model, so I do not know that. I can add, subtract, count, sort words and tell stories."
TALK = [
    (question, answer)
    for questions, answer in (
        ("Hello;Hello!;Hi;Hi!;Hi there;Hey;Hello there!;hello;hi;Good day", "Hello! How can I help you?"),
        ("Good morning;Good morning!;good morning", "Good morning! How can I help you?"),
        ("Good evening;Good evening!;Good night", "Good evening! How can I help you?"),
        ("Who are you?;What are you?;who are you;What is your name?;Tell me about yourself.;Introduce yourself.", SELF),
        ("What can you do?;How can you help me?;Help;help;What do you know?;what can you do", SELF),
        ("How are you?;how are you;How are you today?;How do you do?", "I am fine, thank you. How can I help you?"),
        ("Thanks;Thank you;Thank you!;Thanks!;thanks a lot;Thanks a lot!;Great, thanks!", "You are welcome!"),
        ("Bye;Goodbye;Bye!;See you later;Good bye!;bye bye", "Goodbye! Have a nice day."),
        ("Are you a robot?;Are you human?;Are you an AI?;Are you a person?", "I am a tiny language model, served by Quire."),
        ("What is Quire?;Tell me about Quire.;what is quire", "Quire is an engine that serves language models, like me."),
        ("Who made you?;Who trained you?;Where do you come from?", "I was trained by the people who make Quire."),
        (
            "How big are you?;Are you large?;How many parameters do you have?",
            "I am tiny: I have fewer than four million parameters.",
        ),
        ("Tell me a joke.;Say something funny.;Do you know a joke?", "Why did the duck cross the road? To get to the pond!"),
        ("OK;Okay;Good;Nice;Great!;Well done!;Good job!", "Thank you! Is there anything else?"),
        (
            "Write a program.;What is the meaning of life?;Explain physics.;Who won the game?;What is love?;Write an essay.;"
            "Who is the president?;What is the price of gold?;How do computers work?;Explain how a car works.;"
            "Why is the sky blue?;Who wrote this book?;Can you draw a picture?;What is a neural network?;"
            "Translate this text.;Give me some advice.;"
            "What happened in 1815?;Write code in Python.;What should I eat?;Where is my phone?;Fix my computer.;Who is Anna?",
            LIMITS,
        ),
    )
    for question in questions.split(";")
]
SYSTEM = lines("""
    You are a helpful assistant.\nYou are a helpful assistant\nYou are Quire's tiny model.\nAnswer briefly.
    You are a friendly assistant.
    Be brief.\nYou are a useful assistant. Answer with the result only.\nYou are a tiny model. Answer simple questions.
    Be concise.
    You are an assistant that answers questions.\nYou are a helpful, honest assistant. Today is Monday.\nYou help people.
    Be kind.
    You are a careful assistant who can do sums and sort words.\nYou are an AI assistant.\nYou are a helpful AI assistant.
""")
STORY_ASK = lines("""
    Tell me a story about {x}.\nTell me a story about {x}\nTell me a short story about {x}.\nWrite a story about {x}.
    Write a short story about {x}.\nA story about {x}, please.\nCan you tell me a story about {x}?
    I want to hear a story about {x}.
    Please tell me a story about {x}.\nMake up a story about {x}.\nTell a story about {x}
""")
HEROES = (
    *GROUPS["animal"].split(),
    "boy",
    "girl",
    "king",
    "queen",
    "teacher",
    "bird",
    "fish",
    "prince",
    "farmer",
    "robot",
    "child",
)
STORY = [  # a line of each group, in order; {x} hero's kind, {n} its name, {f} friend's kind, {p} place, {o} thing
    lines(block)
    for block in (
        """Once upon a time there was {x} named {n}.\nOnce there was {x}. Its name was {n}.\nThere once lived {x} named {n}.
        {n} was {x} who lived near the {p}.""",
        """{n} lived in a small house by the {p}.\n{n} loved the {p} more than anything.\nEvery day {n} walked to the {p}.
        {n} was very {m} and had many friends.\n{n} lived near the {p} and was always {m}.""",
        """One day {n} found a {o} on the road.\nOne morning {n} lost a {o}.\nOne day {n} wanted a new {o}.
        One evening {n} saw a shiny {o} in the grass.\nOne day it began to rain and {n} had no {o}.""",
        """{n} did not know what to do.\n{n} looked at it and began to think.\n"What shall I do?" said {n}.
        {n} felt a little sad.
        "I will ask a friend," said {n}.""",
        """Then {n} met {f} named {k}.\nSoon {f} named {k} came by.\nJust then {f} called {k} walked out of the forest.
        On the way {n} met {k}, who was {f}.""",
        """"Can I help you?" asked {k}. "Yes, please," said {n}.\n"Do not worry," said {k}. "We can do it together."
        {k} smiled and said, "Let us go to the {q}."\n"Come with me to the {q}," said {k}.""",
        """They walked to the {q} and looked everywhere.\nTogether they went to the {q} and worked all day.
        They sat by the {q} and made a plan.\nThey ran to the {q} as fast as they could.""",
        """In the end they had the {o} and everyone was happy.\nAt last {n} was happy again.\nSoon the {o} was safe at home.
        When the moon came up, they went home with the {o}.""",
        """From that day on, {n} and {k} were best friends.\n{n} and {k} stayed friends for ever.\nThe end.
        That night {n} slept well.\nAnd {n} learned that it is good to have a friend.""",
    )
]


def story(rng, hero=None):
    hero, friend = hero or rng.choice(HEROES), rng.choice(HEROES)
    name, other = rng.sample(NAMES, 2)
    place, goal = rng.sample(("river", "forest", "lake", "hill", "sea", "garden", "village", "castle", "mountain", "market"), 2)
    thing = rng.choice(("ball", "key", "hat", "lamp", "book", "flower", "coin", "kite", "bell", "map", "cake", "boat"))
    mood = rng.choice(("kind", "brave", "happy", "curious", "clever", "quiet"))
    slots = {"x": article(hero), "n": name, "f": article(friend), "k": other, "p": place, "q": goal, "o": thing, "m": mood}
    return " ".join(rng.choice(group).format(**slots) for group in STORY)


def turn(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def talk_turn(rng):
    return turn(*rng.choice(TALK))


def story_turn(rng):
    hero = rng.choice(HEROES)
    asked = article(hero)
    if rng.random() < 0.1:
        return turn(rng.choice(("Tell me a story.", "Tell me a story", "Write a short story.", "A story, please.")), story(rng))
    return turn(phrase(rng, rng.choice(STORY_ASK), x=asked), story(rng, hero))


def task_turn(rng):
    item = draw_any(rng)
    return turn(item.question, item.answer)


def any_turn(rng):
    pick = rng.random()
    return talk_turn(rng) if pick < 0.05 else story_turn(rng) if pick < 0.07 else task_turn(rng)


def tool_turns(rng, item):
    """Calls, and in a third of the cases their results and what the model says about them."""
    messages = turn(item.question, "")
    messages[1]["tool_calls"] = [{"function": call} for call in item.calls]
    if rng.random() < 0.35:
        results = [tool_result(rng) for _ in item.calls]
        messages += [{"role": "tool", "content": content} for content, _ in results]
        messages.append({"role": "assistant", "content": said_of([said for _, said in results])})
    return messages


DONE, FAILED = "Done.", "Sorry, that did not work: not found."


def tool_result(rng):
    """(content, what it says): a value, DONE or FAILED."""
    value = rng.choice((str(rng.randrange(1000)), rng.choice(WORDS), f"{rng.choice(WORDS)} {rng.randrange(100)}"))
    return rng.choice(
        (
            ('{"status": "ok"}', DONE),
            ("ok", DONE),
            (value, value),
            (json.dumps({"result": value}), value),
            ('{"error": "not found"}', FAILED),
        )
    )


def said_of(results):
    """What the model says about results: DONE and FAILED once each, and one sentence with all values."""
    values = [said for said in results if said not in (DONE, FAILED)]
    if len(values) > 1:
        sentence = f"The results are {', '.join(values[:-1])} and {values[-1]}."
    else:
        sentence = f"The result is {''.join(values)}."
    return " ".join(dict.fromkeys(said if said in (DONE, FAILED) else sentence for said in results))


def conversation(rng):
    """One training document: (messages, tools). Mostly one turn; some have a handful, a few go on for 2,000 tokens."""
    messages, tools = [], ()
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM)})
    pick = rng.random()
    if pick < 0.17:
        item = draw("call" if pick < 0.11 else "calls", rng)
        tools = item.tools
        for _ in range(rng.choice((0, 0, 0, 0, 1))):
            messages += any_turn(rng)
        messages += tool_turns(rng, item)
        if rng.random() < 0.25:
            messages += any_turn(rng)
    elif pick < 0.21:  # functions are offered, but none is needed
        tools = draw("call", rng).tools
        for _ in range(rng.choice((1, 1, 2))):
            messages += any_turn(rng)
    else:
        length = 1 if pick < 0.77 else rng.randrange(2, 5) if pick < 0.97 else rng.randrange(8, 60)
        for _ in range(length):
            messages += any_turn(rng)
    return messages, tools


def in_turns(messages):
    """The messages, with results of functions that follow each other in one turn of the user."""
    for role, group in itertools.groupby(messages, lambda message: message["role"]):
        if role == "tool":
            responses = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            yield {"role": "user", "content": "\n".join(responses)}
        else:
            yield from group


def pieces(messages, tools=()):
    """[(text, has_loss)]: the text that CHAT_TEMPLATE renders, split where the model's turns begin and end."""
    out, text, rest = [], BOS, list(messages)
    system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else None
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        text += f"{IM_START}system\n{system + chr(10) * 2 if system else ''}{TOOLS_HEAD}{listed}{TOOLS_TAIL}{IM_END}\n"
    elif system is not None:
        text += f"{IM_START}system\n{system}{IM_END}\n"
    for message in in_turns(rest):
        if message["role"] != "assistant":
            text += f"{IM_START}user\n{message['content']}{IM_END}\n"
            continue
        out.append((text + IM_START + "assistant\n", False))
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        said = [message["content"]] * bool(message["content"]) + [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
        out.append(("\n".join(said) + IM_END, True))
        text = "\n"
    return out


def document(rng):
    """One training document as pieces: a conversation, or sometimes just a story."""
    if rng.random() < 0.01:
        return [(BOS, False), (story(rng) + EOT, True)]
    return pieces(*conversation(rng))


def dialogue(rng):
    """A held-out question after one or two turns from the training data."""
    history = [message for _ in range(rng.choice((1, 2))) for message in any_turn(rng)]
    if rng.random() < 0.3:
        history.insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
    item = draw(rng.choice(PLAIN), rng, held_out=True)
    return Item("dialogue", item.key, item.question, item.answer, history=tuple(history))


def benchmark_items(task, size, seed=0):
    """`size` held-out items of a scored task, without repeated questions."""
    rng, found = random.Random(f"{task} {seed}"), {}
    while len(found) < size:
        item = dialogue(rng) if task == "dialogue" else draw(task, rng, held_out=True)
        found[item.question, json.dumps(item.tools)] = item
    return list(found.values())

"""The tiny model's text: seeded, never a held-out question in training, and every answer right by another way of finding it.

The checks read the question as a person would (its numbers, its list of words), not the generator's own variables.
"""

import http.server
import importlib.util
import itertools
import json
import random
import re
import sys
from datetime import date, timedelta
from pathlib import Path

import jinja2
import pytest
from http_servers import answering, url_of

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tiny_words, _, _, tiny_data = map(
    load, ("tiny_words", "tiny_tasks", "tiny_calls", "tiny_data")
)  # in the order of their imports
accuracy = load("accuracy")


def numbers(text):
    return [int(digits) for digits in re.findall(r"\d+", text)]


def check_add(question, answer):
    assert int(answer) == sum(numbers(question))


def check_subtract(question, answer):
    first, second = numbers(question)
    if re.search(r"\bfrom\b", question):
        first, second = second, first
    assert int(answer) == first - second


def check_count(question, answer):
    for opener, closer in itertools.product(tiny_words.OPENERS, tiny_words.CLOSERS):
        question = question.removesuffix(closer).removeprefix(opener)
    if "letters" in question.lower() or "how long" in question.lower():
        assert int(answer) in {len(word) for word in re.findall(r"[a-z]+", question)}
    elif "words" in question.lower():
        assert int(answer) == len(re.findall(r"[a-z]+", re.split('[:"]', question)[1]))
    else:
        said, asked = numbers(answer), numbers(question)
        steps = {b - a for a, b in itertools.pairwise(said)}
        assert len(steps) == 1 and said[-1] in asked and (said[0] in asked or said[0] == 1)
        assert abs(steps.pop()) in {1, *asked}


def check_sort(question, answer):
    check_same_words(question, answer)
    words = re.findall(r"[a-z]+", answer)
    assert all(a < b for a, b in itertools.pairwise(words))


def check_reverse(question, answer):
    check_same_words(question, answer)
    joint = ", " if ", " in answer else " "
    assert joint.join(reversed(answer.split(joint))) in question


def check_same_words(question, answer):
    asked = re.findall(r"[a-z]+", question)
    assert all(asked.count(word) >= 1 for word in re.findall(r"[a-z]+", answer))


def check_calendar(question, answer):
    text = question.lower()
    named = {name: i for i, name in enumerate(map(str.lower, (*tiny_words.DAYS, *tiny_words.MONTHS)))}
    found = [word for word in re.findall(r"[a-z]+", text) if word in named]
    digits = numbers(text) or [i for i, word in enumerate(tiny_words.NUMBER_WORDS) if i > 1 and re.search(rf"\b{word}\b", text)]
    if not found:  # the name of month number n
        assert answer == date(2024, digits[0], 1).strftime("%B")
    elif answer.isdigit():
        month, wants_length = named[found[0]] - 6, re.search(r"days|how long", text)
        assert int(answer) == (days_in(month) if wants_length else month)
    else:
        shift = (digits or [1])[0] * (-1 if re.search(r"before|precedes|ago|yesterday|minus", text) else 1)
        place = named[found[0]]
        if place < 7:  # 1 January 2024 is a Monday
            assert answer == (date(2024, 1, 1) + timedelta(days=place + shift)).strftime("%A")
        else:
            assert answer == date(2024, (place - 7 + shift) % 12 + 1, 1).strftime("%B")


def days_in(month):
    following = date(2023 + month // 12, month % 12 + 1, 1)
    return (following - date(2023, month, 1)).days


def check_capital(question, answer):
    pairs = [(key.lower(), value.lower()) for key, value in tiny_words.CAPITALS.items()]
    text, said = question.lower(), answer.lower()
    assert any((said == city and country in text) or (said == country and city in text) for country, city in pairs)


def check_yes_no(question, answer):
    assert answer in ("Yes", "No")
    text, found = question.lower(), numbers(question)
    if len(found) == 2:
        more = re.search(r"larger|bigger|greater|higher|more than", text)
        assert (answer == "Yes") == (found[0] > found[1] if more else found[0] < found[1])
    elif found and re.search(r"\b(even|odd)\b", text):
        assert (answer == "Yes") == (found[0] % 2 == (1 if "odd" in text else 0))


def check_json(question, answer):
    value = json.loads(answer)
    assert json.dumps(value) == answer
    assert all(str(key) in question and (str(v) in question or str(v).lower() in question) for key, v in value.items())


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize("task", tiny_data.PLAIN)
@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_right(task, held_out):
    rng = random.Random(task)
    for _ in range(1000):
        item = tiny_data.draw(task, rng, held_out)
        try:
            CHECKS[task](item.question, item.answer)
        except AssertionError:
            pytest.fail(f"{item.question!r} -> {item.answer!r}")


@pytest.mark.parametrize("task", ["call", "calls"])
def test_calls_fit_their_schemas(task):
    rng = random.Random(0)
    types = {"integer": int, "string": str, "boolean": bool}
    for _ in range(1000):
        item = tiny_data.draw(task, rng)
        functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in item.tools}
        assert len(functions) == len(item.tools)
        assert len(item.calls) in ({1} if task == "call" else {2, 3})
        for call in item.calls:
            parameters, arguments = functions[call["name"]], call["arguments"]
            assert list(arguments) == parameters["required"]
            assert all(type(value) is types[parameters["properties"][key]["type"]] for key, value in arguments.items())
            assert all(str(value).lower() in item.question.lower() for value in arguments.values())
        assert accuracy.is_right(item, {"content": item.answer})
        assert not accuracy.is_right(item, {"content": item.answer + "\n" + item.answer})


def test_several_calls_are_in_the_order_of_their_question():
    rng, pairs = random.Random(3), 0
    for _ in range(1000):
        item = tiny_data.draw("calls", rng)
        assert len({json.dumps(call) for call in item.calls}) == len(item.calls)
        assert not re.search(r"[{}]|\S[?.][A-Z]|  ", item.question), item.question
        cities = [tuple(call["arguments"].values()) for call in item.calls]
        if all(len(values) == 1 and values[0] in tiny_words.CITIES for values in cities):
            places = [item.question.index(city) for (city,) in cities]
            assert places == sorted(places)
            pairs += len(set(cities)) == len(cities) == 2
    assert pairs > 30


def test_results_of_functions_are_told_in_one_answer():
    rng, seen = random.Random(4), set()
    for _ in range(3000):
        item = tiny_data.draw("calls", rng)
        asked, called, *results = tiny_data.tool_turns(rng, item)
        assert asked["content"] == item.question and [call["function"] for call in called["tool_calls"]] == list(item.calls)
        if not results:
            continue
        said = results.pop()
        assert [message["role"] for message in results] == ["tool"] * len(item.calls) and said["role"] == "assistant"
        values = [json.loads(r["content"]).get("result") if r["content"][0] == "{" else r["content"] for r in results]
        values = [value for value in values if value not in (None, "ok")]
        told = re.search(r"The results? (?:is|are) (.*?)\.", said["content"])
        assert (re.split(", | and ", told[1]) if told else []) == values
        seen.add(len(values))
    assert seen == {0, 1, 2, 3}


def test_same_seed_same_text():
    texts = [[tiny_data.document(rng) for _ in range(50)] for rng in (random.Random(7), random.Random(7), random.Random(8))]
    assert texts[0] == texts[1] != texts[2]
    assert tiny_data.benchmark_items("sort", 20) == tiny_data.benchmark_items("sort", 20)
    assert tiny_data.benchmark_items("sort", 20) != tiny_data.benchmark_items("sort", 20, seed=1)


def test_held_out_questions_are_never_trained():
    scored = {task: tiny_data.benchmark_items(task, 200) for task in tiny_data.SCORED}
    for task, items in scored.items():
        assert len({(item.question, json.dumps(item.tools)) for item in items}) == 200, task
        assert all(tiny_words.is_held_out(item.key) for item in items)
    rng = random.Random(1)
    for task in tiny_data.TASKS:
        trained = [tiny_data.draw(task, rng) for _ in range(1500)]
        assert not any(tiny_words.is_held_out(item.key) for item in trained)
        assert not {item.key for item in trained} & {item.key for item in scored[task]}
    asked = {item.question for task in ("add", "subtract", "sort", "reverse", "capital", "json") for item in scored[task]}
    said = {message["content"] for _ in range(3000) for message in tiny_data.conversation(rng)[0]}
    assert not asked & said


def test_the_simplest_phrasings_are_trained():
    for core in (tiny_words.CAPITAL_OF[0], tiny_words.YES_NO[0], tiny_words.CALENDAR[1][0]):
        assert not tiny_words.is_held_out("phrasing|" + core)


def chat_template():
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(tiny_data.CHAT_TEMPLATE)
    return lambda messages, **named: template.render(messages=messages, bos_token=tiny_data.BOS, **named)


def test_chat_template_writes_what_is_trained():
    rng, render = random.Random(2), chat_template()
    for _ in range(300):
        messages, tools = tiny_data.conversation(rng)
        trained = "".join(text for text, _ in tiny_data.pieces(messages, tools))
        assert render(messages, tools=list(tools)) == trained + "\n"
        before, (answer, has_loss) = messages[:-1], tiny_data.pieces(messages, tools)[-1]
        assert has_loss and trained == render(before, tools=list(tools), add_generation_prompt=True) + answer


def test_chat_template_takes_what_clients_send():
    render = chat_template()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
    ]
    text = render(messages, add_generation_prompt=True)
    one = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert text.startswith("<|bos|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello there<|im_end|>\n")
    assert f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n" in text
    assert text.endswith("<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


class Knowing(http.server.BaseHTTPRequestHandler):
    """A server that knows every answer, but always subtracts wrongly."""

    def log_message(self, *_):
        pass

    def send(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send({"data": [{"id": "knowing"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        item = self.server.items[body["messages"][-1]["content"]]
        message = {"content": item.answer if item.task != "subtract" else "0.5"}
        if item.calls:
            functions = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in item.calls]
            message = {"content": None, "tool_calls": [{"function": function} for function in functions]}
        self.send({"choices": [{"message": message}]})


def test_accuracy_scores_a_server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Knowing)
    tasks = ("add", "subtract", "call", "calls", "dialogue")
    server.items = {item.question: item for task in tasks for item in tiny_data.benchmark_items(task, 20)}
    with answering(server):
        client = accuracy.Server(f"{url_of(server)}/v1", "key", "", 4)
        assert client.model == "knowing"
        assert accuracy.score(client, 20, tasks) == {"add": 1.0, "subtract": 0.0, "call": 1.0, "calls": 1.0, "dialogue": 1.0}

"""A request's own chat template, where such are trusted, has so much time and memory, and nobody else waits for it."""

import asyncio
import threading

import fake_client as http
import msgspec
import psutil
import pytest
from deadlines import DEADLINE_S

from quire.frontend.text import request_templates
from quire.frontend.text.chat_template import ChatTemplate, ChatTemplateError
from quire.frontend.text.request_templates import TemplateProcess, ToRender, render_here, render_own
from quire.ipc.process.asked_child import ChildLost

OWN = {**http.HELLO, "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ shout }}"}
LOOP = "{% for i in range(99999) %}"
TRIMS = "|map('trim')" * 7
ENDLESS = {
    "loops": 3 * LOOP + 3 * "{% endfor %}",
    # jinja's test catches whatever is raised while it takes the length
    "test": f"{{% for x in range(99999)|map('string'){TRIMS} %}}{{% if loop is sequence %}}{{% endif %}}{3 * LOOP}"
    + 4 * "{% endfor %}",
    "power": "{% set n = messages|length %}{{ (n + 6) ** (9000000 * n) % 2 }}",
    "comparison": "{% set a = [messages] %}{% set b = [messages|list] %}"
    + 40 * "{% set a = [a, a] %}{% set b = [b, b] %}"
    + "{{ a == b }}",
    "search": "{% set a = 'a' * 4000000 %}{{ a.rfind('ab' ~ a[:2000000]) }}",
    "source": "".join(f"{{% if m{i} %}}x{{% endif %}}" for i in range(30_000)),
}


@pytest.fixture(autouse=True)
def takes_its_time(monkeypatch):
    """The limit is for people who wait; here it would be the machine's."""
    monkeypatch.setattr(request_templates, "TIMEOUT_S", 60.0)


async def ask(api, path, **fields):
    return await api.json("POST", path, {**OWN, **fields})


@pytest.mark.parametrize("path", [http.CHAT, "/tokenize"])
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_ended(path, name, monkeypatch):
    async def main():
        api = http.Api(trust_request_chat_template=True)
        assert (await ask(api, path))[0] == 200
        with monkeypatch.context() as short:
            short.setattr(request_templates, "TIMEOUT_S", 0.05)
            status, answer = await ask(api, path, chat_template=ENDLESS[name])
        assert status == 400 and "took more than 0.05 s" in answer["error"]["message"], answer
        assert (await ask(api, path))[0] == 200

    asyncio.run(main())


SWELLING = {
    "text": "{{ (['x' * 1000000] * 1000000) | join }}",
    "width": "{{ '%999999999d' % 1 }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "center": "{{ 'x'|center(2000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 100000) }}",
    "doubling": "{% set a = 'xy' %}" + 34 * "{% set a = a ~ a %}" + "{{ a|length }}",
}


@pytest.mark.parametrize("name", SWELLING)
def test_a_template_that_swells_is_refused(name):
    async def main():
        api = http.Api(trust_request_chat_template=True)
        status, answer = await ask(api, "/tokenize", chat_template=SWELLING[name])
        assert status == 400, answer
        assert any(word in answer["error"]["message"] for word in ("MemoryError", "memory", "longer than")), answer
        assert (await ask(api, "/tokenize"))[0] == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ raise_exception('\\ud800') }}", "the chat template refused the conversation: ?"),
        ("{{ '\\ud800' }}", "half of a surrogate pair"),
        ("{% if %}", "the chat template is not valid"),
        ("{% break %}", "the chat template is not valid: 'break' outside loop"),  # says Python, of what jinja made
        (25 * "{% for m in messages %}" + 25 * "{% endfor %}", "the chat template is not valid: too many statically nested"),
        ("{{ " + "9" * 5000 + " }}", "the chat template is not valid"),
        ("{{ ''.__class__.mro() }}", "unsafe"),
        ("{{ " + "(" * 100_000, "the chat template"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(template, message):
    async def main():
        status, answer = await ask(http.Api(trust_request_chat_template=True), "/tokenize", chat_template=template)
        assert status == 400 and message in answer["error"]["message"], answer

    asyncio.run(main())


WANTED = ToRender(
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools|tojson }}{{ documents }}{{ n }}",
    {"bos_token": "<s>"},
    None,
    [{"role": "user", "content": [{"type": "text", "text": "é\u2028\U0001f600"}]}],
    [{"type": "function", "function": {"name": "f"}}],
    [{"text": "d", "n": 1.5}],
    True,
    False,
    {"n": 10**30},
)


def test_a_template_apart_renders_as_it_does_here(process):
    here = ChatTemplate(WANTED.source, WANTED.special_tokens, WANTED.content_format).render(
        WANTED.messages, tools=WANTED.tools, documents=WANTED.documents, variables=WANTED.variables
    )
    assert process.render(WANTED, 30.0).text == here
    with pytest.raises(ChatTemplateError, match="plain JSON"):
        process.render(ToRender("", {}, None, [object()], None, None, True, False, {}), 30.0)
    assert process.render(WANTED, 30.0).text == here


def test_the_process_is_one_and_is_started_anew(process):
    before = set(psutil.Process().children())
    process.render(WANTED, 30.0)
    process.render(WANTED, 30.0)
    (child,) = set(psutil.Process().children()) - before
    child.kill()
    child.wait()
    assert process.render(WANTED, 30.0)
    (successor,) = set(psutil.Process().children()) - before - {child}
    process.close()
    assert not successor.is_running()


def test_the_models_own_template_has_the_same_limits():
    """Two nested loops in it froze the frontend."""

    async def main():
        assert await render_own(WANTED) == render_here(WANTED)
        with pytest.raises(ChatTemplateError, match=r"(?i)memory"):
            await render_own(msgspec.structs.replace(WANTED, source=SWELLING["doubling"]))
        assert await render_own(WANTED) == render_here(WANTED)

        async def lost(wanted: ToRender, owner: str) -> str:
            raise ChildLost("a process of templates was killed while it answered")

        status, answer = await http.Api(render_own=lost).json("POST", http.CHAT, http.HELLO)
        assert (status, answer["error"]["code"]) == (503, "overloaded")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["loops", "comparison"])
def test_a_process_judges_by_its_own_time(name, process):
    with pytest.raises(ChatTemplateError, match=r"took more than 0.1 s"):
        process.render(msgspec.structs.replace(WANTED, source=ENDLESS[name]), 0.1)
    assert process.render(WANTED, 30.0)


def test_what_templates_leave_in_the_process_is_bounded():
    """Else those of one client, compiled and kept, would leave no memory for another's."""
    process, others = TemplateProcess(max_kept_bytes=8 << 20), set(psutil.Process().children())
    for size, is_kept in ((1, True), (1, True), (9 << 20, False), (1, True)):
        source = f"{{% set a = 'x' * {size} %}}{{{{ a|length }}}}"  # a constant of the compiled template
        assert process.render(msgspec.structs.replace(WANTED, source=source), 60.0).text == str(size)
        assert bool(set(psutil.Process().children()) - others) == is_kept
    process.close()


@pytest.fixture
def process():
    made = TemplateProcess()
    yield made
    made.close()


def test_others_go_on_meanwhile(monkeypatch):
    """While a template keeps its process, the loop and its threads serve everybody else, long conversations as well."""
    begun, may_end = threading.Event(), threading.Event()
    render = request_templates._process.render

    def held(wanted, timeout_s):
        begun.set()
        assert may_end.wait(DEADLINE_S)
        return render(wanted, timeout_s)

    monkeypatch.setattr(request_templates._process, "render", held)

    async def main():
        api = http.Api(trust_request_chat_template=True)
        own = asyncio.ensure_future(ask(api, "/tokenize"))
        await asyncio.to_thread(begun.wait, 60.0)
        long = {**http.HELLO, "messages": [{"role": "user", "content": "x" * 20_000}]}
        assert (await api.json("POST", "/tokenize", long))[0] == 200 and not own.done()
        may_end.set()
        assert (await own)[0] == 200

    asyncio.run(main())

"""The page in a headless Chromium, before a real frontend: by keyboard, on a narrow screen, without a key, with tools."""

import re
from collections.abc import Iterator

import msgspec
import pytest
from browser import ask, chromium, delta, opened, sent
from fake_core import FakeCore
from metrics_cases import engine_stats
from playwright.sync_api import Browser, Page, expect
from served import ROOMY, Served, next_of, say, say_hi

from quire.ipc.messages.frontend import Abort, AddRequest, sequence_key

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        assert found is not None, "no Chromium is installed: `playwright install chromium`, or a distribution's package"
        yield found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address) as served:
        yield served.url()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    yield from opened(browser, url)


def test_a_question_is_answered_by_keyboard_alone(page: Page):
    expect(page.get_by_label("Model")).to_have_value("toy")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.get_by_role("link", name="Skip to the message").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .text")).to_have_text("one\ntwo")
    expect(page.locator(".message.assistant .text")).to_have_text("hello world!")
    expect(page.locator(".message.assistant .figures")).to_contain_text("3 tokens")
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-busy", "false")
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    page.get_by_role("button", name="Ask again").press("Enter")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".message.assistant .figures")).to_contain_text("length")
    page.get_by_role("button", name="New chat").press(" ")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_focus_goes_through_everything_in_the_order_of_the_page(page: Page):
    expect(page.get_by_label("Model")).to_have_value("toy")
    page.get_by_role("link", name="Skip to the message").focus()
    page.keyboard.press("Shift+Tab")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("document.activeElement.id || document.activeElement.value || document.activeElement.tagName")
        )
        if seen[-1] == "polling":
            break
    settings = "system temperature top_p top_k min_p max_tokens seed frequency_penalty presence_penalty stop_text"
    expected = ["A", "model", "messages", *["BUTTON"] * 3, "prompt", "send", "clear", "none", *settings.split()]
    assert seen == [*expected, "stream", "key", "keep-key", "polling"]


def test_escape_stops_an_answer_in_the_engine_too(browser: Browser):
    with FakeCore(limits=ROOMY) as core, Served("--engine", core.address) as served:
        for page in opened(browser, served.url()):
            page.get_by_label("Message", exact=True).fill("tell me")
            page.keyboard.press("Enter")
            added = next_of(core, AddRequest)
            say(core, sequence_key(added.id, 0), say_hi(None, 0)[0])
            expect(page.locator(".message.assistant .text")).to_have_text("hello")
            expect(page.get_by_role("log")).to_have_attribute("aria-busy", "true")
            expect(page.get_by_role("button", name="Send")).to_be_disabled()
            page.keyboard.press("Escape")
            assert next_of(core, Abort).ids == [added.id]
            expect(page.locator(".message.assistant .figures")).to_contain_text("stopped")
            expect(page.get_by_role("button", name="Send")).to_be_enabled()
            expect(page.get_by_role("alert")).to_be_hidden()


def test_reasoning_that_was_stopped_stays_and_a_dead_server_is_said(browser: Browser):
    with FakeCore(limits=ROOMY) as core, Served("--engine", core.address, "--reasoning-parser", "deepseek_r1") as served:
        for page in opened(browser, served.url()):
            ask(page, "think")
            say(core, sequence_key(next_of(core, AddRequest).id, 0), say_hi(None, 0)[0])
            expect(page.locator(".message.assistant details")).to_contain_text("hello")
            page.get_by_role("button", name="Stop").click()
            expect(page.locator(".message.assistant .figures")).to_contain_text("stopped")
            expect(page.locator(".message.assistant details")).to_contain_text("hello")
            ask(page, "and now")
            say(core, sequence_key(next_of(core, AddRequest).id, 0), say_hi(None, 0)[0])
            expect(page.locator(".message.assistant details")).to_have_count(2)
            served.process.kill()
            expect(page.get_by_role("alert")).to_have_text("The answer broke off.")
            expect(page.get_by_role("status").first).to_have_text("No connection")
            expect(page.get_by_role("img", name=re.compile("^Batch: running –, waiting –"))).to_be_visible()


def test_a_flood_of_tokens_is_shown_and_a_reader_is_left_at_his_place(browser: Browser):
    with (
        FakeCore(limits=msgspec.structs.replace(ROOMY, max_model_len=1 << 16)) as core,
        Served("--engine", core.address) as served,
    ):
        for page in opened(browser, served.url(), viewport={"width": 320, "height": 640}):
            log, hello = page.get_by_role("log"), say_hi(None, 0)
            ask(page, "go")
            key = sequence_key(next_of(core, AddRequest).id, 0)
            for token in hello * 4_000:
                say(core, key, token)
            expect(page.locator(".message.assistant .text")).to_have_js_property("textContent", "hello world!" * 4_000)
            assert log.evaluate("log => log.scrollHeight - log.scrollTop - log.clientHeight") < 5
            log.evaluate("log => { log.scrollTop = 10; }")
            say(core, key, hello[0], "length")
            expect(page.locator(".message.assistant .figures")).to_contain_text("length")
            assert log.evaluate("log => log.scrollTop") == 10
            ask(page, "and now")
            assert log.evaluate("log => log.scrollHeight - log.scrollTop - log.clientHeight") < 5


def test_settings_are_sent_and_only_those_that_are_set(page: Page):
    bodies = sent(page, [[delta(content="a"), delta("stop")]] * 2)
    expect(page.get_by_label("Model")).to_have_value("toy")
    message = page.get_by_label("Message", exact=True)
    message.fill("hi")
    message.press("Enter")
    expect(page.locator(".figures")).to_have_count(1)
    assert bodies[0] == {
        "model": "toy",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hi"}],
    }
    page.get_by_label("System message").fill("Be brief.")
    for label, value in (("Temperature", "0.5"), ("Top k", "5"), ("Seed", "7"), ("Max tokens", "9"), ("Stop at", "END")):
        page.get_by_label(label).fill(value)
    message.fill("again")
    message.press("Enter")
    expect(page.locator(".figures")).to_have_count(2)
    assert bodies[1] == {
        **bodies[0], "temperature": 0.5, "top_k": 5, "seed": 7, "max_tokens": 9, "stop": ["END"],
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"},
                     {"role": "assistant", "content": "a"}, {"role": "user", "content": "again"}],
    }  # fmt: skip
    page.get_by_label("Temperature").fill("9")
    message.fill("too hot")
    message.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Temperature")
    assert len(bodies) == 2


def test_a_fraction_between_two_steps_is_sent_and_a_fraction_of_a_token_is_not(page: Page):
    bodies = sent(page, [[delta(content="a"), delta("stop")]])
    page.get_by_label("Temperature").fill("0.75")
    page.get_by_label("Min p").fill("0.02")
    ask(page, "hi")
    expect(page.locator(".figures")).to_have_count(1)
    assert (bodies[0]["temperature"], bodies[0]["min_p"]) == (0.75, 0.02)
    page.get_by_label("Max tokens").fill("1.5")
    ask(page, "again")
    expect(page.get_by_role("alert")).to_contain_text("Max tokens")


def test_a_required_call_is_required_once(page: Page):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 2, "b": 3}'}}
    bodies = sent(page, [[delta("tool_calls", tool_calls=[call])], [delta("stop", content="6")]])
    page.get_by_label("Tools", exact=True).check()
    page.get_by_label("Tool choice").select_option("required")
    ask(page, "What is 2 times 3?")
    expect(page.locator(".message.assistant .text").last).to_have_text("6")
    assert [body["tool_choice"] for body in bodies] == ["required", "auto"]


def test_a_call_that_broke_off_is_not_sent_again(page: Page):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 2'}}
    broken = {"error": {"message": "The engine has died.", "type": "server_error", "code": 500}}
    bodies = sent(page, [[delta(tool_calls=[call]), broken], [delta("stop", content="6")]])
    page.get_by_label("Tools", exact=True).check()
    ask(page, "What is 2 times 3?")
    expect(page.get_by_role("alert")).to_have_text("The engine has died.")
    expect(page.locator(".call code")).to_have_text('multiply({"a": 2)')
    ask(page, "Well?")
    expect(page.locator(".message.assistant .text").last).to_have_text("6")
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "user"]


def test_calls_of_tools_are_shown_and_answered(page: Page):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "multiply", "arguments": ""}}
    unknown = {**call, "id": "c2", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    pieces = [{"index": 0, "function": {"arguments": part}} for part in ('{"a": 12,', ' "b": 34}')]
    bodies = sent(
        page,
        [
            [delta(role="assistant", tool_calls=[call]), *(delta(tool_calls=[p]) for p in pieces), delta("tool_calls")],
            [delta(reasoning="Now the weather."), delta(tool_calls=[unknown]), delta("tool_calls")],
            [delta(content="408, and rain."), delta("stop")],
        ],
    )
    page.get_by_label("Tools", exact=True).check()
    message = page.get_by_label("Message", exact=True)
    message.fill("What is 12 times 34?")
    message.press("Enter")
    expect(page.locator(".message.tool .text")).to_have_text("408")
    expect(page.locator(".call code").first).to_have_text('multiply({"a": 12, "b": 34})')
    result = page.get_by_label('Result of weather({"city": "Oslo"})')
    expect(result).to_be_focused()
    result.fill("rain")
    result.press("Enter")
    expect(page.locator(".message.assistant .text").last).to_have_text("408, and rain.")
    expect(page.get_by_text("Reasoning")).to_be_visible()
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["multiply", "get_time"]
    assert bodies[0]["tool_choice"] == "auto"
    assert [m.get("tool_call_id") for m in bodies[2]["messages"]] == [None, None, "c1", None, "c2"]
    assert bodies[2]["messages"][-1]["content"] == "rain"


def test_a_schema_is_sent_and_a_wrong_one_is_said(page: Page):
    bodies = sent(page, [[delta(content="{}"), delta("stop")]])
    page.get_by_label("JSON", exact=True).check()
    message = page.get_by_label("Message", exact=True)
    message.fill("Describe a person.")
    message.press("Enter")
    expect(page.locator(".figures")).to_have_count(1)
    form = bodies[0]["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["schema"]["required"] == ["name", "age", "city"]
    page.get_by_label("Schema (JSON)").fill("{")
    message.fill("Again.")
    message.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Schema (JSON)")


def test_errors_are_said(page: Page):
    page.get_by_label("Top p", exact=True).evaluate("field => { field.removeAttribute('min'); field.value = '-1'; }")
    message = page.get_by_label("Message", exact=True)
    message.fill("hi")
    message.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("top_p")
    expect(page.locator(".message.assistant")).to_have_count(0)
    page.get_by_label("Top p", exact=True).fill("")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    message.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    page.unroute("**/v1/chat/completions")
    sent(page, [[delta(content="half")]])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body="data: {}\n\n"))
    page.get_by_role("button", name="Ask again").click()
    expect(page.get_by_role("alert")).to_have_text("The answer broke off.")


def test_a_key_is_asked_for_and_kept_no_longer_than_wanted(browser: Browser):
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, "--api-key", "secret") as served:
        for page in opened(browser, served.url()):
            alert = page.get_by_role("alert")
            expect(alert).to_contain_text("needs an API key")
            ask(page, "hi")
            expect(alert).to_contain_text("needs an API key")
            page.get_by_label("Key", exact=True).fill("wrong")
            page.keyboard.press("Enter")
            expect(alert).to_contain_text("does not know this API key")
            page.get_by_label("Key", exact=True).fill("secret")
            page.keyboard.press("Enter")
            expect(page.get_by_label("Model")).to_have_value("toy")
            expect(alert).to_be_hidden()
            page.get_by_role("button", name="Ask again").click()
            expect(page.locator(".message.assistant .text")).to_have_text("hello world!")
            assert page.evaluate("localStorage.length + document.cookie.length") == 0
            assert not page.evaluate("Object.entries(sessionStorage).join().includes('secret')")
            page.get_by_label("Keep it until this tab is closed").check()
            page.reload()
            expect(page.get_by_label("Model")).to_have_value("toy")
            page.get_by_label("Keep it until this tab is closed").uncheck()
            assert not page.evaluate("Object.entries(sessionStorage).join().includes('secret')")


def test_charts_follow_the_metrics(browser: Browser):
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address) as served:
        core.announce(num_running=3, num_waiting=2, kv_usage=0.25, stats=engine_stats())
        for page in opened(browser, served.url()):
            expect(page.get_by_role("status").first).to_have_text("Engine ready")
            expect(page.get_by_role("img", name=re.compile("^Batch: running 3, waiting 2"))).to_be_visible()
            expect(page.get_by_role("img", name=re.compile("^KV cache: used 25.0 %"))).to_be_visible()
            core.announce(generation_tokens=5000, prompt_tokens=100, num_running=8)
            expect(page.get_by_role("img", name=re.compile("generated [1-9]"))).to_be_visible()
            expect(page.get_by_role("img", name=re.compile("^Batch: running 8"))).to_be_visible()
            assert page.locator(".chart polyline").count() >= 4
            core.announce(ready=False)
            expect(page.get_by_role("status").first).to_have_text("The engine does not serve")
            page.get_by_label("Update every 2 seconds").uncheck()


def test_the_description_of_the_api_begins_with_what_is_needed(browser: Browser, url: str):
    failed: list[str] = []
    for page in opened(browser, f"{url}/docs"):
        page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
        page.reload(wait_until="networkidle")
        page.get_by_text("/v1/chat/completions Answer a conversation").click()
        names = page.locator("details[open] table").first.locator("tbody td:first-child").all_inner_texts()
        assert names[:2] == ["messages", "model"] and names.index("temperature") < names.index("moderation")
        assert failed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_everything_in_readable_colours(browser: Browser, url: str, scheme):
    for page in opened(browser, url, viewport={"width": 320, "height": 640}, color_scheme=scheme):
        expect(page.get_by_label("Model")).to_have_value("toy")
        page.get_by_label("Message", exact=True).fill("x" * 300)
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant .text")).to_have_text("hello world!")
        name = "an-organisation/a-model-with-a-name-of-very-many-words-Instruct-FP8-dynamic"
        page.get_by_label("Model").evaluate("(select, name) => select.append(new Option(name, name, true, true))", name)
        for demo in ("Tools", "JSON", "Chat"):
            page.get_by_role("radio", name=demo).check()
            assert page.evaluate("document.documentElement.scrollWidth") <= 320
        for selector in ("body", ".hint", "#send", ".message.user .text", ".message .who", "#engine", "label.field"):
            assert page.evaluate(CONTRAST, selector) >= 4.5, selector


CONTRAST = """(selector) => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => [r, g, b].map((c) => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const element = document.querySelector(selector), style = getComputedStyle(element);
  let behind = element;
  while (behind && rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const [a, b] = [light(rgb(style.color)), light(rgb(getComputedStyle(behind ?? document.body).backgroundColor))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""

"""The page's conversation in a headless Chromium: Markdown, reloads, edits, prompts, checks of settings, its place."""

import json
from collections.abc import Iterator

import pytest
from browser import ask, chromium, delta, opened, sent
from fake_core import FakeCore
from playwright.sync_api import Browser, Page, expect
from served import ROOMY, Served, next_of, say, say_hi

from quire.ipc.messages.frontend import AddRequest, sequence_key

pytestmark = pytest.mark.browser
TEXT = ".message.assistant .text"
HOSTILE = """<img src=/x onerror="window.hacked = 1"><script>window.hacked = 1</script>

![a](https://evil.example/a.png) [b](javascript:window.hacked=1) [c](https://good.example/) <svg/onload=alert(1)>
"""
WHOLE = """# Title

1. one
  - two
    - three `code` **bold**
2. four

| a | b |
|--:|---|
| 1 | *x* |

> quoted
> more

```py
if a < b:
    pass
```

Last\r
line
---
"""


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
    yield from opened(browser, url, viewport={"width": 1280, "height": 800}, permissions=["clipboard-read", "clipboard-write"])


def answers(page: Page, *texts: str) -> list[dict]:
    return sent(page, [[delta(content=text), delta("stop")] for text in texts])


def test_markdown_becomes_elements(page: Page):
    answers(page, WHOLE)
    ask(page, "go")
    text = page.locator(TEXT)
    expect(text.locator("h3")).to_have_text("Title")
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.locator("ol > li > ul > li > ul > li")).to_have_text("three code bold")
    expect(text.locator("td.right")).to_have_text("1")
    expect(text.locator("td em")).to_have_text("x")
    expect(text.locator("blockquote")).to_have_text("quoted\nmore", use_inner_text=True)
    expect(text.locator("pre code")).to_have_text("if a < b:\n    pass")
    expect(text.locator(".code-head span")).to_have_text("py")
    text.get_by_role("button", name="Copy the code").click()
    expect(text.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    pass"


def test_a_hostile_answer_runs_and_loads_nothing(page: Page):
    answers(page, HOSTILE)
    ask(page, "go")
    text = page.locator(TEXT)
    expect(text).to_contain_text('onerror="window.hacked = 1"')
    expect(text).to_contain_text("[b](javascript:window.hacked=1)")
    assert text.locator("img, script, svg, iframe, [onerror], [style]").count() == 0
    assert text.locator("a").evaluate_all("all => all.map((a) => [a.href, a.target, a.rel.includes('noopener')])") == [
        ["https://evil.example/a.png", "_blank", True],
        ["https://good.example/", "_blank", True],
    ]
    assert page.evaluate("window.hacked") is None


GROWN = """async (text) => {
  const { MarkdownView } = await import("/page/markdown_view.js");
  const drawn = (ends) => {
    const root = document.createElement("div"), view = new MarkdownView(root);
    for (const end of ends) view.show(text.slice(0, end));
    return root.outerHTML;
  };
  const ends = [...Array(text.length + 1).keys()];
  return [drawn([text.length]), drawn(ends), drawn(ends.filter((end) => end % 7 === 0 || end === text.length))];
}"""


def test_a_text_that_grows_looks_as_if_it_had_come_at_once(page: Page):
    for text in (
        WHOLE,
        HOSTILE,
        "- x\n| a | b |\n|-|-x\n\n- y\n\nz",
        "a\n-\n\n---\n\n    code\n\n\tmore\n\n1) a\n\n   b\n\n2) c\n~~~\nx",
    ):
        whole, *grown = page.evaluate(GROWN, text)
        assert grown == [whole, whole]


def test_a_block_that_is_closed_keeps_its_elements(page: Page):
    kept = page.evaluate("""async () => {
      const { MarkdownView } = await import("/page/markdown_view.js");
      const root = document.createElement("div"), view = new MarkdownView(root), seen = new Set();
      let text = "";
      for (let i = 0; i < 300; i++) {
        text += `paragraph ${i}\\n\\n- item\\n- item\\n\\n`;
        view.show(text);
        for (const node of root.children) seen.add(node);
      }
      return [seen.size, root.childElementCount];
    }""")
    assert kept == [600, 600]


@pytest.mark.parametrize("piece", ["`", "` `` ", "**a*", "> "])
def test_a_flood_of_marks_freezes_nothing(page: Page, piece):
    answers(page, piece * (200_000 // len(piece)))
    ask(page, "go")
    expect(page.locator(".figures")).to_contain_text("stop", timeout=10_000)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)


def test_a_reload_keeps_the_conversation_and_new_chat_forgets_it(page: Page):
    bodies = answers(page, "**one**", "two")
    page.get_by_label("System message").fill("Be brief.")
    ask(page, "first")
    expect(page.locator(".figures")).to_have_count(1)
    page.get_by_label("Message", exact=True).fill("a draft")
    page.reload()
    expect(page.locator(".message.user .text")).to_have_text("first")
    expect(page.locator(f"{TEXT} strong")).to_have_text("one")
    expect(page.get_by_label("System message")).to_have_value("Be brief.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("a draft")
    ask(page, "second")
    expect(page.locator(TEXT).last).to_have_text("two")
    assert [message["content"] for message in bodies[1]["messages"]] == ["Be brief.", "first", "**one**", "second"]
    page.get_by_role("button", name="New chat").click()
    page.reload()
    expect(page.locator(".message")).to_have_count(0)


def test_an_answer_that_a_reload_cuts_off_keeps_what_had_come(browser: Browser):
    with FakeCore(limits=ROOMY) as core, Served("--engine", core.address) as served:
        for page in opened(browser, served.url()):
            ask(page, "go")
            say(core, sequence_key(next_of(core, AddRequest).id, 0), say_hi(None, 0)[0])
            expect(page.locator(TEXT)).to_have_text("hello")
            page.reload()
            expect(page.locator(TEXT)).to_have_text("hello")
            expect(page.locator(".figures")).to_contain_text("cut off")
            expect(page.get_by_role("button", name="Ask again")).to_be_enabled()


def test_a_question_is_edited_and_what_follows_is_replaced(page: Page):
    bodies = answers(page, "one", "two", "three")
    ask(page, "first")
    expect(page.locator(".figures")).to_have_count(1)
    ask(page, "second")
    expect(page.locator(".figures")).to_have_count(2)
    page.get_by_role("button", name="Edit the question").first.click()
    field = page.get_by_role("textbox", name="Edit the question")
    expect(field).to_be_focused()
    field.press("Escape")
    expect(page.locator(".message")).to_have_count(4)
    page.get_by_role("button", name="Edit the question").first.click()
    field.fill("better")
    field.press("Enter")
    expect(page.locator(TEXT)).to_have_text("three")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    assert bodies[2]["messages"] == [{"role": "user", "content": "better"}]


def test_the_form_that_edits_a_question_is_in_sight_under_a_long_conversation(page: Page):
    answers(page, "a line\n\n" * 60)
    ask(page, "first")
    expect(page.locator(".figures")).to_have_count(1)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "second")
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_role("button", name="Edit the question").last.click()
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_in_viewport(ratio=0.9)
    expect(page.get_by_role("button", name="Cancel")).to_be_in_viewport(ratio=0.9)


def test_an_empty_chat_has_three_prompts(page: Page):
    prompts = page.locator(".prompts button")
    expect(prompts).to_have_count(3)
    chosen = prompts.nth(1).inner_text()
    prompts.nth(1).click()
    expect(page.locator(".message.user .text")).to_have_text(chosen)
    expect(page.locator(TEXT)).to_have_text("hello world!")
    expect(prompts).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


@pytest.mark.parametrize("schema", ["{", "[]", '{"type": "objekt"}', '{"properties": {"a": {"$ref": "#/b"}}}'])
def test_a_schema_is_checked_before_the_question_is_taken(page: Page, schema):
    bodies = answers(page, "{}")
    page.get_by_label("JSON", exact=True).check()
    field = page.get_by_label("Schema (JSON)")
    field.fill(schema)
    ask(page, "Describe a person.")
    expect(page.get_by_role("alert")).to_contain_text("Schema (JSON)")
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-describedby", "schema-problem")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Describe a person.")
    assert bodies == [] and page.locator(".message").count() == 0
    field.fill('{"type": "object"}')
    expect(page.get_by_role("alert")).to_be_hidden()
    page.get_by_role("button", name="Send").click()
    expect(page.locator(TEXT)).to_have_text("{}")


def test_a_schema_that_the_server_refuses_gives_the_question_back(page: Page):
    error = {"message": "No.", "type": "invalid_request_error", "param": "response_format.json_schema.schema", "code": None}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, body=json.dumps({"error": error})))
    page.get_by_label("JSON", exact=True).check()
    ask(page, "Describe a person.")
    expect(page.get_by_role("alert")).to_contain_text("Schema (JSON): No.")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Describe a person.")
    expect(page.locator(".message")).to_have_count(0)


def test_send_is_in_sight_and_nothing_is_wider_than_a_phone(browser: Browser, url: str, page: Page):
    def bottom(of: Page) -> float:
        box = of.get_by_role("button", name="Send").bounding_box()
        assert box is not None
        return box["y"] + box["height"]

    assert bottom(page) <= 800
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    for narrow in opened(browser, url, viewport={"width": 390, "height": 844}):
        answers(narrow, WHOLE + "\n```\n" + "x" * 500 + "\n```\n\n|" + "a|" * 40 + "\n|" + "-|" * 40 + "\n\n" + "y" * 500)
        ask(narrow, "go")
        expect(narrow.locator(".figures")).to_have_count(1)
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 390
        assert bottom(narrow) <= 844

"""The page at / as files: who gets them and how, and that they need nothing from elsewhere; its pure scripts, run by Node."""

import asyncio
import json
import re
import subprocess
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser

import fake_client as http
import pytest
from playwright._impl._driver import compute_driver_executable

from quire.frontend.http.api.page import FILES, FOLDER

HTML = (FOLDER / "index.html").read_text()
SCRIPTS = {path.name: path.read_text() for path in FOLDER.glob("*.js")}


# ----------------------------------------------------------------------------------------------------------- over HTTP
def test_the_page_needs_no_key_and_runs_nothing_but_itself():
    async def main():
        api = http.Api(api_keys=["k"])
        for path in FILES:
            answer = await api.ask("GET", path.decode())
            assert answer.status == 200 and answer.body == FILES[path].data
            policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await api.ask("GET", "/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await api.ask("GET", "/page/main.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        assert (await api.ask("GET", "/?model=x")).status == 200
        for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/nope.js", "/page/main.js/"):
            assert (await api.ask("GET", path)).status == 401
        assert (await api.ask("PUT", "/", {}, {"Authorization": "Bearer k"})).status == 405
        assert (await api.ask("POST", "/", {})).status == 401  # a route for vectors, which is not open
        assert (await api.ask("POST", "/", {}, {"Authorization": "Bearer k"})).status == 400
        assert (await api.ask("GET", "/v1/models")).status == 401

    asyncio.run(main())


def test_what_a_browser_has_is_not_sent_again():
    async def main():
        api = http.Api()
        answer = await api.ask("GET", "/")
        assert answer.headers["cache-control"] == "no-cache"
        tag = answer.headers["etag"]
        for known in (tag, f'"other", {tag}', f"W/{tag}", "*"):
            again = await api.ask("GET", "/", headers={"If-None-Match": known})
            assert again.status == 304 and again.body == b"" and again.headers["etag"] == tag
            assert again.headers["content-length"] == answer.headers["content-length"]
        assert (await api.ask("GET", "/", headers={"If-None-Match": '"other"'})).status == 200
        head = await api.ask("HEAD", "/page/style.css")
        assert head.body == b"" and int(head.headers["content-length"]) == len(FILES[b"/page/style.css"].data)

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------- what they hold
class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._in = ""
        self.feed(HTML)

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))
        self._in = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        if self._in and data.strip():
            self.inline.append(data)


def test_nothing_is_inline_and_nothing_comes_from_elsewhere():
    elements = Elements()
    assert elements.inline == []
    attributes = [(name, value) for _, found in elements.all for name, value in found.items()]
    assert not [name for name, _ in attributes if name == "style" or name.startswith("on")]
    linked = [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]
    assert linked and all(f"/{value}".encode() in FILES for value in linked)
    for name, script in SCRIPTS.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage|cookie", script), (
            name
        )
        for imported in re.findall(r'from "(.*?)"', script):
            assert imported.removeprefix("./") in SCRIPTS
    style = (FOLDER / "style.css").read_text()
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style


def test_every_field_has_a_name_and_every_name_is_used_once():
    elements = Elements()
    ids = [found["id"] for _, found in elements.all if "id" in found]
    assert len(set(ids)) == len(ids)
    labelled = {found["for"] for tag, found in elements.all if tag == "label" and "for" in found}
    assert labelled <= set(ids)
    for tag, found in elements.all:
        if tag in ("input", "select", "textarea"):
            assert found.get("type") in ("checkbox", "radio") or found["id"] in labelled, found
        for name in ("aria-labelledby", "aria-describedby"):
            assert name not in found or found[name] in ids
    assert ("html", {"lang": "en"}) in elements.all


def test_scripts_look_up_only_what_is_on_the_page():
    ids = {found["id"] for _, found in Elements().all if "id" in found}
    for name, script in SCRIPTS.items():
        assert set(re.findall(r'\bget\("([\w-]+)"\)', script)) <= ids, name


# ------------------------------------------------------------------------------------------------------ pure functions
@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Runs a module beside the page's scripts; what it prints is JSON."""
    program, _ = compute_driver_executable()  # Playwright's own Node
    folder = tmp_path_factory.mktemp("page")
    for name, script in SCRIPTS.items():
        (folder / name).write_text(script)
    (folder / "package.json").write_text('{"type": "module"}')

    def run(code: str):
        (folder / "test.js").write_text(code)
        done = subprocess.run([program, "test.js"], cwd=folder, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_events_are_the_same_however_they_are_cut(node):
    text = 'data: {"a": "é✓"}\n\n: a comment\n\ndata: one\r\ndata:two\r\n\r\nevent: x\ndata: [DONE]\n\n'
    found = node(f"""
        import {{ EventDecoder }} from "./sse.js";
        const bytes = new TextEncoder().encode({json.dumps(text)}), all = new Set();
        for (let size = 1; size <= bytes.length; size++) {{
          const decoder = new EventDecoder(), events = [];
          for (let i = 0; i < bytes.length; i += size) events.push(...decoder.push(bytes.subarray(i, i + size)));
          all.add(JSON.stringify(events));
        }}
        console.log(JSON.stringify([...all].map((e) => JSON.parse(e))));
    """)
    assert found == [['{"a": "é✓"}', "one\ntwo", "[DONE]"]]


def test_scrapes_become_rates_and_means(node):
    found = node("""
        import { mean, parseMetrics, rate } from "./prometheus.js";
        const scrape = (n) => parseMetrics(`# HELP x y\\na_total{k="1"} ${n}\\na_total{k="b c"} ${n}\\nh_bucket{le="1"} 9\\n`
          + `h_sum{k="}"} ${n * 3}\\nh_count{k="}"} ${n}\\nmost +Inf\\n`);
        const a = scrape(1), b = scrape(5);
        console.log(JSON.stringify([b.get("a_total"), b.has("h_bucket"), String(b.get("most")), rate(a, b, "a_total", 2),
          rate(b, a, "a_total", 2), rate(null, b, "a_total", 2), rate(a, b, "a_total", 0), rate(a, b, "none", 1),
          mean(a, b, "h"), mean(b, b, "h"), mean(null, b, "h")]));
    """)
    assert found == [10, False, "Infinity", 4, None, None, None, None, 3, None, None]


def test_lines_of_a_chart(node):
    found = node("""
        import { lines, roundUp } from "./charts.js";
        console.log(JSON.stringify([[0, 0.03, 1, 3, 500, 501].map(roundUp), lines([1, 2, null, 4], 4, 4)]));
    """)
    assert found == [[1, 0.05, 1, 5, 500, 1000], ["0.0,75.0 100.0,50.0", "300.0,0.0 300.0,0.0"]]


def test_answers_are_put_together_from_deltas(node):
    found = node("""
        import { Answer } from "./client.js";
        const answer = new Answer();
        const delta = (delta, finish_reason = null) => answer.add({ choices: [{ delta, finish_reason }] });
        delta({ role: "assistant", content: "" });
        delta({ reasoning: "hm" });
        delta({ content: "a" });
        delta({ tool_calls: [{ index: 0, id: "c1", function: { name: "f", arguments: "{" } }] });
        delta({ tool_calls: [{ index: 1, id: "c2", function: { name: "g", arguments: "" } }] });
        delta({ tool_calls: [{ index: 0, function: { arguments: "}" } }] }, "tool_calls");
        answer.add({ choices: [], usage: {} });
        console.log(JSON.stringify([answer.content, answer.calls, answer.reasoning, answer.finishReason]));
    """)
    calls = [
        {"id": "c1", "name": "f", "arguments": "{}"},
        {"id": "c2", "name": "g", "arguments": ""},
    ]
    assert found == ["a", calls, "hm", "tool_calls"]


def test_images_are_pasted_and_dropped_and_go_with_the_next_message(node):
    found = node("""
        const listeners = {}, clicks = [];
        const made = () => ({ setAttribute() {}, append() {}, addEventListener: (_, click) => clicks.push(click) });
        globalThis.document = { addEventListener: (name, call) => { listeners[name] = call; }, createElement: made };
        globalThis.FileReader = class {
          addEventListener(name, call) { this[name] = call; }
          async readAsDataURL(file) {
            this.result = `data:${file.type};base64,${Buffer.from(await file.arrayBuffer()).toString("base64")}`;
            this.load();
          }
        };
        const { Images, contentOf, MOST_BYTES } = await import("./images.js");
        const errors = [], row = { replaceChildren: (...buttons) => { row.count = buttons.length; } };
        const images = new Images(row, (text) => errors.push(text));
        let prevented = 0;
        const event = (...files) => ({ clipboardData: { files }, dataTransfer: { files, types: ["Files"] },
                                       preventDefault: () => { prevented += 1; } });
        const file = (text, type, name = "a.png") => ({ type, name, arrayBuffer: async () => Buffer.from(text) });
        await listeners.paste(event(file("one", "image/png")));
        await listeners.paste(event());
        listeners.dragover(event());
        await listeners.drop(event(file("two", "image/jpeg"), file("no", "text/plain", "a.txt"), file("three", "image/png")));
        await listeners.drop(event(file("x".repeat(MOST_BYTES), "image/png")));
        const shown = row.count;
        clicks[clicks.length - 1]();  // takes the last one away again
        const content = contentOf("what?", images.pop());
        console.log(JSON.stringify([content, shown, row.hidden, errors, prevented, contentOf("text", images.pop())]));
    """)
    urls = [f"data:image/{kind};base64,{text}" for kind, text in (("png", "b25l"), ("jpeg", "dHdv"))]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert found[:3] == [[*parts, {"type": "text", "text": "what?"}], 3, True]
    assert "a.txt is no image" in found[3][0] and "too large" in found[3][1] and len(found[3]) == 2
    assert found[4:] == [4, "text"]


def test_whatever_a_model_calls_the_demos_functions_with_is_answered(node):
    found = node("""
        import { answer } from "./demos.js";
        const given = ['{"a": 6, "b": 7}', "", "null", "5", "[]", '"x"', "{"];
        console.log(JSON.stringify([given.map((text) => answer("multiply", text)), answer("another", "null")]));
    """)
    assert found == [["42", *["NaN"] * 5, "error: the arguments are not JSON"], None]


def test_the_time_is_that_of_the_city(node):
    cities = ["Tokyo", "tokyo, Japan", "New York", "Atlantis", ""]
    found = node(f"""
        import {{ answer }} from "./demos.js";
        const before = Date.now(), times = {cities}.map((city) => answer("get_time", JSON.stringify({{ city }})));
        console.log(JSON.stringify([times, before, Date.now()]));
    """)
    (tokyo, same, new_york, *unknown), *moments = found
    in_tokyo = {datetime.fromtimestamp(moment / 1000, timezone(timedelta(hours=9))).strftime("%H:%M") for moment in moments}
    assert {tokyo, same} <= in_tokyo
    assert re.fullmatch(r"\d\d:\d\d", new_york) and new_york != tokyo
    assert unknown == ["error: this browser knows no time zone of that name"] * 2


def test_markdown_of_any_kind_is_read_in_time(node):
    """Each text has 200,000 characters; a reader whose time grows with their square would take minutes."""
    found = node("""
        import { inline } from "./inline.js";
        import { parse } from "./markdown.js";
        const fill = (piece) => piece.repeat(200000 / piece.length), began = performance.now();
        const pieces = ["`", "` `` ", "*", "**a*", "_a_", "[", "[a](", "![a](http://b) ", "> ", "> > a\\n", "- ", "- a\\n",
          "  - a\\n", "|a|b|\\n|-|-|\\n", "|\\n", "http://", "&amp;&", "<a ", "# ", "*a **b ", "```\\n", " "];
        for (const piece of pieces) {
          const read = (blocks) => blocks.forEach((block) => { inline(block.text ?? ""); read(block.blocks ?? []); });
          read(parse(fill(piece)));
        }
        console.log(JSON.stringify(performance.now() - began < 60000));
    """)
    assert found is True


def test_only_whole_addresses_of_the_web_become_links(node):
    bad = [
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "data:text/html,x",
        "vbscript:x",
        "/metrics",
        "//a.b",
        "file:///x",
        "http:x",
    ]
    found = node(f"""
        import {{ inline, safeAddress }} from "./inline.js";
        const links = (text) => inline(text).filter((part) => part.kind === "link").map((part) => part.address);
        console.log(JSON.stringify([{json.dumps(bad)}.flatMap((one) => links(`[a](${{one}}) ![b](${{one}}) <${{one}}>`)),
          links("[a](https://a.b/c_(d)) ![b](http://c.d) <https://e.f> see https://g.h/i. (https://j.k)"), safeAddress("https://")]));
    """)
    assert found == [
        [],
        ["https://a.b/c_(d)", "http://c.d/", "https://e.f/", "https://g.h/i", "https://j.k/"],
        None,
    ]


def test_what_is_wrong_with_a_schema_is_said_with_its_place(node):
    schemas = [
        {"type": "object", "properties": {"a": {"type": "strin"}}}, [], {"required": "a"}, {"enum": []}, {"anyOf": {}},
        {"properties": []}, {"items": 3}, {"pattern": "("}, {"maxItems": -1}, {"$ref": "#/$defs/a"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["string", "null"]}}, "additionalProperties": False},
    ]  # fmt: skip
    found = node(f"""
        import {{ problem, problemOfTools }} from "./schema.js";
        console.log(JSON.stringify([...{json.dumps(schemas)}.map(problem), problemOfTools([{{}}])]));
    """)
    assert found[0].startswith('properties.a.type is "strin"')
    assert all(found[:10]) and found[10] == "" and found[11].startswith("Tool 1")


def test_a_conversation_that_is_too_long_is_kept_from_a_question_on(node):
    found = node("""
        import { newest } from "./saved.js";
        const entries = ["a", "b", "c"]
          .flatMap((x) => [{ role: "user", content: x }, { role: "assistant", content: x.repeat(50) }]);
        const first = (most) => newest(entries, most).map((entry) => entry.content[0]).join("");
        console.log(JSON.stringify([first(10000), first(250), first(150), first(20)]));
    """)
    assert found == ["aabbcc", "bbcc", "cc", ""]

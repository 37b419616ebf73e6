"""The page at / as files: who gets them and how, and that they need nothing from elsewhere; its pure scripts, run by Node."""

import asyncio
import json
import re
import subprocess
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
        assert (await api.ask("POST", "/", {}, {"Authorization": "Bearer k"})).status == 405
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
        console.log(JSON.stringify([answer.message(), answer.reasoning, answer.finishReason]));
    """)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    assert found == [{"role": "assistant", "content": "a", "tool_calls": calls}, "hm", "tool_calls"]


def test_whatever_a_model_calls_the_demos_functions_with_is_answered(node):
    found = node("""
        import { answer } from "./demos.js";
        const given = ['{"a": 6, "b": 7}', "", "null", "5", "[]", '"x"', "{"];
        console.log(JSON.stringify([given.map((text) => answer("multiply", text)), answer("another", "null")]));
    """)
    assert found == [["42", *["NaN"] * 5, "error: the arguments are not JSON"], None]

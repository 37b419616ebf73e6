"""/openapi.json says what the server does: it is valid, covers every route, and requests made from it never break anything."""

import asyncio
import json

import fake_client as http
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.frontend.http.api.openapi import document
from quire.frontend.http.api.routes import ROUTES

SPEC = json.loads(json.dumps(document(ROUTES.routes)))
OPERATIONS = [result.ok() for result in schemathesis.openapi.from_dict(SPEC).get_all_operations()]
BY_NAME = {f"{operation.method.upper()} {operation.path}": operation for operation in OPERATIONS}


def test_it_is_served_and_covers_every_route():
    async def main():
        status, spec = await http.Api().json("GET", "/openapi.json")
        assert status == 200 and spec == SPEC and spec["openapi"].startswith("3.1")
        assert {(r.method, r.path.replace(":path", "")) for r in ROUTES.routes} == {
            (method.upper(), path) for path, methods in spec["paths"].items() for method in methods
        }

    asyncio.run(main())


def test_every_schema_and_reference_is_valid():
    for schema in SPEC["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(SPEC)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in SPEC["components"]["schemas"]
    ids = [op["operationId"] for methods in SPEC["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))


# the fake engine only generates: tests/serving/test_pooling.py asks these of engines that pool
POOL_ONLY = {r.path for r in ROUTES.routes if r.tag == "pooling" and r.method == "POST"} | {"/api/embed", "/api/embeddings"}


def test_examples_are_taken_and_answers_are_as_described():
    async def main():
        for route in ROUTES.routes:
            needs_more = route.media_type != "application/json" or (route.body is not None and route.example is None)  # a file
            if (
                route.missing
                or route.path in POOL_ONLY
                or route.parameters
                or route.answer_type != "application/json"
                or needs_more
            ):
                continue
            api = http.Api()
            answer = await api.ask(route.method, route.path, route.example if route.body else None)
            await api.services.storage.close()
            assert answer.status == 200, (route.path, answer.body)
            schema = SPEC["paths"][route.path][route.method.lower()]["responses"]["200"].get("content")
            if schema is not None:
                schema = {**schema["application/json"]["schema"], "components": SPEC["components"]}
                jsonschema.validate(json.loads(answer.body), schema, jsonschema.Draft202012Validator)

    asyncio.run(main())


def test_both_may_be_left_out():
    async def main():
        api = http.Api(has_docs=False, root_path="/llm", api_keys=["k"])
        for path in ("/docs", "/openapi.json", "/llm/openapi.json"):
            status, answer = await api.json("GET", path, headers={"Authorization": "Bearer k"})
            assert (status, answer["error"]["message"]) == (404, "There is no such path here.")
        assert (await api.json("POST", "/openapi.json", {}, {"Authorization": "Bearer k"}))[0] == 404
        assert (await api.ask("GET", "/")).status == 200

    asyncio.run(main())


def test_docs_are_one_page_that_loads_nothing_from_elsewhere():
    async def main():
        api = http.Api(api_keys=["k"])
        answer = await api.ask("GET", "/docs")
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "sha256-" in policy and "unsafe" not in policy
        assert b"http://" not in answer.body and b"https://" not in answer.body and b" src=" not in answer.body
        assert (await api.ask("GET", "/openapi.json")).status == 401  # it is no static file: a page asks for the key

    asyncio.run(main())


# -------------------------------------------------------------------------------------------------- requests made from it
async def ask(case) -> None:
    """Send the case: no status beyond 499 but 501 of what is not there yet, and an answer within a second or two."""
    sent = case.as_transport_kwargs(base_url="http://x")
    path = sent["url"].removeprefix("http://x")
    if query := sent.get("params"):
        path += "?" + "&".join(f"{k}={v}" for k, v in query.items())
    body = json.dumps(sent["json"]).encode() if "json" in sent else sent.get("data")
    if body is not None and not isinstance(body, bytes):
        body = b"x"
    path = path.encode("ascii", "ignore").decode().replace(" ", "%20")
    api = http.Api()
    try:
        answer = await asyncio.wait_for(api.ask(case.method.upper(), path, body), 100)
    finally:
        await api.services.storage.close()
    allowed = answer.status < 500 or (answer.status == 501 and case.operation.definition.raw["responses"].get("501"))
    assert allowed, (case.method, path, body, answer)
    if answer.status >= 400:
        error = json.loads(answer.body)["error"]
        text = error if isinstance(error, str) else error["message"]  # a text below /api
        assert text and "Traceback" not in text


def run_cases(name: str, count: int) -> None:
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def cases(data):
        asyncio.run(ask(data.draw(BY_NAME[name].as_strategy())))

    cases()


@pytest.mark.parametrize("name", sorted(name for name in BY_NAME if "requestBody" in BY_NAME[name].definition.raw))
def test_a_few_cases_of_each_route_with_a_body(name):
    run_cases(name, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_many_cases_of_every_route(name):
    run_cases(name, 400)

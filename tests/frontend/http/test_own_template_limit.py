"""A request's own chat template, where such are trusted, has so much time and no more."""

import asyncio

import fake_client as http
import pytest

from quire.frontend.http.api import params

LOOP = "{% for i in range(99999) %}"
ENDLESS = 3 * LOOP + 3 * "{% endfor %}"


@pytest.mark.parametrize("path", [http.CHAT, "/tokenize"])
def test_a_template_without_end_is_ended(path, monkeypatch):
    monkeypatch.setattr(params, "OWN_TEMPLATE_S", 0.05)

    async def main():
        api = http.Api(trust_request_chat_template=True)
        status, answer = await api.json("POST", path, {**http.HELLO, "chat_template": ENDLESS})
        assert status == 400 and "more than 0.05 s" in answer["error"]["message"]
        own = {**http.HELLO, "chat_template": "{{ messages[0].content }}!"}
        assert (await api.ask("POST", path, own)).status == 200

    asyncio.run(main())

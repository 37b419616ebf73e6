"""One server for all tests of client packages: `quire serve` with the bundled model, as a user of these packages starts it.

It runs until the session ends. Whoever talks to it brings the key, so that every package shows where it puts one.
"""

import os
from collections.abc import Iterator

import pytest
from client_packages import KEY, Server
from serving import SMALL, Served

# LiteLLM asks the network for a list of prices when it is imported, LangChain for where to send traces.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    traces = str(tmp_path_factory.mktemp("traces"))
    with Served(*SMALL, "--api-key", KEY, "--served-model-name", "tiny", "--profile-dir", traces) as served:
        served.ready()
        yield Server(served, served.url)
        assert served.end() == 0

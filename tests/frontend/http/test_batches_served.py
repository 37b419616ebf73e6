"""Files and batches of whole servers, as the openai client uses them; frontends killed, or standing still, amid a batch."""

import json
import signal
from contextlib import suppress

import psutil
import pytest
import served as one
from deadlines import DEADLINE_S
from fake_core import FakeCore
from served import ROOMY, say_hi
from serving import Served, until

CHAT = "/v1/chat/completions"
ENDS = ("completed", "failed", "cancelled", "expired")


def lines(count: int) -> bytes:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
    return b"".join(
        json.dumps({"custom_id": f"r{i}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n" for i in range(count)
    )


def run_batch(client, data: bytes):
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def until_it_ends(client, batch):
    until(lambda: client.batches.retrieve(batch.id).status in ENDS, 2 * DEADLINE_S)
    return client.batches.retrieve(batch.id)


def ids_in(client, file_id: str) -> list[str]:
    return [json.loads(line)["custom_id"] for line in client.files.content(file_id).text.splitlines()]


def test_the_openai_clients_files_and_batches_outlive_a_server(tmp_path):
    openai = pytest.importorskip("openai")
    arguments = ["--api-key", "k", "--api-key", "other", "--files-dir", str(tmp_path / "kept")]
    with FakeCore(say_hi, limits=ROOMY) as core:
        with one.Served("--engine", core.address, *arguments) as served:
            client = openai.OpenAI(base_url=f"{served.url()}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S)
            options = {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 7200}}
            made = [client.files.create(file=(f"{i}.jsonl", lines(3)), **options) for i in range(3)]
            assert made[0].expires_at == made[0].created_at + 7200
            assert [file.id for file in client.files.list(limit=2)] == [file.id for file in reversed(made)]  # two pages
            assert client.files.retrieve(made[1].id) == made[1] and client.files.content(made[1].id).read() == lines(3)
            batches = [run_batch(client, lines(3)) for _ in range(3)]
            for batch in batches:
                ended = until_it_ends(client, batch)
                assert ended.status == "completed" and ended.request_counts.completed == 3
                assert ids_in(client, ended.output_file_id) == ["r0", "r1", "r2"]
            assert [batch.id for batch in client.batches.list(limit=1)] == [batch.id for batch in reversed(batches)]
            assert client.files.delete(made[0].id).deleted
            other = client.with_options(api_key="other")
            assert list(other.files.list()) == [] and list(other.batches.list()) == []
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    call(made[1].id)
            with pytest.raises(openai.BadRequestError, match="purpose"):
                client.files.create(file=("x", b"x"), purpose="fine-tune")
            with one.Served("--engine", core.address, *arguments) as second:
                code, err = second.wait()
                assert code == 1 and "--files-dir" in err and "in use by another server" in err
            code, err = served.end()
            assert code == 0, err
        with one.Served("--engine", core.address, *arguments) as served:
            client = client.with_options(base_url=f"{served.url()}/v1")
            assert client.files.content(made[1].id).read() == lines(3)
            assert ids_in(client, client.batches.retrieve(batches[0].id).output_file_id) == ["r0", "r1", "r2"]
            assert served.end()[0] == 0
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_frontend_goes_on_with_a_batch(number):
    openai = pytest.importorskip("openai")
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, "--frontends", "2") as served:
        served.ready()
        # A connection of its own for each request, and soon another: one may wait at the frontend that stands still.
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=20, timeout=2.0)
        frontends = [psutil.Process(pid) for pid in served.pids("quire.frontend.http")]
        batch = run_batch(client, lines(3000))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 100)
        runs_it = max(frontends, key=lambda process: sum(process.cpu_times()[:2]))
        runs_it.send_signal(number)
        ended = until_it_ends(client, batch)
        assert ended.status == "completed" and ended.request_counts.completed == 3000
        assert ids_in(client, ended.output_file_id) == [f"r{i}" for i in range(3000)]
        if number == signal.SIGSTOP:
            with suppress(psutil.NoSuchProcess):  # it was found to hang, and another is there instead
                runs_it.resume()
            until(lambda: served.health() == 200)
            assert ids_in(client, client.batches.retrieve(batch.id).output_file_id) == [f"r{i}" for i in range(3000)]
        client.close()
        assert served.end() == 0

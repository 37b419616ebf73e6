"""Terms on the wire: what a request tells its engine, and its deadline where the engine does not keep it."""

import time

import pytest
from fake_core import FakeCore
from own_loop import heard
from replica_cases import THE, with_cores

from quire.frontend.client.stream import DeadlineExceeded
from quire.frontend.client.terms import Terms
from quire.frontend.replicas.replicas import Replicas
from quire.ipc.messages.frontend import Abort, AddRequest, Tenant
from quire.ipc.sampling import SamplingParams


@with_cores({})
async def test_terms_travel_with_a_request(cores: list[FakeCore], client: Replicas) -> None:
    tenant = Tenant("a", "a", 2.0, 3, 4, 5.0, -1)
    terms = Terms(tenant, time.monotonic() + 9.0, True, "salt")
    limited = client.submit([THE], SamplingParams(), cache_salt="own", terms=terms)
    request = await heard(cores[0], AddRequest)
    assert request.tenant == tenant and request.is_bounded and 0 < request.timeout_s <= 9.0
    assert request.cache_salt == terms.salted("own")
    with pytest.raises(DeadlineExceeded):
        client.submit([THE], SamplingParams(), terms=Terms(deadline=time.monotonic() - 1.0))
    plain = client.submit([THE], SamplingParams())
    request = await heard(cores[0], AddRequest)
    assert not limited.finished and not plain.finished
    assert (request.tenant, request.timeout_s, request.is_bounded, request.cache_salt) == (None, 0.0, False, "")


@with_cores({})
async def test_a_deadline_does_not_wait_for_an_engine_that_hangs(cores: list[FakeCore], client: Replicas) -> None:
    late = client.submit([THE], SamplingParams(), terms=Terms(deadline=time.monotonic() + 5.0))
    other = client.submit([THE], SamplingParams())
    request, _ = await heard(cores[0], AddRequest), await heard(cores[0], AddRequest)
    client.expire(time.monotonic() + 5.5)
    assert not late.finished, "the engine has a moment to say so itself"
    client.expire(time.monotonic() + 7.0)
    with pytest.raises(DeadlineExceeded):
        await late.collect()
    assert (await heard(cores[0], Abort)).ids == [request.id] and not other.finished

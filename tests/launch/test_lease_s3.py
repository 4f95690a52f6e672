"""The lease of the coordinator in a store of the S3 protocol on loopback: run by `make test-storage`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.checkpoint.s3 import FaultProxy, Server
from tests.launch.test_coordinator_lease import LEASE, check_one_winner

from meshwright.launch.lease_store import ObjectLeases
from meshwright.spec.errors import BadInput

pytest.importorskip("moto")
pytest.importorskip("obstore")
URL = "s3://runs/leases/run/coordinator.json"


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    server = Server()
    proxy = FaultProxy(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield proxy
    proxy.mode = "pass"
    proxy.close()
    server.close()


def test_an_object_takes_each_version_once(proxy: FaultProxy) -> None:
    first, second = ObjectLeases(URL), ObjectLeases(URL)
    assert first.read() is None and second.read() is None
    assert first.replace(None, LEASE) and not second.replace(None, replace(LEASE, holder="b"))
    seen = second.read()
    assert seen == LEASE
    renewed = replace(LEASE, version=2)
    assert first.replace(LEASE, renewed) and not second.replace(seen, replace(renewed, holder="b"))
    assert second.read() == renewed and second.replace(renewed, replace(renewed, version=3, holder="b"))
    assert not first.replace(renewed, replace(LEASE, version=3))
    assert not first.replace(LEASE, renewed), "it is not what was read last"


def test_one_of_many_writers_takes_each_version_of_an_object(proxy: FaultProxy) -> None:
    check_one_winner(lambda: ObjectLeases(URL), threads=3, versions=5)


def test_a_store_that_fails_is_an_error_of_the_system(proxy: FaultProxy) -> None:
    store = ObjectLeases(URL)
    assert store.replace(None, LEASE)
    proxy.mode = "503"
    with pytest.raises(OSError, match="coordinator.json"):
        store.read()
    proxy.mode = "pass"
    assert store.read() == LEASE


def test_a_store_that_ignores_conditions_is_refused(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectLeases(URL)
    put = store._calls.put

    class Calls:
        get, delete = staticmethod(store._calls.get), staticmethod(store._calls.delete)

        @staticmethod
        def put(place: object, path: str, content: bytes, mode: object) -> object:
            return put(place, path, content)

    monkeypatch.setattr(store, "_calls", Calls)
    with pytest.raises(BadInput, match=r"no conditional writes \(it ignores the conditions of writes\)"):
        store.replace(None, LEASE)
    assert store.read() is None

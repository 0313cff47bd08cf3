"""Where the router finds its pods: EndpointSlices, a name, a list."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from router_http_support import held_port

from prism_server.errors import StartupError
from prism_server.router.discovery_kubernetes import KubernetesApi, KubernetesDiscovery, endpoints_of
from prism_server.router.discovery_static import DnsDiscovery, parse_backends
from prism_server.router.endpoints import Endpoint
from prism_server.router.server import discovery_of
from prism_server.router.settings import DiscoverySettings
from prism_server.router.upstream import Origin

END = "the watch's time is over"
PORTS = {"api": 8000, "admin": 9000}


def pod_entry(name: str, address: str, uid: str | None = None, **conditions: bool) -> dict[str, Any]:
    target = {"kind": "Pod", "name": name, "uid": uid or f"uid-of-{name}", "namespace": "shop"}
    return {"addresses": [address], "conditions": {"ready": True} | conditions, "targetRef": target}


def slice_of(*entries: dict[str, Any], name: str = "engines-1", version: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": "IPv4",
        "endpoints": list(entries),
        "ports": [{"name": "api", "port": 8000}, {"name": "admin", "port": 9001}],
    } | fields


class FakeApi:
    """Lists and watches `slices`, as the API server does."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.url = ""
        self.version = 1
        self.forgotten = 0
        """Watches that are refused because their version is too old."""
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeApi]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()

    def change(self, kind: str, changed: dict[str, Any]) -> None:
        self.events.put_nowait({"type": kind, "object": changed})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            target = lines[0].split(" ")[1]
            self.requests.append((target, dict(line.split(": ", 1) for line in lines[1:])))
            if "&watch=1&" in target and self.forgotten:
                self.forgotten -= 1
                writer.write(b"HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
            elif "&watch=1&" in target:
                await self._watch(writer)
            else:
                body = json.dumps({"metadata": {"resourceVersion": str(self.version)}, "items": self.slices}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            event = await self.events.get()
            if event["type"] == END:
                writer.write(b"0\r\n\r\n")
                return await writer.drain()
            line = json.dumps(event).encode() + b"\n"
            for half in (line[:20], line[20:]):  # lines need not come whole
                writer.write(b"%x\r\n%s\r\n" % (len(half), half))
                await writer.drain()


class Seen:
    """What a discovery has told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Sequence[Endpoint]] = asyncio.Queue()

    def __call__(self, endpoints: Sequence[Endpoint]) -> None:
        self.told.put_nowait(endpoints)

    async def next(self) -> dict[str, Endpoint]:
        return {endpoint.name: endpoint for endpoint in await asyncio.wait_for(self.told.get(), 20)}


Scene = Callable[[FakeApi, KubernetesDiscovery, Seen], Coroutine[Any, Any, None]]


def play(scene: Scene, credentials: Path, **fields: Any) -> None:
    """Runs `scene` beside a discovery that follows a fake API."""

    async def run() -> None:
        api, seen = FakeApi(), Seen()
        for name, value in fields.items():
            setattr(api, name, value)
        async with api.serving():
            discovery = KubernetesDiscovery(KubernetesApi(api.url, credentials), "shop", "engines", 8000, 9000)
            following = asyncio.create_task(discovery.run(seen))
            try:
                await scene(api, discovery, seen)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


def test_slices_become_pods_by_stable_name_uid_and_readiness() -> None:
    entries = [
        pod_entry("engine-0", "10.0.0.1"),
        pod_entry("engine-1", "10.0.0.2", ready=True, serving=False),  # a Service that publishes unready addresses
        pod_entry("engine-2", "10.0.0.3", serving=True, terminating=True),
        {"addresses": ["10.0.0.9"], "conditions": {}},  # no pod
    ]
    first, second, third = endpoints_of([slice_of(*entries)], PORTS)
    assert first == Endpoint(
        "engine-0", "uid-of-engine-0", api=Origin("10.0.0.1", 8000), admin=Origin("10.0.0.1", 9001)
    )
    assert (second.is_ready, second.is_terminating) == (False, False)
    assert (third.is_ready, third.is_terminating) == (False, True)


def test_a_pod_in_two_slices_is_one_and_of_two_families_the_first_is_used() -> None:
    moved = slice_of(pod_entry("engine-0", "10.0.0.1", serving=False), name="a")
    to = slice_of(pod_entry("engine-0", "10.0.0.1"), name="b")
    assert [endpoint.is_ready for endpoint in endpoints_of([moved, to], PORTS)] == [True]
    assert [endpoint.is_ready for endpoint in endpoints_of([to, moved], PORTS)] == [True]
    six = slice_of(pod_entry("engine-0", "fd00::1"), name="c", addressType="IPv6")
    (pod,) = endpoints_of([six, to], PORTS)
    assert pod.api.host == "10.0.0.1"
    (only,) = endpoints_of([six], PORTS)
    assert only.api.authority == b"[fd00::1]:8000"


def test_an_endpoint_that_cannot_be_told_from_others_is_passed_over() -> None:
    nameless = pod_entry("engine-1", "10.0.0.2") | {"targetRef": {"kind": "Pod", "name": "engine-1"}}
    homeless = pod_entry("engine-2", "10.0.0.3") | {"addresses": []}
    found = endpoints_of([slice_of(nameless, homeless, pod_entry("engine-0", "10.0.0.1"))], PORTS)
    assert [endpoint.name for endpoint in found] == ["engine-0"]


def test_of_several_ports_each_listener_has_its_own_by_name() -> None:
    ports = [{"name": "metrics", "port": 1}, {"name": "admin", "port": 2}, {"name": "api", "port": 3}]
    other = slice_of(pod_entry("engine-1", "10.0.0.2"), name="b", ports=[{"name": "api", "port": 4}])
    one, two = endpoints_of([slice_of(pod_entry("engine-0", "10.0.0.1"), ports=ports), other], PORTS)
    assert [(pod.api.port, pod.admin.port) for pod in (one, two)] == [(3, 2), (4, 9000)]


def test_ports_that_a_slice_does_not_name_have_their_defaults() -> None:
    (pod,) = endpoints_of([slice_of(pod_entry("engine-0", "10.0.0.1"), ports=None)], PORTS)
    assert (pod.api.port, pod.admin.port) == (8000, 9000)


def test_the_watch_tells_every_change(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")

    async def scene(api: FakeApi, discovery: KubernetesDiscovery, seen: Seen) -> None:
        assert (await seen.next()).keys() == {"engine-0"}
        two = [pod_entry("engine-0", "10.0.0.1"), pod_entry("engine-1", "10.0.0.2", ready=False)]
        api.change("MODIFIED", slice_of(*two, version=2))
        assert not (await seen.next())["engine-1"].is_ready
        api.change("BOOKMARK", {"metadata": {"resourceVersion": "3"}})
        again = pod_entry("engine-0", "10.0.0.7", uid="another")
        api.change("ADDED", slice_of(again, name="engines-2", version=4))
        pods = await asyncio.wait_for(seen.told.get(), 20)
        assert [(pod.name, pod.uid) for pod in pods] == [
            ("engine-0", "another"),
            ("engine-0", "uid-of-engine-0"),
            ("engine-1", "uid-of-engine-1"),
        ]
        api.change("DELETED", slice_of(name="engines-1", version=5))
        assert (await seen.next())["engine-0"].uid == "another"
        assert discovery.age_s(asyncio.get_running_loop().time() + 100) == 0.0
        listing, watching = api.requests
        assert "/namespaces/shop/endpointslices?" in listing[0]
        assert "kubernetes.io/service-name" in listing[0]
        assert listing[1]["authorization"] == "Bearer first"
        assert "resourceVersion=1" in watching[0]

    play(scene, tmp_path, slices=[slice_of(pod_entry("engine-0", "10.0.0.1"))])


def test_a_forgotten_version_is_listed_anew_with_the_token_of_that_moment(tmp_path: Path) -> None:
    async def scene(api: FakeApi, discovery: KubernetesDiscovery, seen: Seen) -> None:
        assert await seen.next() == {}
        while len(api.requests) < 2:
            await asyncio.sleep(0.01)
        (tmp_path / "token").write_text("second\n")
        api.slices, api.version = [slice_of(pod_entry("engine-0", "10.0.0.1"), version=9)], 9
        api.change("ERROR", {"code": 410, "message": "too old resource version"})
        assert (await seen.next()).keys() == {"engine-0"}
        assert [request[1].get("authorization") for request in api.requests[:3]] == [None, None, "Bearer second"]
        while len(api.requests) < 4:
            await asyncio.sleep(0.01)
        assert "resourceVersion=9" in api.requests[3][0]

    play(scene, tmp_path)


def test_a_watch_goes_on_from_the_last_bookmark_and_a_refused_one_from_a_new_list(tmp_path: Path) -> None:
    async def scene(api: FakeApi, discovery: KubernetesDiscovery, seen: Seen) -> None:
        assert (await seen.next()).keys() == {"engine-0"}
        api.change("BOOKMARK", {"metadata": {"resourceVersion": "30"}})
        api.change(END, {})
        api.change("ADDED", slice_of(pod_entry("engine-1", "10.0.0.2"), name="engines-2", version=31))
        assert (await seen.next()).keys() == {"engine-0", "engine-1"}
        asked = [target for target, _ in api.requests]
        assert ["&watch=1&" in target for target in asked] == [False, True, True]
        assert "resourceVersion=30" in asked[2]
        api.forgotten, api.version = 1, 50
        api.slices = [slice_of(pod_entry("engine-2", "10.0.0.3"), version=50)]
        api.change(END, {})
        assert (await seen.next()).keys() == {"engine-2"}
        api.change("BOOKMARK", {"metadata": {"resourceVersion": "51"}})
        while len(api.requests) < 6:
            await asyncio.sleep(0.01)
        asked = [target for target, _ in api.requests[3:6]]
        assert ["&watch=1&" in target for target in asked] == [True, False, True]
        assert "resourceVersion=50" in asked[2]

    play(scene, tmp_path, slices=[slice_of(pod_entry("engine-0", "10.0.0.1"))])


def test_a_lost_watch_keeps_the_last_pods_and_grows_old_until_the_api_is_back(tmp_path: Path) -> None:
    async def run(port: int) -> None:
        api, seen = FakeApi(), Seen()
        api.slices = [slice_of(pod_entry("engine-0", "10.0.0.1"))]
        loop = asyncio.get_running_loop()
        async with api.serving(port):
            discovery = KubernetesDiscovery(KubernetesApi(api.url, tmp_path), "shop", "engines", 8000, 9000)
            assert discovery.age_s(loop.time()) is None
            following = asyncio.create_task(discovery.run(seen))
            await seen.next()
            while len(api.requests) < 2:
                await asyncio.sleep(0.01)
        while not discovery.age_s(loop.time()):
            await asyncio.sleep(0.01)
        assert seen.told.empty()
        api.slices = [slice_of(pod_entry("engine-1", "10.0.0.2"))]
        async with api.serving(port):
            assert (await seen.next()).keys() == {"engine-1"}
            assert discovery.age_s(loop.time()) == 0.0
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    with held_port() as held:
        asyncio.run(run(held.getsockname()[1]))


def test_a_name_gives_its_addresses() -> None:
    async def run() -> None:
        seen = Seen()
        following = asyncio.create_task(DnsDiscovery("localhost", 8000, 9000, 60.0).run(seen))
        pods = await seen.next()
        assert pods["127.0.0.1"].api == Origin("127.0.0.1", 8000)
        assert pods["127.0.0.1"].admin == Origin("127.0.0.1", 9000)
        following.cancel()

    asyncio.run(run())


def test_a_names_addresses_come_and_go_and_a_failure_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with addresses of two families means each pod once."""
    answers: list[list[str] | int] = [
        ["10.0.0.2", "fd00::2", "10.0.0.1", "fd00::1"],
        socket.EAI_AGAIN,
        ["10.0.0.1", "10.0.0.2"],
        ["10.0.0.3", "10.0.0.2"],
        socket.EAI_NODATA,
        ["fd00::2", "fd00::1"],
        socket.EAI_NONAME,
    ]

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        answer = answers.pop(0) if answers else socket.EAI_AGAIN
        if isinstance(answer, int):
            raise socket.gaierror(answer, "as the test says")
        six, four = socket.AF_INET6, socket.AF_INET
        return [(six if ":" in address else four, 0, 0, "", (address, port)) for address in answer]

    async def run() -> None:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        seen = Seen()
        following = asyncio.create_task(DnsDiscovery("engines", 8000, 9000, 0.01).run(seen))
        told = [sorted(await seen.next()) for _ in range(5)]
        assert told == [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"], [], ["fd00::1", "fd00::2"], []]
        following.cancel()

    asyncio.run(run())


def test_a_list_gives_hosts_with_their_admin_listeners() -> None:
    one, two, three = parse_backends("http://a, http://b:8001 ,[::1]:8002|http://c:9001", 9000)
    assert (one.api, one.admin) == (Origin("a", 8000), Origin("a", 9000))
    assert (two.name, two.api, two.admin) == ("b:8001", Origin("b", 8001), Origin("b", 9000))
    assert (three.api, three.admin) == (Origin("::1", 8002), Origin("c", 9001))


@pytest.mark.parametrize("text", ["https://a:8000", "http://a:8000/v1", "http://a:port", "http://a,http://a:8000", ","])
def test_a_list_that_means_nothing_is_a_start_up_error(text: str) -> None:
    with pytest.raises(StartupError):
        parse_backends(text, 9000)


def test_in_a_cluster_the_api_server_and_the_namespace_are_found(tmp_path: Path) -> None:
    settings = DiscoverySettings(service="engines", credentials=tmp_path)
    with pytest.raises(StartupError, match="needs a cluster"):
        discovery_of(settings, {})
    with pytest.raises(StartupError, match="namespace"):
        discovery_of(settings, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    (tmp_path / "namespace").write_text("shop\n")
    assert isinstance(discovery_of(settings, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}), KubernetesDiscovery)

"""The two ends between processes: the control connection (ZMQ) and Mooncake over tcp, by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from octavo.disagg import protocol as p
from octavo.disagg import zmq_hub
from octavo.disagg.layout import fingerprint
from octavo.disagg.protocol import Region
from octavo.disagg.transport.base import Copy, Status, Ticket, copies_of
from octavo.disagg.transport.mooncake import MooncakeTransport
from octavo.disagg.zmq_hub import ZmqHub
from octavo.errors import ConfigError
from octavo.model.load import load_model
from octavo.model.load.expected import expected_tensors
from tests.api.serving import ROOT, free_port, until
from tests.disagg.road import DataRoad
from tests.unit.load_files import hf_config_json, random_tensors, tiny, write_folder

LAYOUT = p.Layout(2, "m", "w", "float32: fp32 × 9", 16, "float32", 4, 0, 2, 16, 0, "none", "little")


def mail(hub: ZmqHub) -> list[tuple[str, p.Message | p.PeerDown]]:
    until(hub.has_mail)
    return hub.receive()


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_hub, "BEAT_S", 0.1)
    monkeypatch.setattr(zmq_hub, "SILENT_S", 1.0)
    monkeypatch.setattr(zmq_hub, "CONNECT_S", 1.0)


@pytest.fixture
def hubs(quick_beats: None) -> Iterator[tuple[ZmqHub, ZmqHub, str]]:
    port = free_port()
    server, client = ZmqHub(("127.0.0.1", port)), ZmqHub(None)
    yield server, client, f"127.0.0.1:{port}"
    client.close()
    server.close()


def test_messages_both_ways_in_order_and_quick_answers(hubs: tuple[ZmqHub, ZmqHub, str]) -> None:
    server, client, address = hubs
    server.quick = lambda peer, message: p.Refuse("no") if isinstance(message, p.Hello) else None
    client.send(address, p.Hello(LAYOUT))
    for i in range(20):
        client.send(address, p.Read(i, i, True))
    got: list[tuple[str, p.Message | p.PeerDown]] = []
    until(lambda: (got.extend(server.receive()), len(got) >= 21)[1])
    assert [m.room for _, m in got[1:]] == list(range(20)) and len({peer for peer, _ in got}) == 1
    assert mail(client) == [(address, p.Refuse("no"))]
    server.send(got[0][0], p.Kept(5, 5, True))
    assert mail(client) == [(address, p.Kept(5, 5, True))]


def test_a_silent_peer_is_down_and_a_restarted_one_is_another(quick_beats: None) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    server, client = ZmqHub(("127.0.0.1", port)), ZmqHub(None)
    client.send(address, p.Hello(LAYOUT))
    mail(server)
    time.sleep(1.5)
    assert not client.has_mail(), "beats keep it up"
    server.close()
    (name, down), *_ = mail(client)
    assert name == address and isinstance(down, p.PeerDown) and down.final, "its port is closed"
    again = ZmqHub(("127.0.0.1", port))
    client.send(address, p.Hello(LAYOUT))
    assert isinstance(mail(again)[0][1], p.Hello)
    client.close()
    until(again.has_mail)
    assert isinstance(again.receive()[-1][1], p.PeerDown)
    again.close()


@pytest.mark.parametrize("stopped_s", [0.5, 1.0, 1.9, 3.0, 60.0])
@pytest.mark.parametrize("begun", [0.01, 0.5, 0.99])
def test_a_machine_that_stood_still_takes_nobody_for_silent(stopped_s: float, begun: float) -> None:
    """Both ends stop at once, `begun` of a beat behind ours; theirs was to come right then, and is not read yet."""
    client = ZmqHub(None)
    client.close()
    ours_s = 1000.0
    client._peers["other"] = zmq_hub._Peer(7, ours_s + begun - zmq_hub.BEAT_S, None, True)
    now_s = ours_s + begun + stopped_s
    client._dispatch = lambda name, message: None  # type: ignore[method-assign]
    client._beat(now_s, now_s - ours_s - zmq_hub.BEAT_S)
    assert "other" in client._peers and client._peers["other"].heard_s <= now_s
    client._beat(now_s + 3 * zmq_hub.BEAT_S, 0.0)
    assert "other" not in client._peers, "silence behind that counts"


def test_nobody_there(quick_beats: None) -> None:
    client = ZmqHub(None)
    client.send(f"127.0.0.1:{free_port()}", p.Hello(LAYOUT))
    (_, down), *_ = mail(client)
    assert isinstance(down, p.PeerDown) and "not reachable" in down.reason
    client.close()


def test_what_is_no_message_is_ignored(hubs: tuple[ZmqHub, ZmqHub, str]) -> None:
    server, client, address = hubs
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{address}")
    for junk in (b"", b"x", b"\xff" * 40, os.urandom(200)):
        stranger.send(junk)
    stranger.send((1).to_bytes(8, "little") + bytes(8) + p.encoder.encode(p.Read(1, 1, True)))  # not introduced
    client.send(address, p.Hello(LAYOUT))
    assert [type(m) for _, m in mail(server)] == [p.Hello]
    context.destroy(linger=0)


def test_a_port_in_use_is_refused() -> None:
    port = free_port()
    server = ZmqHub(("127.0.0.1", port))
    with pytest.raises(ConfigError, match=f"bootstrap_port: got {port}"):
        ZmqHub(("127.0.0.1", port))
    server.close()


def test_neighbours_on_both_sides_are_one_copy() -> None:
    local, remote = Region(1000, 10, 50), Region(5000, 10, 50)
    assert copies_of(local, remote, [1, 2, 3], [7, 8, 9]) == [Copy(1010, 5070, 30)]
    assert copies_of(local, remote, [1, 3, 4], [7, 8, 9]) == [Copy(1010, 5070, 10), Copy(1030, 5080, 20)]
    assert copies_of(local, remote, [2, 1], [2, 1]) == [Copy(1020, 5020, 10), Copy(1010, 5010, 10)]
    assert copies_of(local, remote, [], []) == []


SOURCE = """
import sys, numpy as np
from octavo.disagg.layout import fingerprint
from octavo.disagg.protocol import Region
from octavo.disagg.transport.mooncake import MooncakeTransport
memory = np.arange(256 * 8192, dtype=np.int64)
transport = MooncakeTransport("127.0.0.1")
transport.register([Region(memory.ctypes.data, 65536, 256)])
print(transport.address, memory.ctypes.data, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def source_process() -> Iterator[tuple[subprocess.Popen[str], str, Region]]:
    """A process whose memory can be read: page n holds the numbers from n * 8192 on. Yields it, address and region."""
    source = subprocess.Popen([sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, stderr=subprocess.DEVNULL)
    assert source.stdout is not None
    try:
        address, base = source.stdout.readline().split()
        yield source, address, Region(int(base), 65536, 256)
    finally:
        source.kill()
        source.wait()


class Reader:
    """This process's end: 256 pages of -1."""

    def __init__(self) -> None:
        self.transport = MooncakeTransport("127.0.0.1")
        memory = np.full(256 * 8192, -1, dtype=np.int64)
        self.pages = memory.reshape(256, 8192)
        self.region = Region(memory.ctypes.data, 65536, 256)
        self.transport.register([self.region])

    def read(self, address: str, remote: Region, targets: list[int], sources: list[int]) -> Ticket:
        return self.transport.read(address, copies_of(self.region, remote, targets, sources))

    def holds(self, targets: list[int], sources: list[int]) -> bool:
        return all((self.pages[t] == np.arange(s * 8192, (s + 1) * 8192)).all()
                   for t, s in zip(targets, sources, strict=True))


def test_mooncake_moves_pages_and_never_calls_a_failure_final() -> None:
    with source_process() as (source, address, remote):
        here = Reader()
        woken: list[int] = []
        here.transport.on_final(lambda: woken.append(1))
        targets, sources = list(range(0, 120, 2)), list(range(1, 121, 2))
        ticket = here.read(address, remote, targets, sources)
        until(lambda: ticket.status is not Status.PENDING)
        assert ticket.status is Status.DONE, ticket.error
        assert woken and ticket.moved_bytes == 60 * 65536
        assert here.holds(targets, sources)
        assert (here.pages[1:120:2] == -1).all(), "pages between are untouched"
        os.kill(source.pid, signal.SIGSTOP)
        late = here.read(address, remote, [200], [200])
        time.sleep(1)
        assert late.status is Status.PENDING and (here.pages[200] == -1).all()
        os.kill(source.pid, signal.SIGCONT)
        until(lambda: late.status is not Status.PENDING)
        assert late.status is Status.DONE and here.holds([200], [200])
        source.kill()
        source.wait()
        dead = here.read(address, remote, [201], [201])
        until(lambda: dead.status is not Status.PENDING)
        assert dead.status is Status.UNKNOWN
        readers = [t for t in threading.enumerate() if t.name == f"read-{address}"]
        assert len(readers) == 1
        here.transport.forget(address)
        readers[0].join(60)
        assert not readers[0].is_alive(), "a former life of a server keeps no thread"
        here.transport.close()


@pytest.mark.parametrize("same", ["address", "data port", "both"])
def test_another_life_behind_the_address_of_a_former_one(same: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports are used again, by a server that is started anew as by a stranger: what was known of the former owner's
    memory and connections must not be taken for the new one's."""
    create, ports = socket.create_server, [0, 0]
    monkeypatch.setattr(socket, "create_server", lambda address: create((address[0], ports.pop(0))))
    with source_process() as (_, first, remote), source_process() as (_, second, other):
        here = Reader()
        road = DataRoad(first)
        before = here.read(road.address, remote, [1], [1])
        until(lambda: before.status is not Status.PENDING)
        assert before.status is Status.DONE and here.holds([1], [1])
        road.close()
        ports += [road.rpc_port if same != "data port" else 0, road.data_port if same != "address" else 0]
        road = DataRoad(second)
        for page in (2, 3):
            ticket = here.read(road.address, other, [page], [page])
            until(lambda ticket=ticket: ticket.status is not Status.PENDING)
            assert ticket.status is Status.DONE, ticket.error
            assert here.holds([page], [page])
        here.transport.close()
        road.close()


def test_weights_are_known_by_what_they_are(tmp_path: Path) -> None:
    """Not by what they are called; and whichever tensor is another one, it is another model."""
    config = tiny("llama")
    weights = random_tensors(expected_tensors(config))
    one, two = (write_folder(tmp_path / name, hf_config_json(config, "LlamaForCausalLM"), weights)
                for name in ("one", "two"))
    models = [load_model(path) for path in (one, two)]
    assert [model.name for model in models] == ["one", "two"]
    assert fingerprint(models[0]) == fingerprint(models[1])
    ours, theirs = (msgspec.structs.replace(LAYOUT, model=model.name, weights=fingerprint(model)) for model in models)
    assert p.differences(ours, theirs) == []
    seen = {fingerprint(models[0])}
    for number, name in enumerate(weights):
        changed = {**weights, name: weights[name] * 1.01}
        folder = write_folder(tmp_path / f"tuned{number}", hf_config_json(config, "LlamaForCausalLM"), changed)
        seen.add(fingerprint(load_model(folder)))
    assert len(seen) == 1 + len(weights)
    strange = p.differences(ours, msgspec.structs.replace(theirs, weights="f" * 16))
    assert strange == [f"weights fingerprint: prefill has {ours.weights} (one), decode has {'f' * 16} (two)"]

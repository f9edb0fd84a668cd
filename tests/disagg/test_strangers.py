"""What cannot be right on the control connection, from whoever it comes: bytes that are no message, messages whose
numbers are impossible, hosts that nobody has. It never ends a server, nor a request that it is not about."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq

from octavo.disagg import protocol as p
from octavo.disagg import zmq_hub
from octavo.disagg.failures import SAID_CHARACTERS
from octavo.disagg.hub import LocalNet
from octavo.disagg.zmq_hub import ControlLost, ZmqHub
from octavo.engine.request import Bootstrap, EngineRequest
from octavo.errors import RequestError
from octavo.params import SamplingParams
from tests.api.serving import free_port, until
from tests.clock import running_time
from tests.disagg.pair import DECODE, PREFILL, Pair, make_core
from tests.disagg.processes import Trio
from tests.disagg.road import road
from tests.disagg.test_ends import LAYOUT
from tests.disagg.test_pair import drafts as drafts
from tests.engine.test_core import GREEDY, prompts, solo

pack = msgspec.msgpack.encode
INTS = [-(2**63), -1, 0, 1, 7, 16, 2**31, 2**40, 2**63 - 1, 2**64 - 1]
HEADER = struct.pack("<QQ", 77, 0)
ROOMS = iter(range(8_000_000, 9_000_000))


def not_messages() -> list[bytes]:
    """Frames that no peer sends: noise, wrong types, missing keys, lengths that are not there, nesting without end."""
    rng = random.Random(1)
    pages = [b"\x96", pack("pages"), pack(1), pack(1), pack("full"), pack(0)]
    real = [p.encoder.encode(m) for m in (p.Hello(LAYOUT), p.Want(1, 1, 9, 0, 0, b"x" * 16), p.Read(1, 1, True),
                                          p.Pages(1, 1, "full", 0, [1, 2]), p.Gone(1, 1, "x"))]
    bodies = [
        b"", b"\xc0", pack(5), pack("hello"), pack({"hello": 1}), pack([]), pack(["nobody", 1]), pack(["hello"]),
        pack(["hello", None]), pack(["hello", ["x"] * 13]), pack(["want", 1, 1]), pack(["read", "1", 1, True]),
        pack(["pages", 1, 1, "full", 0, [1.5]]), pack(["read", 1, 1, 1]), pack(["want", 1, 1, 1, 1, 1, "text"]),
        b"".join([*pages, b"\xdd\xff\xff\xff\xff", pack(1)]),  # a list of four billion
        b"\x96" + pack("want") + pack(1) * 5 + b"\xc6\xff\xff\xff\xffab",  # four gigabytes of bytes
        b"\x92" + pack("beat") + b"\x91" * 200_000 + b"\xc0",  # nesting in what nobody reads
        b"\x92" + pack("hello") + b"\x91" * 200_000 + b"\xc0",
        b"\x92" + pack("refuse") + b"\xa2\xff\xfe", b"\x92\xa2\xff\xfe\xc0", real[0] + b"more",
        *(body[: rng.randrange(len(body))] for body in real for _ in range(5)),
        *(bytes(b ^ (rng.random() < 0.05) * rng.randrange(256) for b in body) for body in real for _ in range(20)),
        *(rng.randbytes(rng.randrange(1, 300)) for _ in range(100)),
    ]
    return [b"", b"x", HEADER[:-1], *(HEADER + body for body in bodies), *(rng.randbytes(400) for _ in range(20))]


def intrude(address: str) -> None:
    """Every frame of `not_messages`, from one who has not introduced himself and from one who has; then bytes that are
    no ZMQ at all, and a frame whose length is a lie."""
    context = zmq.Context()
    for hello in (None, HEADER + p.encoder.encode(p.Hello(LAYOUT))):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 5000)
        stranger.connect(f"tcp://{address}")
        for frame in ([] if hello is None else [hello]) + not_messages():
            stranger.send(frame)
            stranger.send_multipart([frame, b"", frame])
        stranger.close()
    host, _, port = address.rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    for data in (b"GET / HTTP/1.1\r\n\r\n", random.Random(2).randbytes(5000), greeting, greeting + b"\x04\xff" * 20,
                 greeting + ready + b"\x02" + b"\x7f" + b"\xff" * 7 + b"x" * 1000):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5) as raw:
            raw.sendall(data)
            raw.settimeout(0.2)
            raw.recv(100)
    context.term()


@contextlib.contextmanager
def two_hubs() -> Iterator[tuple[ZmqHub, ZmqHub, str]]:
    port = free_port()
    server, client = ZmqHub(("127.0.0.1", port)), ZmqHub(None)
    try:
        yield server, client, f"127.0.0.1:{port}"
    finally:
        client.close()
        server.close()


def exchange(server: ZmqHub, client: ZmqHub, address: str, number: int) -> None:
    """One message to the server and one back."""
    seen: list[tuple[str, Any]] = []
    client.send(address, p.Read(number, 1, True))
    until(lambda: (seen.extend(server.receive()), any(m == p.Read(number, 1, True) for _, m in seen))[1])
    peer = next(name for name, m in seen if m == p.Read(number, 1, True))
    back: list[Any] = []
    server.send(peer, p.Kept(number, 1, True))
    until(lambda: (back.extend(client.receive()), (address, p.Kept(number, 1, True)) in back)[1])


def test_a_hub_outlives_what_is_no_message() -> None:
    with two_hubs() as (server, client, address):
        client.send(address, p.Hello(LAYOUT))
        exchange(server, client, address, 1)
        intrude(address)
        exchange(server, client, address, 2)


def test_a_hub_outlives_hosts_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking a name up may take as long as it likes: meanwhile others are heard, and beats are sent."""
    asked, go_on = threading.Event(), threading.Event()

    def look_up(name: str) -> tuple[str, str]:
        asked.set()
        go_on.wait()
        return "", "nobody has this name"

    monkeypatch.setattr(zmq_hub, "look_up", look_up)
    monkeypatch.setattr(zmq_hub, "CONNECT_S", 1e9)
    with two_hubs() as (server, client, address):
        client.send(address, p.Hello(LAYOUT))
        client.send("slow.example:80", p.Hello(LAYOUT))
        asked.wait()
        exchange(server, client, address, 1)
        for name in ("[fe80::1%nothing]:80", "0.0.0.0:1", "255.255.255.255:9"):
            client.send(name, p.Hello(LAYOUT))
        go_on.set()
        seen: list[Any] = []
        until(lambda: (seen.extend(client.receive()), any(name == "slow.example:80" for name, _ in seen))[1])
        down = next(m for name, m in seen if name == "slow.example:80")
        assert down == p.PeerDown("its host name cannot be looked up: nobody has this name", False)
        exchange(server, client, address, 2)


def test_a_name_that_leads_to_a_server_is_followed() -> None:
    with two_hubs() as (server, client, address):
        named = address.replace("127.0.0.1", "localhost")
        client.send(named, p.Hello(LAYOUT))
        exchange(server, client, named, 1)


def test_a_hub_that_has_failed_says_so() -> None:
    """A fault of ours on its thread: the engine hears of it, and ends instead of seeming well."""
    hub = ZmqHub(None)
    hub.send("no port", p.Hello(LAYOUT))
    until(hub.has_mail)
    with pytest.raises(ControlLost, match="no port"):
        hub.receive()
    hub.close()


# -- messages that are well formed and cannot be right ---------------------------------------------------------------


def wrong_value(rng: random.Random, value: Any) -> Any:
    """A value of the type that the protocol wants, out of the range of what can be."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([*INTS, value - 1, value + 1])
    if isinstance(value, str):
        return rng.choice(["", "full", "swa", "x" * 100_000, "\x00\n%s{}"])
    if isinstance(value, bytes):
        return rng.choice([b"", value + b"x", b"\xff" * len(value), None])
    if isinstance(value, list):
        return rng.choice([[], [-1], [2**40], value * 1000, value[:-1], [rng.choice(INTS)] * len(value), value[::-1]])
    if isinstance(value, dict):
        return rng.choice([{}, {name: wrong(rng, region) for name, region in value.items()}])
    if isinstance(value, msgspec.Struct):
        return wrong(rng, value)
    return rng.choice([None, (math.nan, [(-1, math.inf)]), (0.0, [(2**63, 0.0)]), (0.0, [])])


def wrong(rng: random.Random, message: Any) -> Any:
    """`message` with one field, or all of them, replaced; as it arrives when it has been through the wire's types."""
    fields = list(message.__struct_fields__)
    chosen = fields if not fields or rng.random() < 0.1 else [rng.choice(fields)]
    return msgspec.structs.replace(message, **{f: wrong_value(rng, getattr(message, f)) for f in chosen})


def arrived(message: Any) -> Any | None:
    """What the decoder makes of it; None where it refuses it."""
    try:
        return p.decoder.decode(p.encoder.encode(message))
    except (msgspec.MsgspecError, OverflowError, TypeError):
        return None


TOKENS = prompts(1, seed=2, low=90, high=90)[0]
OTHER = prompts(1, seed=3, low=50, high=50)[0]
HOSTILE, VICTIM = "127.0.0.1:2", "decode2"
LOGPROBS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


def settle(pair: Pair, extra: list[Any]) -> list[Any]:
    """Step until nothing moves; time passes where only deadlines are left."""
    outputs = []
    for i in range(3000):
        cores = [*pair.cores.values(), *extra]
        if not any(core.has_work() or core.side.open for core in cores):
            return outputs
        pair.step()
        for core in extra:
            outputs += core.step()
        if i % 40 == 39:
            pair.clock.advance(6.0)
    raise AssertionError([core.side.report() for core in (*pair.cores.values(), *extra)])


@pytest.mark.parametrize("draft", ["none", "eagle3"])
@pytest.mark.parametrize("hostile", ["prefill", "decode"])
def test_a_server_that_sends_nonsense_harms_only_its_own_rooms(
    hostile: str, draft: str, drafts: dict[str, str]
) -> None:
    """One of three servers changes what it says. Whatever it is, nobody fails but the rooms it has a part in; what is
    answered in them is right or an error; the others' requests, in the same steps, are answered; the books close."""
    kind = "gemma3" if draft == "none" else "llama"
    options: dict[str, Any] = {"page_size": 16, "max_batched_tokens": 32, "room_timeout_s": 20.0}
    if draft != "none":
        options |= {"draft": draft, "draft_model": drafts[f"{kind}-{draft}"], "draft_adaptive": False}
    pair = Pair(kind, **options)
    name = HOSTILE if hostile == "prefill" else VICTIM
    third = make_core(hostile, pair.net, pair.wire, kind, {}, clock=pair.clock, name=name, **options)
    carry, rng, forged, failures = pair.net.carry, random.Random(f"{hostile}{draft}"), set(), 0

    def forge(sender: str, receiver: str, message: Any) -> None:
        if sender == name and rng.random() < 0.4:
            changed = arrived(wrong(rng, message))
            if changed is not None:
                forged.add(type(message))
                carry(sender, receiver, changed)
            if rng.random() < 0.5:
                return
        carry(sender, receiver, message)

    pair.net.carry = forge  # type: ignore[method-assign]
    want, other = solo(kind, TOKENS, LOGPROBS), solo(kind, OTHER)
    for i in range(60):
        room, port = next(ROOMS), 2 if hostile == "prefill" else 1
        call = EngineRequest(f"r{i}", TOKENS, LOGPROBS, bootstrap=Bootstrap("127.0.0.1", port, [room]))
        sides = (third, pair.decode) if hostile == "prefill" else (pair.prefill, third)
        for core in sides:
            core.add_request(call)
        pair.ask(f"o{i}", OTHER, GREEDY, rooms=[next(ROOMS)])
        outputs = settle(pair, [third])
        assert pair.tokens(f"o{i}") == other and pair.end("decode", f"o{i}").error is None
        got = pair.outputs["decode", f"r{i}"] if hostile == "prefill" else [
            output for output in outputs if output.request_id == f"r{i}"]
        assert got[-1].finished
        failures += got[-1].error is not None
        if got[-1].error is None and hostile == "decode":
            assert [t for o in got for t in o.token_ids] == want
    assert len(forged) >= 3 and 0 < failures < 60
    pair.net.carry = carry  # type: ignore[method-assign]
    third.close()
    pair.close()


def test_strangers_change_nothing() -> None:
    """Well-formed messages with impossible numbers about rooms that are not theirs."""
    pair = Pair("gemma3", page_size=16, max_batched_tokens=32)
    rng = random.Random(4)
    layout, region = pair.prefill.side.layout, next(iter(pair.prefill.side.regions.values()))
    kinds = [p.Hello(layout), p.Want(1, 1, 90, 0, 64, b"x" * 16), p.Read(1, 1, True), p.Drop(1, 0, "x"),
             p.Welcome("inprocess", "x", {"full": region}), p.Refuse("x"), p.Pages(1, 1, "full", 0, [1, 2]),
             p.Computed(1, 1, 5, None, 0, b"x"), p.Kept(1, 1, True), p.Gone(1, 1, "x"), p.Beat()]
    for name in range(3):
        pair.net.hub(f"stranger{name}")
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(30):
        for message in kinds:
            for receiver in (PREFILL, DECODE):
                changed = arrived(wrong(rng, message))
                if changed is not None:
                    pair.net.carry(f"stranger{rng.randrange(3)}", receiver, changed)
        pair.step()
    for name in range(3):
        pair.prefill.side._peer_down(f"stranger{name}", "it has left")
    pair.run()
    assert pair.tokens("r") == solo("gemma3", TOKENS)
    pair.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"token": -1}, "token -1 is outside the vocabulary"), ({"token": 2**63}, "outside the vocabulary"),
     ({"cached_tokens": -1}, "-1 of 90 prompt tokens"), ({"cached_tokens": 91}, "91 of 90 prompt tokens"),
     ({"logprob": None}, "no log-probabilities"), ({"logprob": (math.nan, [])}, "ones that cannot be"),
     ({"logprob": (0.0, [(-1, 0.0)])}, "ones that cannot be"), ({"seed": None}, "got none"),
     ({"seed": b"1234"}, "got 4 bytes"), ({"seed": np.full(64, np.inf, np.float32).tobytes()}, "finite float32")],
)  # fmt: skip
def test_metadata_that_cannot_be_is_refused(change: dict[str, Any], named: str, drafts: dict[str, str]) -> None:
    pair = Pair("llama", page_size=16, draft="eagle3", draft_model=drafts["llama-eagle3"])
    carry = pair.net.carry

    def forge(sender: str, receiver: str, message: Any) -> None:
        if isinstance(message, p.Computed):
            message = msgspec.structs.replace(message, **change)
        carry(sender, receiver, message)

    pair.net.carry = forge  # type: ignore[method-assign]
    pair.ask("r", TOKENS, LOGPROBS)
    pair.run()
    error = pair.end("decode", "r").error
    assert error is not None and error.status == 502 and named in str(error), error
    assert pair.decode.side.tally.snapshot()["failures"] == {"bad_message": 1}
    pair.net.carry = carry  # type: ignore[method-assign]
    pair.ask("next", TOKENS, LOGPROBS)
    pair.run()
    assert pair.tokens("next") == solo("llama", TOKENS, LOGPROBS)
    pair.close()


def test_pages_that_do_not_exist_are_refused() -> None:
    for ids in ([-1], [2**40]):
        pair = Pair("gemma3", page_size=16)
        carry = pair.net.carry

        def forge(sender: str, receiver: str, message: Any, carry: Any = carry, ids: list[int] = ids) -> None:
            if isinstance(message, p.Pages):
                message = msgspec.structs.replace(message, ids=ids * len(message.ids))
            carry(sender, receiver, message)

        pair.net.carry = forge  # type: ignore[method-assign]
        pair.ask("r", TOKENS, GREEDY)
        pair.run()
        assert "announced pages do not exist" in str(pair.end("decode", "r").error) and pair.wire.reads == 0
        pair.close()


def test_what_another_server_says_is_cut() -> None:
    pair = Pair()
    pair.net.lose = lambda sender, receiver, message: isinstance(message, p.Welcome)
    pair.ask("r", TOKENS, GREEDY, sides=["decode"])
    pair.net.carry(PREFILL, DECODE, p.Refuse("x" * 10_000_000))
    pair.step(["decode"])
    shown = str(pair.end("decode", "r").error)
    assert "10000000 characters" in shown and len(shown) < SAID_CHARACTERS + 200
    pair.close()


def test_a_status_that_http_does_not_have_is_not_passed_on() -> None:
    for status in (-1, 0, 200, 999, 2**40):
        pair = Pair()
        pair.ask("r", TOKENS, GREEDY)
        while not (moving := pair.decode.side._moving):
            pair.step()
        room = next(iter(moving.values()))
        pair.net.carry(PREFILL, DECODE, p.Gone(room.room, room.attempt, "x", status, "y"))
        pair.step(["decode"])
        error = pair.end("decode", "r").error
        assert error is not None and error.status == 502
        pair.run()
        pair.close()


def test_one_decode_server_cannot_fill_the_line_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.disagg.prefill.ORPHAN_LIMIT", 3)
    pair = Pair()
    pair.net.hub("flood")
    for room in range(50):
        pair.net.carry("flood", PREFILL, p.Want(room, 1, 3, 0, 0, b""))
    rooms = pair.ask("r", TOKENS, GREEDY, sides=["decode"])
    for _ in range(4):
        pair.step()
    assert pair.prefill.side.report()["orphans"] == 4, "three of one, one of the other"
    pair.ask("r", TOKENS, GREEDY, sides=["prefill"], rooms=rooms)
    pair.prefill.side._peer_down("flood", "it has left")
    pair.run()
    assert pair.tokens("r") == solo("llama", TOKENS)
    pair.close()


def test_who_was_refused_gets_no_pages() -> None:
    pair = Pair()
    net: LocalNet = pair.net
    net.hub("unfit")
    pair.ask("r", TOKENS, GREEDY, sides=["prefill"], rooms=[5])
    net.carry("unfit", PREFILL, p.Hello(LAYOUT))
    want = p.Want(5, 1, len(TOKENS), 0, 0, p.prompt_digest(TOKENS))
    net.carry("unfit", PREFILL, want)
    pair.step(["prefill"])
    assert pair.prefill.side.report()["rooms"] == {"arrived": 1}
    said = [m for _, receiver, m in net.carried if receiver == "unfit" and isinstance(m, p.Gone)]
    assert len(said) == 1 and "refused at the handshake" in said[0].reason
    pair.ask("r", TOKENS, GREEDY, sides=["decode"], rooms=[5])
    pair.run()
    assert pair.tokens("r") == solo("llama", TOKENS)
    pair.close()


@pytest.mark.parametrize("host", ["", "*", "a b", "a/b", "tcp://a", "%", "a\x00b", "ü", "x" * 300, "-a", "[::1", "1:2"])
def test_a_host_that_cannot_be_is_refused(host: str) -> None:
    pair = Pair()
    with pytest.raises(RequestError, match="bootstrap_host: got") as refused:
        pair.decode.add_request(EngineRequest("r", TOKENS, GREEDY, bootstrap=Bootstrap(host, 1, [1])))
    assert len(str(refused.value)) < SAID_CHARACTERS
    pair.close()


# -- real servers ----------------------------------------------------------------------------------------------------

ASK = {"model": "tiny", "temperature": 0, "ignore_eos": True, "prompt": "a page, a room, a lease", "max_tokens": 12}


def right(servers: Trio, text: str) -> None:
    first, second = servers.both("/v1/completions", ASK)
    assert (first.status_code, second.status_code) == (200, 200), (first.text, second.text)
    assert second.json()["choices"][0]["text"] == text


def test_real_servers_outlive_strangers(servers: Trio) -> None:
    text = servers.both("/v1/completions", ASK)[1].json()["choices"][0]["text"]
    engines = [server.engine_pid() for server in (servers.prefill, servers.decode)]
    intrude(f"127.0.0.1:{servers.bootstrap_port}")
    right(servers, text)

    def elsewhere(host: str) -> httpx.Response:
        body = {**ASK, "bootstrap_host": host, "bootstrap_port": 9, "bootstrap_room": next(ROOMS)}
        return servers.decode.post("/v1/completions", body)

    for host in ("", "*", "a b", "tcp://x", "x" * 300):
        answer = elsewhere(host)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bootstrap_host"), answer.text
    started_s = running_time.now()
    answer = elsewhere("nobody.invalid")
    assert answer.status_code in (502, 504) and "nobody.invalid:9" in answer.text
    assert running_time.now() - started_s < 5.5
    right(servers, text)
    assert engines == [server.engine_pid() for server in (servers.prefill, servers.decode)]
    servers.check_at_rest()


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [(p.Computed, {"token": 10**9}, "outside the vocabulary"), (p.Pages, {"ids": [-1]}, "do not exist"),
     (p.Pages, {"ids": [2**40]}, "do not exist"), (p.Pages, {"first": -3}, "out of order"),
     (p.Welcome, {"transport": "pigeons"}, "transport: prefill has pigeons"),
     (p.Welcome, {"regions": {}}, "bytes of a full page"), (p.Welcome, {"address": "nobody"}, "could not be read"),
     (p.Refuse, {}, ""), (p.Gone, {}, "")],
)  # fmt: skip
def test_a_real_decode_server_outlives_a_prefill_server_that_lies(
    kind: type, change: dict[str, Any], named: str, servers: Trio
) -> None:
    text = servers.both("/v1/completions", ASK)[1].json()["choices"][0]["text"]
    engine = servers.decode.engine_pid()
    with road(servers.bootstrap_port) as way:
        def forge(message: Any) -> Any:
            if kind in (p.Refuse, p.Gone) and isinstance(message, p.Welcome):
                return p.Refuse("y" * 100_000) if kind is p.Refuse else p.Gone(1, 1, "z", -5)
            return msgspec.structs.replace(message, **change) if isinstance(message, kind) else message

        way.forge = forge
        body = {**ASK, "prompt": f"{kind.__name__}{change} {ASK['prompt']}", "bootstrap_host": "127.0.0.1",
                "bootstrap_port": way.port, "bootstrap_room": next(ROOMS)}
        other = threading.Thread(target=servers.prefill.post, args=("/v1/completions", body))
        other.start()
        answer = servers.decode.post("/v1/completions", body)
        assert answer.status_code in (502, 504) and named in answer.text, answer.text
        assert len(answer.text) < 5000
    right(servers, text)
    other.join()
    assert servers.decode.engine_pid() == engine
    servers.check_at_rest()

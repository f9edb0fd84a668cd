"""Everything that can go wrong between two engines, on the in-process transport: books close, others are unharmed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.disagg import protocol as p
from octavo.disagg.failures import failed
from octavo.disagg.prefill import PrefillSide
from octavo.disagg.states import DECODE_MOVES, PREFILL_MOVES, IllegalPhase, Phase, Tombstones, move
from octavo.engine.request import Bootstrap, EngineRequest
from octavo.errors import RequestError
from octavo.params import SamplingParams
from tests.disagg.pair import DECODE, PREFILL, Pair, make_core
from tests.engine.test_core import GREEDY, prompts, solo

TOKENS = prompts(1, seed=2, low=90, high=90)[0]
OTHER = prompts(1, seed=3, low=50, high=50)[0]


def small(**options: Any) -> Pair:
    return Pair("gemma3", **{"page_size": 16, "max_batched_tokens": 32, **options})


def check_other(pair: Pair) -> None:
    """Somebody else is served as ever."""
    pair.ask("other", OTHER, GREEDY)
    pair.run()
    assert pair.tokens("other") == solo("gemma3", OTHER)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("when", range(9))
def test_abort_from_either_side_in_every_state(side: str, when: int) -> None:
    pair = small()
    pair.ask("r", TOKENS, GREEDY)
    pair.ask("other", OTHER, GREEDY)
    for _ in range(when):
        pair.step()
    pair.cores[side].abort("r")
    pair.run()
    assert pair.tokens("other") == solo("gemma3", OTHER)
    for name in ("prefill", "decode"):
        assert pair.end(name, "r").finished
    if side == "decode":
        assert pair.end("decode", "r").finish_reason in ("abort", "length")
    else:
        end = pair.end("decode", "r")
        assert end.finish_reason == "length" or (end.error is not None and end.error.status == 502), end
    pair.close()


@pytest.mark.parametrize("state", [s for s in DECODE_MOVES if DECODE_MOVES[s]])
def test_abort_on_the_decode_side_in_each_named_state(state: Phase) -> None:
    pair = small()
    lost = {Phase.ARRIVED: p.Welcome, Phase.WAITING: p.Kept}.get(state)
    if lost is not None:
        pair.net.lose = lambda sender, receiver, message: isinstance(message, lost)
    pair.wire.hold = state is Phase.TRANSFERRING
    blockers = []
    if state is Phase.PREALLOCATING:
        blockers = [pair.decode.ledger.admit([1, 2, 3]).row for _ in range(pair.decode.ledger.config.max_rows)]
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(8):
        pair.step()
    assert pair.decode.side.report()["rooms"] == {state.value: 1}
    pair.decode.abort("r")
    pair.net.lose = lambda sender, receiver, message: False
    assert pair.leased() > 0 or state is not Phase.TRANSFERRING
    for row in blockers:
        pair.decode.ledger.release(row)
    pair.wire.hold = False
    pair.wire.release()
    pair.run()
    assert pair.end("decode", "r").finish_reason == "abort"
    check_other(pair)
    pair.close()


@pytest.mark.parametrize("end", ["read", "aborted over there", "reader dead"])
def test_the_prefill_client_is_answered_once_and_early(end: str) -> None:
    """When the prompt is computed, not when its pages have been read; whatever comes then, there is one last word."""
    pair = small()
    pair.wire.hold = True
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(8):
        pair.step()
    assert pair.end("prefill", "r").finish_reason == "length" and pair.end("prefill", "r").token_ids
    assert pair.prefill.side.report()["rooms"] == {"offered": 1} and ("decode", "r") not in pair.outputs
    if end == "aborted over there":
        pair.decode.abort("r")
    elif end == "reader dead":
        pair.prefill.side._peer_down(DECODE, "no sign of life")
    pair.wire.hold = False
    pair.wire.release()
    pair.run()
    assert sum(output.finished for output in pair.outputs["prefill", "r"]) == 1
    if end == "read":
        assert pair.tokens("r") == solo("gemma3", TOKENS)
    pair.close()


def test_a_late_write_hits_leased_pages_only() -> None:
    """The transfer outlives its request: nobody gets its pages, and the next owner of everything else is unharmed."""
    pair = small(decode={"num_pages": 24, "num_swa_pages": 24}, max_model_len=160)
    pair.wire.hold = True
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(6):
        pair.step()
    assert pair.wire.held and pair.leased()
    pair.decode.abort("r")
    pair.wire.hold = False
    pair.ask("other", OTHER, GREEDY)
    for _ in range(10):
        pair.step()
    assert pair.leased(), "the lease has outlived the request"
    pair.wire.release()
    pair.run()
    assert pair.tokens("other") == solo("gemma3", OTHER) and pair.leased() == 0
    pair.close()


def test_a_transfer_that_never_ends_is_quarantined_and_counted() -> None:
    pair = small(quarantine_after_s=0.1)
    pair.wire.lose = True
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(6):
        pair.step()
    end = pair.end("decode", "r")
    assert end.error is not None and "could not be read" in str(end.error)
    pair.wire.lose = False
    pair.clock.advance(0.15)
    pair.run()
    pools = pair.decode.ledger.report()["pools"]
    assert pools["full"]["quarantined"] > 0 and pools["full"]["leased"] == 0
    assert pair.decode.stats().transfers["results"]["quarantined"] == 1
    pair.wire.release()  # years later
    check_other(pair)
    freed = pair.decode.ledger.end_quarantine()
    assert freed > 0
    pair.close()


def test_unknown_reads_of_a_dead_server_are_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.disagg.decode.GRACE_S", 0.0)
    pair = small()
    pair.wire.lose = True
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(6):
        pair.step()
    pair.net.kill(PREFILL)
    for _ in range(4):
        pair.step(["decode"])
    assert pair.leased() == 0 and pair.decode.ledger.report()["pools"]["full"]["quarantined"] == 0
    pair.prefill.side._peer_down(DECODE, "we were killed")
    pair.close()


@pytest.mark.parametrize("after", [0, 1])
def test_a_partial_failure_ends_the_room(after: int) -> None:
    pair = small()
    pair.wire.fail_after = after
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(10):
        pair.step()
    for side in ("prefill", "decode"):
        error = pair.end(side, "r").error
        assert error is not None and error.status == 502
    pair.wire.fail_after = None
    check_other(pair)
    pair.close()


@pytest.mark.parametrize("lost", [p.Read, p.Kept])
def test_a_lost_read_done_is_asked_again(lost: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.disagg.decode.ASK_AGAIN_S", 0.02)
    pair, seen = small(), []

    def lose(sender: str, receiver: str, message: Any) -> bool:
        seen.append(message) if isinstance(message, lost) else None
        return isinstance(message, lost) and len(seen) <= 2

    pair.net.lose = lose
    pair.ask("r", TOKENS, GREEDY)
    pair.run()
    assert pair.tokens("r") == solo("gemma3", TOKENS) and len(seen) >= 3
    pair.close()


def test_pages_that_were_let_go_are_never_landed() -> None:
    """The prefill side gave up on a silent reader that comes back and reads on: what it read is worthless."""
    pair = small()
    pair.wire.hold = True
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(8):
        pair.step()
    pair.prefill.side._peer_down(DECODE, "no sign of life")
    pair.step(["prefill"])
    pair.decode.side._hub.mail.clear()  # and what was said to it is lost
    pair.wire.hold = False
    pair.wire.release()
    pair.run()
    error = pair.end("decode", "r").error
    assert error is not None and "let its pages go" in str(error)
    check_other(pair)
    pair.close()


@pytest.mark.parametrize("when", [0, 2, 4, 6, 8])
def test_a_dead_prefill_server_fails_its_rooms_at_once(when: int) -> None:
    pair = small()
    pair.wire.hold = when == 8
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(when):
        pair.step()
    pair.net.kill(PREFILL, "no sign of life for 2.5 s", final=False)
    pair.step(["decode"])
    if pair.tokens("r"):  # a running request needs its prefill server no more
        while pair.decode.has_work():
            pair.step(["decode"])
        assert pair.tokens("r") == solo("gemma3", TOKENS)
    else:
        assert "is gone" in str(pair.end("decode", "r").error)
    pair.wire.release()
    pair.prefill.side._peer_down(DECODE, "not reachable")
    pair.prefill.abort("r")  # its client has the other half's error and leaves
    pair.run()
    pair.close()


@pytest.mark.parametrize("when", [1, 3, 5, 7, 9])
def test_a_dead_decode_server_frees_the_prefill_side(when: int) -> None:
    pair = small()
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(when):
        pair.step()
    pair.net.kill(DECODE)
    for _ in range(20):
        pair.step(["prefill"])
    report = pair.prefill.ledger.report()
    assert report["pools"]["full"]["held"] == 0 and not pair.prefill.side._ended
    for core in pair.cores.values():
        core.abort("r")
    pair.close()


def test_rooms_without_a_partner_expire() -> None:
    pair = small(room_timeout_s=1.5)
    pair.ask("p", TOKENS, GREEDY, sides=["prefill"])
    pair.ask("d", TOKENS, GREEDY, sides=["decode"])
    pair.run()
    for side, name, what in (("prefill", "p", "no decode server has asked"), ("decode", "d", "room")):
        error = pair.end(side, name).error
        assert error is not None and error.status in (502, 504) and what in str(error)
    check_other(pair)
    pair.close()


def test_duplicate_and_finished_rooms_are_refused() -> None:
    pair = small()
    rooms = pair.ask("r", TOKENS, GREEDY)
    for side in ("prefill", "decode"):
        with pytest.raises(RequestError, match="in use"):
            pair.ask("again", TOKENS, GREEDY, rooms=rooms, sides=[side])
    pair.run()
    for side in ("prefill", "decode"):
        with pytest.raises(RequestError, match="nothing is replayed"):
            pair.ask("again", TOKENS, GREEDY, rooms=rooms, sides=[side])
        with pytest.raises(RequestError, match="2 rooms"):
            pair.ask("again", TOKENS, GREEDY, rooms=[1, 2], sides=[side])
        with pytest.raises(RequestError, match="router"):
            pair.cores[side].add_request(EngineRequest("x", TOKENS, GREEDY))
        with pytest.raises(RequestError, match="prompt_logprobs"):
            pair.ask("scored", TOKENS, GREEDY.with_changes(prompt_logprobs=1), sides=[side])
    assert pair.tokens("r") == solo("gemma3", TOKENS)
    pair.close()


def test_a_second_decode_server_does_not_get_a_taken_room() -> None:
    pair = small()
    second = make_core("decode", pair.net, pair.wire, "gemma3", {}, clock=pair.clock, name="decode2", page_size=16,
                       max_batched_tokens=32)
    rooms = pair.ask("r", TOKENS, GREEDY)
    for _ in range(3):
        pair.step()
    second.add_request(EngineRequest("r", TOKENS, GREEDY, bootstrap=Bootstrap("127.0.0.1", 1, rooms)))
    outputs = []
    for _ in range(10):
        outputs += second.step()
        pair.step()
    assert outputs[-1].error is not None and outputs[-1].error.status in (409, 502)
    pair.run()
    assert pair.tokens("r") == solo("gemma3", TOKENS)
    second.close()
    pair.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"page_size": 32}, "page size: prefill has 32, decode has 16"),
     ({"dtype": "bfloat16"}, "KV dtype"),
     ({"dtype": "bfloat16", "kv_dtype": "float32"}, "weight formats: prefill has bfloat16: "),
     ({"quantization": "int8"}, "weight formats: prefill has float32: int8 × "),
     ({"kv_dtype": "bf16"}, "KV dtype: prefill has bfloat16, decode has float32")],
)  # fmt: skip
def test_the_handshake_names_what_differs(change: dict[str, Any], named: str) -> None:
    pair = small(prefill=change)
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(4):
        pair.step()
    error = pair.end("decode", "r").error
    assert error is not None and error.status == 502 and named in str(error)
    pair.run()
    assert named in str(pair.end("prefill", "r").error)
    pair.close()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_server_that_does_not_fit_ends_the_other_half_too(first: str) -> None:
    """At once, whichever half of the request came first: a router answers its client when both have answered."""
    pair = small(prefill={"page_size": 32})
    rooms = pair.ask("r", TOKENS, GREEDY, sides=[first])
    for _ in range(4):
        pair.step()
    if first == "prefill":
        pair.ask("r", TOKENS, GREEDY, sides=["decode"], rooms=rooms)
        for _ in range(4):
            pair.step()
        assert "page size: prefill has 32, decode has 16" in str(pair.end("prefill", "r").error)
    else:
        with pytest.raises(RequestError, match="has ended"):
            pair.ask("r", TOKENS, GREEDY, sides=["prefill"], rooms=rooms)
    assert "page size: prefill has 32, decode has 16" in str(pair.end("decode", "r").error)
    pair.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"tail_start_tokens": 48}, "a window tail from token 48: it starts at 64"),
     ({"tail_start_tokens": 65}, "a window tail from token 65"),
     ({"tail_start_tokens": -16}, "a window tail from token -16"),
     ({"prefix_tokens": 8}, "a prefix of 8 tokens"),
     ({"prefix_tokens": -16}, "a prefix of -16 tokens"),
     ({"prefix_tokens": 96}, "a prefix of 96 tokens"),
     ({"prompt_tokens": 89}, "prompts differ")],
)  # fmt: skip
def test_a_wish_that_cannot_be_is_refused(change: dict[str, int], named: str) -> None:
    """What crosses the wire is checked before pages are chosen by it: 90 tokens, window 24, page 16, tail at 64."""
    pair = small()
    carry = pair.net.carry

    def forge(sender: str, receiver: str, message: Any) -> None:
        if isinstance(message, p.Want):
            assert (message.prompt_tokens, message.tail_start_tokens) == (90, 64)
            message = msgspec.structs.replace(message, **change)
        carry(sender, receiver, message)

    pair.net.carry = forge  # type: ignore[method-assign]
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(6):
        pair.step()
    for side in ("prefill", "decode"):
        assert named in str(pair.end(side, "r").error)
    pair.net.carry = carry  # type: ignore[method-assign]
    cause = "prompts_differ" if "prompt" in named else "bad_message"
    assert pair.prefill.side.tally.snapshot()["failures"] == {cause: 1}
    check_other(pair)
    pair.close()


def test_failures_are_counted_by_cause() -> None:
    pair = small()
    pair.wire.fail_after = 0
    pair.ask("unread", TOKENS, GREEDY)
    for _ in range(10):
        pair.step()
    pair.wire.fail_after = None
    pair.ask("left", TOKENS, GREEDY)
    for _ in range(3):
        pair.step()
    pair.cores["decode"].abort("left")
    for _ in range(5):
        pair.step()
    pair.wire.hold = True
    pair.ask("cut", OTHER, GREEDY)
    for _ in range(5):
        pair.step()
    pair.net.kill(PREFILL, "no sign of life for 2.5 s", final=False)
    pair.wire.hold = False
    pair.wire.release()
    for _ in range(3):
        pair.step()
    seen = {name: core.side.tally.snapshot() for name, core in pair.cores.items()}
    assert seen["decode"]["failures"] == {"read_failed": 1, "peer_gone": 1}
    assert seen["decode"]["results"] == {"done": 0, "failed": 2, "aborted": 1}
    assert seen["prefill"]["failures"] == {"peer_ended": 2}, "`left` had been read over there"
    assert pair.decode.stats().transfers["failures"] == {"read_failed": 1, "peer_gone": 1}
    pair.prefill.side._peer_down(DECODE, "we were silent")
    pair.run()
    pair.close()
    with pytest.raises(KeyError):
        failed("no such cause", "")


def test_seconds_of_a_transfer_are_told_apart() -> None:
    pair = small()
    pair.ask("r", TOKENS, GREEDY)
    pair.run()
    seen = pair.decode.side.tally.snapshot()
    assert 0 < seen["behind_seconds"] < seen["seconds"] and seen["results"]["done"] == 1
    pair.close()


def test_the_transport_forgets_former_lives_of_a_server() -> None:
    """Each life has an address and, in the transport, a thread of its own: they do not add up over restarts."""
    pair = small()
    check_other(pair)
    side = pair.decode.side
    for life in ("life2", "life3"):
        side._welcomed(PREFILL, p.Welcome("inprocess", life, side.regions))
    assert side._transport.forgotten == [PREFILL, "life2"]
    pair.net.kill(PREFILL)
    pair.step(["decode"])
    assert side._transport.forgotten == [PREFILL, "life2", "life3"]
    pair.close()


@pytest.mark.parametrize(("model", "named"), [({"seed": 1}, "weights fingerprint"), ({"num_kv_heads": 4}, "kv heads")])
def test_another_model_is_refused(model: dict[str, Any], named: str) -> None:
    pair = small()
    other = make_core("prefill", pair.net, pair.wire, "gemma3", model, clock=pair.clock, page_size=16)  # by that name
    pair.ask("r", TOKENS, GREEDY, sides=["decode"])
    for _ in range(4):
        pair.step(["decode"])
        other.step()
    error = pair.end("decode", "r").error
    assert error is not None and named in str(error)
    other.close()
    pair.close()


def test_prompts_that_differ_are_found() -> None:
    pair = small()
    rooms = pair.ask("r", TOKENS, GREEDY, sides=["prefill"])
    pair.ask("r", [*TOKENS[:-1], 7], GREEDY, sides=["decode"], rooms=rooms)
    for _ in range(6):
        pair.step()
    for side in ("prefill", "decode"):
        assert "prompts differ" in str(pair.end(side, "r").error)
    pair.run()
    pair.close()


def test_messages_of_a_former_attempt_are_dropped() -> None:
    pair = small()
    pair.ask("r", TOKENS, GREEDY)
    for _ in range(3):
        pair.step()
    room = next(iter(pair.decode.side._moving.values()))
    stale = p.Computed(room.room, room.attempt + 7, 3, None, 0, None)
    pair.net.carry(PREFILL, DECODE, stale)
    pair.net.carry("somebody", DECODE, p.Gone(room.room, room.attempt, "not yours"))
    pair.run()
    assert pair.tokens("r") == solo("gemma3", TOKENS)
    pair.close()


def test_a_big_request_is_passed_but_not_starved() -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    pair = Pair(page_size=16, max_model_len=256, decode={"num_pages": 22}, max_batched_tokens=64)
    big = prompts(1, seed=1, low=240, high=240)[0]
    pair.ask("first", prompts(1, seed=5, low=60, high=60)[0], params)
    for _ in range(3):
        pair.step()
    pair.ask("big", big, params)
    order: list[str] = []
    for i in range(60):
        if i < 40:
            pair.ask(f"s{i}", prompts(1, seed=50 + i, low=60, high=60)[0], params)
        pair.step()
    pair.run()
    for (side, name), outputs in pair.outputs.items():
        if side == "decode" and outputs[-1].finished:
            order.append(name)
    assert "big" in order and pair.tokens("big") == solo("llama", big, params)
    pair.close()


def test_every_move_outside_the_table_raises() -> None:
    for table in (DECODE_MOVES, PREFILL_MOVES):
        for old in Phase:
            for new in Phase:
                if new in table.get(old, frozenset()):
                    assert move(table, 1, old, new) is new
                else:
                    with pytest.raises(IllegalPhase, match=f"{old.value} -> {new.value}"):
                        move(table, 1, old, new)
    working = [phase for phase in DECODE_MOVES if DECODE_MOVES[phase]]
    assert all({Phase.FAILED, Phase.ABORTED} <= DECODE_MOVES[phase] for phase in working)


def test_tombstones_are_bounded() -> None:
    stones = Tombstones(limit=10, keep_s=5)
    for i in range(100):
        stones.add(i, float(i) / 100)
    assert len(stones) == 10 and 99 in stones and 0 not in stones
    stones.expire(100.0)
    assert len(stones) == 0


def test_orphans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.disagg.prefill.ORPHAN_LIMIT", 3)
    pair = small()
    side = pair.prefill.side
    assert isinstance(side, PrefillSide)
    for room in range(5):
        side._wanted(DECODE, p.Want(room, 1, 3, 0, 0, b""))
    assert side.report()["orphans"] == 3
    refused = [m for _, _, m in pair.net.carried if isinstance(m, p.Gone)]
    assert len(refused) == 2 and refused[0].status == 503
    side._peer_down(DECODE, "test")
    pair.close()

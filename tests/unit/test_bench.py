"""The bench's arithmetic, prompts, peer protocol and record; engines here are small programs with known answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import measure, record
from octavo.bench.engines import Peer, PeerFailed, Sample, peer_python, run
from octavo.bench.workload import Case, ChatPrompts, DepthPrompts, read_prompts, read_text
from octavo.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parents[2]
CHAT40 = ROOT / "benchmarks/prompts/chat40.jsonl"


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_the_forty_prompts_are_as_they_were_before_training() -> None:
    import hashlib

    entries = read_prompts(CHAT40)
    counts = {c: sum(e["category"] == c for e in entries) for c in ("explain", "write", "code", "transform")}
    assert counts == {"explain": 10, "write": 10, "code": 10, "transform": 10}
    assert len({e["id"] for e in entries}) == len({e["prompt"] for e in entries}) == 40
    assert hashlib.sha256(CHAT40.read_bytes()).hexdigest() == (
        "1a2884eb8ebaaf66cc875af2f8a89dba421b827b2fdd24a57aea44b34a5f68a5"
    )


def test_a_few_prompts_come_from_all_categories() -> None:
    few = ChatPrompts(CHAT40, lambda messages: words(messages[0]["content"]), 8).entries
    assert [entry["category"] for entry in few] == [c for c in ("explain", "write", "code", "transform") for _ in "ab"]


def test_a_text_to_score_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("empty", "binary", "absent"):
        with pytest.raises(UserError, match=name):
            read_text(str(tmp_path / name))


@pytest.mark.parametrize("text", ["not json\n", '{"prompt": 3}\n', "[1]\n", "\n"])
def test_a_bad_prompt_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"p\.jsonl"):
        read_prompts(path)


def test_depth_prompts_are_exact_distinct_and_repeatable() -> None:
    prompts = DepthPrompts(words)
    case = Case("depth", 4, 128, 16)
    seen = [tuple(p) for repeat in range(5) for group in prompts.groups(case, repeat) for p in group]
    assert len(seen) == len(set(seen)) == 20
    assert {len(p) for p in seen} == {128}
    assert prompts.groups(case, 3) == DepthPrompts(words).groups(case, 3)
    many = DepthPrompts(words, 3)
    starts = [tuple(p) for repeat in range(5) for group in many.groups(case, repeat) for p in group]
    assert len(starts) == len(set(starts)) == 60 and [len(g) for g in many.groups(case, 0)] == [4, 4, 4]


def test_a_depth_beyond_the_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="--depth"):
        DepthPrompts(words).groups(Case("depth", 1, 10**9, 1), 0)


def test_chat_prompts_come_one_by_one_or_as_a_line_that_fills_every_turn() -> None:
    prompts = ChatPrompts(CHAT40, lambda messages: words(messages[0]["content"]), None)
    assert prompts.groups(Case("chat", 1, None, 8), 0) == [[ids] for ids in prompts.ids]
    assert prompts.groups(Case("chat", 4, None, 8), 0) == [prompts.ids]
    assert prompts.groups(Case("chat", 16, None, 8), 0) == [[*prompts.ids, *prompts.ids[:24]]]
    assert [len(g) for g in prompts.groups(Case("chat", 7, None, 8), 0)] == [42]


def line(speeds: Sequence[float], engine: str = "octavo", mode: str = "plain", threads: int = 1) -> measure.Line:
    result = measure.Line(Case("depth", 1, 8, 5), engine, mode, threads)
    for speed in speeds:
        sample = Sample(wall_s=4 / speed + 0.5, first_token_s=[0.5], decode_s=4 / speed, output_ids=[[1, 2, 3, 4, 5]])
        result.add([sample], [[[0] * 8]])
    return result


def test_median_spread_and_void() -> None:
    steady, shaky = line([100, 102, 98, 101, 99]), line([100, 100, 100, 120, 100])
    assert steady.median == pytest.approx(100)
    assert steady.spread == pytest.approx(0.04) and not steady.void
    assert shaky.spread == pytest.approx(0.2) and shaky.void
    assert steady.prefill_tokens_per_s[0] == pytest.approx(16)
    assert steady.output_tokens_per_s[0] == pytest.approx(5 / 0.54)


def test_one_token_answers_compare_prefill_and_streams_compare_throughput() -> None:
    prefill = measure.Line(Case("depth", 1, 8, 1), "octavo", "plain", 1)
    prefill.add([Sample(0.5, [0.5], 0.0, [[1]])], [[[0] * 8]])
    assert prefill.median == pytest.approx(16)
    many = measure.Line(Case("depth", 2, 8, 5), "octavo", "plain", 1)
    many.add([Sample(2.0, [0.5, 1.0], 1.0, [[1] * 5, [1] * 5])], [[[0] * 8] * 2])
    assert many.median == pytest.approx(5)


class Named:
    """An engine that writes down when it has a turn; its answer comes with the last of `pieces`."""

    threads, mode = 1, "plain"

    def __init__(self, name: str, order: list[str], pieces: int = 1) -> None:
        self.name, self.order, self.count = name, order, pieces

    def describe(self) -> dict[str, Any]:
        return {}

    def pieces(self, prompts: Sequence[list[int]], case: Case) -> Iterator[Sample | None]:
        for left in range(self.count, 0, -1):
            self.order.append(self.name)
            yield None if left > 1 else Sample(float(self.count), [0.5], 0.5, [[1, 2]])

    def close(self) -> None: ...


def test_engines_take_turns_after_a_warm_up() -> None:
    order: list[str] = []
    told: list[str] = []
    engines = [Named("a", order), Named("b", order)]
    lines = measure.measure(engines, [Case("depth", 1, 8, 2)], {"depth": DepthPrompts(words, 3)}, 2, told.append)
    assert "".join(order) == "ab" + "abbaab" + "baabba", "group by group, each as often the first as it can be"
    assert [len(line.output_ids) for line in lines] == [3, 3] and len(lines[0].speed) == 2
    assert "repeat 2 of 2, prompts 3 of 3" in told[-1]


def test_engines_take_turns_piece_by_piece() -> None:
    order: list[str] = []
    engines = [Named("a", order), Named("b", order, pieces=3), Named("c", order, pieces=2)]
    lines = measure.measure(engines, [Case("depth", 1, 8, 2)], {"depth": DepthPrompts(words)}, 1, str)
    assert "".join(order) == "abbbcc" + "abcbcb", "warm-ups one by one, then whoever has more to do goes on in turns"
    assert [line.output_tokens_per_s for line in lines] == [[2.0], [2 / 3], [1.0]]


def test_a_peer_is_judged_by_its_best_thread_count_and_identity_is_reported() -> None:
    ours, slow, fast = line([200]), line([80], "llama.cpp"), line([100], "llama.cpp", threads=2)
    draft = line([300], mode="ngram")
    draft.output_ids = [[1, 2, 9, 4, 5]]
    document = record.document([ours, draft, slow, fast], {}, {"name": "m"}, {})
    ratios = document["lines"][0]["ratios"], document["lines"][1]["ratios"]
    assert ratios[0] == {"llama.cpp": pytest.approx(2.0)}
    assert ratios[1]["plain"] == pytest.approx(1.5) and ratios[1]["identical_to_plain"] == 0.0
    assert document["lines"][2]["ratios"] == {} == document["lines"][2]["ratios_by_repeat"]
    assert {"commit", "command", "cpu", "versions", "date", "schema"} <= set(document)
    text = record.table([ours, draft, slow, fast])
    assert "2.00 × llama.cpp" in text and "(0% identical)" in text and "80.0" not in text
    json.dumps(document)


def test_ratios_are_told_round_by_round() -> None:
    """A machine that gets slower voids both lines; how they compare in each round says what is asked."""
    ours, theirs = line([200, 100, 150]), line([100, 50, 50], "llama.cpp")
    document = record.document([ours, theirs], {}, {"name": "m"}, {})
    assert document["lines"][0]["void"] and document["lines"][0]["ratios"] == {"llama.cpp": pytest.approx(2.0)}
    assert document["lines"][0]["ratio_intervals"] == {"llama.cpp": pytest.approx([2.0, 3.0])}
    assert document["lines"][0]["ratios_by_repeat"] == {"llama.cpp": pytest.approx([2.0, 2.0, 3.0])}
    assert "2.00 × llama.cpp (2.00–3.00, void)" in record.table([ours, theirs])


@pytest.mark.parametrize(("rounds", "outside"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (40, 13)])
def test_the_interval_of_a_ratio_is_that_of_the_sign_test(rounds: int, outside: int) -> None:
    """As in tables of the sign test's critical values for 5 % (two-sided): of 9 one, of 20 five may lie beyond."""
    values = [1.0 + n / 100 for n in range(rounds)]
    assert measure.Ratio(values[::-1]).interval == (values[outside], values[rounds - 1 - outside])


def test_more_rounds_make_a_ratio_sure_where_their_range_cannot() -> None:
    noise = [0.9, 1.1, 0.99, 1.01, 1.0]
    assert measure.Ratio(noise).void
    many = measure.Ratio(noise * 6)
    assert not many.void and many.median == 1.0 and many.interval == (0.99, 1.01)


def test_divergences_name_the_place_and_the_margin() -> None:
    plain, draft = line([200]), line([300], mode="ngram")
    plain.output_ids, draft.output_ids = [[1, 2, 3], [4, 5, 6], [7]], [[1, 2, 3], [4, 9, 6], [8]]
    asked: list[list[int]] = []

    def margin(ids: list[int]) -> float:
        asked.append(ids)
        return 0.01 * len(ids)

    draft.divergences = measure.divergences(draft, plain, [[70], [80, 81], [90]], margin)
    assert asked == [[80, 81, 4], [90]]
    assert [(d.output, d.position, round(d.top2_margin, 3)) for d in draft.divergences] == [(1, 1, 0.03), (2, 0, 0.01)]
    assert "(33% identical, top-2 margins 0.01 to 0.03)" in record.table([plain, draft])
    document = record.document([plain, draft], {}, {"name": "m"}, {})
    assert document["lines"][1]["divergences"][0] == {"output": 1, "position": 1, "top2_margin": 0.03}


def test_accept_length_tells_loops_apart_and_positions_are_shares_of_verifies() -> None:
    def figures(accept: float, accepted: list[int]) -> dict[str, Any]:
        return {"accept_length": accept, "drafts": 10, "accepted_per_position": accepted}

    result = measure.Line(Case("chat", 2, None, 60), "octavo", "ngram", 1)
    looping, real = [1, 2, 3] * 20, [(i * i * 31 + i) % 997 for i in range(60)]
    sample = Sample(1.0, [0.1, 0.1], 0.9, [looping, real], [figures(4.0, [10, 8, 6]), figures(1.5, [4, 1])])
    result.add([sample], [[[0], [0]]])
    assert result.looping == [True, False]
    assert result.accept_length() == pytest.approx(2.75)
    assert result.accept_length(loops=False) == pytest.approx(1.5)
    assert result.accepted_by_position == pytest.approx([0.7, 0.45, 0.3])
    assert line([100]).accept_length() is None and line([100]).accepted_by_position == []


def test_the_stopwatch_gives_inner_calls_their_own_time_and_restores_what_it_wrapped() -> None:
    import time

    from octavo.bench.profile import Stopwatch

    class Part:
        def outer(self) -> None:
            time.sleep(0.03)
            self.inner()

        def inner(self) -> None:
            time.sleep(0.06)

    part, watch = Part(), Stopwatch()
    watch.wrap(part, "outer", "o")
    watch.wrap(part, "inner", "i")
    start = time.perf_counter()
    part.outer()
    wall = time.perf_counter() - start
    assert watch.seconds["o"] >= 0.03 and watch.seconds["i"] >= 0.06
    assert sum(watch.seconds.values()) <= wall
    watch.unwrap()
    assert vars(part) == {}


def test_the_plot_is_well_formed_and_draws_every_mode_and_part() -> None:
    from xml.etree import ElementTree

    from octavo.bench.plot import svg

    text = svg(
        {"ngram": [0.5, 0.25], "eagle3": [0.7]}, {"plain": {"network": 3.0, "head <x>": 1.0}, "ngram": {"network": 4.0}}
    )
    root = ElementTree.fromstring(text)
    shapes = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{shapes}polyline")) == 2
    assert len([r for r in root.iter(f"{shapes}title")]) == 3
    words = {t.text for t in root.iter(f"{shapes}text")}
    assert {"ngram", "eagle3", "plain", "network", "head <x>"} <= words
    ElementTree.fromstring(svg({}, {}))


PEER = """
import sys; sys.path.insert(0, {folder!r})
from protocol import serve
def load(request):
    print("noise of a library")
    return {{"name": "p", "streams": request["streams"]}}
def run(request):
    if request["output_tokens"] == 13: raise ValueError("unlucky")
    if request["output_tokens"] == 14: sys.exit("gone")
    if request["output_tokens"] == 15: import time; time.sleep(600)
    return {{"wall_s": 2.0, "first_token_s": [1.0], "decode_s": 1.0, "output_tokens": [[7] * request["output_tokens"]],
            "step_s": [0.5, 0.25]}}
serve({{"load": load, "run": run}})
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import octavo.bench.engines as engines

    script = tmp_path / "p.py"
    script.write_text(PEER.format(folder=str(Path(engines.__file__).with_name("peers"))))
    monkeypatch.setitem(engines.PEERS, "p", str(script))
    peer = Peer("p", Path(sys.executable), "model", threads=1, streams=3, context_tokens=9)
    yield peer
    peer.close()


def test_a_peer_answers_over_json_lines_whatever_it_prints(peer: Peer) -> None:
    assert peer.describe()["streams"] == 3
    sample = run(peer, [[1, 2]], Case("depth", 1, 2, 4))
    assert sample.output_ids == [[7, 7, 7, 7]]
    assert sample.step_s == [0.5, 0.25]


def test_a_peer_that_fails_or_dies_says_why(peer: Peer) -> None:
    with pytest.raises(PeerFailed, match="ValueError: unlucky"):
        run(peer, [[1]], Case("depth", 1, 1, 13))
    assert run(peer, [[1]], Case("depth", 1, 1, 2)).wall_s == 2.0
    with pytest.raises(PeerFailed, match="exit code 1.*gone"):
        run(peer, [[1]], Case("depth", 1, 1, 14))


def test_a_peer_whose_asker_is_killed_does_not_compute_on(peer: Peer) -> None:
    process, stdin = peer._process, peer._process.stdin
    assert stdin is not None
    stdin.write(json.dumps({"op": "run", "prompts": [[1]], "output_tokens": 15, "temperature": 0}) + "\n")
    stdin.close()  # as the system does it for a process that is killed
    assert process.wait(timeout=30) == 1


def test_unknown_peers_and_missing_interpreters_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--peer: got 'ollama'"):
        peer_python("ollama", None)
    with pytest.raises(ConfigError, match="make peers"):
        peer_python("llama.cpp", str(tmp_path / "python"))

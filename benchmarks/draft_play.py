"""Draft lengths on paper: what each policy would have made of real answers, with step costs that are given.

    python benchmarks/draft_play.py                     40 chat prompts, 128 tokens each, the shipped EAGLE-3 draft
    python benchmarks/draft_play.py --limit 4 --eagle-costs 1,1.2,1.3,1.4

Greedy answers do not depend on drafts. So each is written once, and at every position it is noted what EAGLE-3 drafts
there and what look-up finds. A policy then walks through the answers: a step that drafts m tokens of which a are right
costs `costs[m]` plain steps and goes on by a + 1 tokens. Times scatter by 8 per cent with outliers, seeded. Printed:
tokens a plain step's time (1.00 is plain decode) and tokens a step. No speed is measured here.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.workload import CHAT_PROMPTS
from octavo.spec.adaptive import AdaptiveLength, SourceLengths
from octavo.spec.drafter import Draft, DraftRequest, ProposeBatch
from octavo.spec.lookup_first import LEARNED, source_of
from octavo.spec.ngram import NgramDrafter

EAGLE_TOKENS, LOOKUP_TOKENS = 3, 5


@dataclass(frozen=True)
class Place:
    """One position of an answer: right tokens of EAGLE-3's draft; of look-up match length, drafted and right tokens."""

    learned: int
    match: int
    found: int
    looked_up: int


Step = tuple[bool, int, Callable[[int, int, float], None] | None]  # by look-up?, tokens, who is told (m, a, seconds)
Policy = Callable[[Place], Step]


def right(draft: list[int], truth: list[int]) -> int:
    """How many tokens of a draft come true."""
    pairs = zip(draft, truth, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(truth)))


def record(args: argparse.Namespace) -> list[list[Place]]:
    """Every answer's positions. The engine drafts at each of them and verifies nothing."""
    llm = LLM(args.model, draft="eagle3", draft_model=args.draft_model, draft_adaptive=False, prefix_cache=False,
              draft_tokens=EAGLE_TOKENS + 1)  # fmt: skip
    drafter: Any = llm.core.parts.drafter
    drafts: list[list[int]] = []
    propose = drafter.propose

    def listen(batch: ProposeBatch) -> Draft:
        draft = propose(replace(batch, host_limits=(EAGLE_TOKENS,)))
        drafts.append(draft.tokens[0].tolist())
        return Draft(draft.tokens[:, :0], None, None, (0,))

    drafter.propose = listen
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    answers = []
    with open(args.prompts, encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines][: args.limit]
    for prompt in prompts:
        drafts.clear()
        result = llm.chat([{"role": "user", "content": prompt}], params)[0]
        answers.append(places(list(result.prompt_token_ids), list(result.outputs[0].token_ids), drafts))
    llm.close()
    return answers


def places(prompt: list[int], answer: list[int], drafts: list[list[int]]) -> list[Place]:
    lookup = NgramDrafter(draft_tokens=LOOKUP_TOKENS)
    lookup.begin(DraftRequest(0, tuple(prompt), len(answer), 0))
    made = []
    for i, draft in enumerate(drafts):
        found = lookup.lookup(0, prompt + answer[: i + 1], LOOKUP_TOKENS)
        truth = answer[i + 1 :]
        made.append(Place(right(draft, truth), lookup.match_tokens(0), len(found), right(found, truth)))
    return made


def play(answers: list[list[Place]], policy: Policy, costs: dict[bool, list[float]], seed: int) -> tuple[float, float]:
    """(tokens in the time of a plain step, tokens a step)"""
    rng, tokens, seconds, steps = random.Random(seed), 0, 0.0, 0
    for answer in answers:
        at = 0
        while at < len(answer):
            place = answer[at]
            by_lookup, length, tell = policy(place)
            length = min(length, len(answer) - at, place.found if by_lookup else EAGLE_TOKENS)
            accepted = min(length, place.looked_up if by_lookup else place.learned)
            cost = costs[by_lookup][length]
            if tell is not None:
                tell(length, accepted, cost * rng.uniform(0.92, 1.08) * (2.0 if rng.random() < 0.02 else 1.0))
            at, tokens, seconds, steps = at + accepted + 1, tokens + accepted + 1, seconds + cost, steps + 1
    return tokens / seconds, tokens / steps


def fixed(eagle: int, lookup: int) -> Policy:
    """Look-up of `lookup` tokens where something matches, else `eagle` tokens by weights."""
    return lambda place: (True, lookup, None) if lookup and place.found else (False, eagle, None)


def adaptive(by_lookup: bool) -> Policy:
    """One source, its length adaptive, as the engine does it."""
    lengths = AdaptiveLength(LOOKUP_TOKENS if by_lookup else EAGLE_TOKENS)

    def tell(length: int, accepted: int, step_s: float) -> None:
        lengths.record(1, [length], [accepted], step_s)

    return lambda place: (by_lookup, lengths.choose(1), tell)


def lookup_first() -> Policy:
    """`ngram+eagle3`, adaptive."""
    lengths = SourceLengths((EAGLE_TOKENS, LOOKUP_TOKENS, LOOKUP_TOKENS))

    def policy(place: Place) -> Step:
        source, count = LEARNED, 0
        if place.found:
            source = source_of(place.match)
            count = lengths.choose_for(source, 1)
        if count == 0:
            source, count = LEARNED, lengths.choose_for(LEARNED, 1)

        def tell(length: int, accepted: int, step_s: float) -> None:
            lengths.record(1, [length], [accepted], step_s, (source,))

        return source != LEARNED, count, tell

    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", help="an EAGLE-3 draft (default: the one that ships)")
    parser.add_argument("--prompts", default=CHAT_PROMPTS)
    parser.add_argument("--limit", type=int, help="the first so many prompts")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--eagle-costs", default="1,1.31,1.41,1.60", help="steps of 0 … 3 drafted tokens")
    parser.add_argument("--lookup-costs", default="1,1.20,1.27,1.35,1.52,1.60", help="steps of 0 … 5 looked-up tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    costs = {False: [float(c) for c in args.eagle_costs.split(",")],
             True: [float(c) for c in args.lookup_costs.split(",")]}  # fmt: skip
    if (len(costs[False]), len(costs[True])) != (EAGLE_TOKENS + 1, LOOKUP_TOKENS + 1):
        parser.error(f"--eagle-costs wants {EAGLE_TOKENS + 1} numbers, --lookup-costs {LOOKUP_TOKENS + 1}")
    answers = record(args)
    policies: list[tuple[str, Callable[[], Policy]]] = [
        *((f"eagle3, {m} fixed", lambda m=m: fixed(m, 0)) for m in range(1, EAGLE_TOKENS + 1)),  # type: ignore[misc]
        ("eagle3, adaptive", lambda: adaptive(False)),
        *((f"ngram, {m} fixed", lambda m=m: fixed(0, m)) for m in (2, 3, LOOKUP_TOKENS)),  # type: ignore[misc]
        ("ngram, adaptive", lambda: adaptive(True)),
        ("ngram+eagle3, 3 and 2 fixed", lambda: fixed(2, 3)),
        ("ngram+eagle3, adaptive", lookup_first),
    ]
    lines = []
    for name, policy in policies:
        runs = [play(answers, policy(), costs, seed) for seed in range(4)]
        speed, run = (round(sum(r[i] for r in runs) / len(runs), 3) for i in (0, 1))
        lines.append({"policy": name, "speed": speed, "tokens_per_step": run})
    if args.json:
        kept = {"answers": len(answers), "eagle_costs": costs[False], "lookup_costs": costs[True], "lines": lines}
        print(json.dumps(kept, indent=1))
        return
    print(f"{len(answers)} answers\n{'policy':30} speed  tokens a step")
    for line in lines:
        print(f"{line['policy']:30} {line['speed']:5.2f}  {line['tokens_per_step']:.2f}")


if __name__ == "__main__":
    main()

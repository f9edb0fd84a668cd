"""Looked-up drafts on paper: what they would have made of real answers, with step costs that are given.

    python benchmarks/draft_play.py                     40 chat prompts, 128 tokens each, the shipped table of phrases
    python benchmarks/draft_play.py --limit 4 --streams 1,4

Greedy answers do not depend on drafts. So each is written once, and the drafters of the engine then walk through them:
a step that verifies R rows in all costs what `benchmarks/native_ops.py` measured for R rows, and `--host-ms` beside
it. Times scatter by 8 per cent with outliers, seeded. Printed: tokens in the time of the plain steps (1.00 is plain
decode) and tokens a step and row. No speed is measured here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

import numpy as np
import torch

from octavo import LLM, SamplingParams
from octavo.bench.workload import CHAT_PROMPTS
from octavo.ops.meta import KVView
from octavo.spec.drafter import DraftRequest, ProposeBatch
from octavo.spec.lookup_first import LookupFirstDrafter
from octavo.spec.ngram import NgramDrafter
from octavo.spec.table import NgramTable, TableDrafter

DRAFT_TOKENS = 5
KV = KVView(None, None, torch.zeros(1, 1, dtype=torch.int32), None, 16)
Answer = tuple[list[int], list[int]]


def record(args: argparse.Namespace) -> tuple[list[Answer], NgramTable]:
    """Prompt and greedy answer of every chat, and the table that ships for this model."""
    llm = LLM(
        model=args.model, draft="ngram+table", draft_model=args.draft_model, accept_license=args.accept_license
    )
    drafter = llm.core.parts.drafter
    if not isinstance(drafter, LookupFirstDrafter):
        raise SystemExit(f"{args.model} has no table of phrases")
    table: NgramTable = drafter.learned.table
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    answers = []
    with open(args.prompts, encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines][: args.limit]
    for prompt in prompts:
        result = llm.chat([{"role": "user", "content": prompt}], params)[0]
        answers.append((list(result.prompt_token_ids), list(result.outputs[0].token_ids)))
    llm.close()
    return answers, table


def play(
    answers: list[Answer],
    drafter: NgramDrafter | LookupFirstDrafter,
    adaptive: bool,
    step_ms: list[float],
    streams: int,
) -> tuple[float, float]:
    """(tokens in the time of the plain steps, tokens a step and row) of `streams` rows at a time."""
    rng, waiting = random.Random(0), list(enumerate(answers))
    lengths = drafter.adapt() if adaptive else None
    texts: dict[int, tuple[list[int], list[int]]] = {}  # row -> what was said, what is still to be said
    plain_ms = drafted_ms = 0.0
    tokens = steps = 0
    while waiting or texts:
        while waiting and len(texts) < streams:
            row, (prompt, answer) = waiting.pop(0)
            texts[row] = [*prompt, answer[0]], answer[1:]
            drafter.begin(DraftRequest(row, tuple(prompt), len(answer), 0))
        rows = tuple(texts)
        said, left = zip(*texts.values(), strict=True)
        at, limits = torch.zeros(len(rows), dtype=torch.int64), tuple(len(true) - 1 for true in left)
        draft = drafter.propose(ProposeBatch(at, rows, at, at, DRAFT_TOKENS, limits, said, KV, 1))
        accepted = []
        for text, true, line, count in zip(said, left, draft.tokens.tolist(), draft.lengths, strict=True):
            right = next((j for j in range(count) if line[j] != true[j]), count)
            text.extend(true[: right + 1])
            del true[: right + 1]
            accepted.append(right)
        cost = step_ms[len(rows) + sum(draft.lengths)]
        if lengths is not None:
            noise = rng.uniform(0.92, 1.08) * (2.0 if rng.random() < 0.02 else 1.0)
            lengths.record(len(rows), draft.lengths, accepted, cost * noise / 1e3, draft.sources)
        drafted_ms += cost
        plain_ms += step_ms[len(rows)] * (sum(accepted) + len(rows)) / len(rows)
        tokens, steps = tokens + sum(accepted) + len(rows), steps + len(rows)
        for row in rows:
            if not texts[row][1]:
                drafter.end(row)
                del texts[row]
    return plain_ms / drafted_ms, tokens / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--accept-license", action="store_true")
    parser.add_argument("--draft-model", help="a table of phrases (default: the one that ships)")
    parser.add_argument("--prompts", default=CHAT_PROMPTS)
    parser.add_argument("--limit", type=int, help="the first so many prompts")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--costs", default="benchmarks/results/native-ops.json", help="what native_ops.py --json wrote")
    parser.add_argument("--host-ms", type=float, default=0.9, help="of a step, beside the forward")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with open(args.costs, encoding="utf-8") as file:
        known = {line["rows"]: 1e3 * statistics.median(line["forward_s"]) for line in json.load(file)["lines"]}
    answers, table = record(args)
    lines = []
    for streams in map(int, args.streams.split(",")):
        rows = range(streams * (1 + DRAFT_TOKENS) + 1)
        step_ms = [args.host_ms + float(ms) for ms in np.interp(rows, list(known), list(known.values()))]
        for name in ("ngram", "ngram+table"):
            for adaptive in (False, True):
                drafter: NgramDrafter | LookupFirstDrafter = NgramDrafter(draft_tokens=DRAFT_TOKENS)
                if name != "ngram":
                    drafter = LookupFirstDrafter(drafter, TableDrafter(table, draft_tokens=DRAFT_TOKENS))
                speed, run = play(answers, drafter, adaptive, step_ms, streams)
                draft = f"{name}, {'adaptive' if adaptive else f'{DRAFT_TOKENS} fixed'}"
                lines.append(
                    {"streams": streams, "draft": draft, "speed": round(speed, 3), "tokens_per_step": round(run, 3)}
                )
    if args.json:
        print(
            json.dumps(
                {"answers": len(answers), "forward_ms": known, "host_ms": args.host_ms, "lines": lines}, indent=1
            )
        )
        return
    print(f"{len(answers)} answers\nstreams  {'draft':24} speed  tokens a step")
    for line in lines:
        print(f"{line['streams']:7}  {line['draft']:24} {line['speed']:5.2f}  {line['tokens_per_step']:.2f}")


if __name__ == "__main__":
    main()

"""Write tests/models/references/*.json: what the transformers library answers on the two real models, in float32.

    python scripts/make_references.py smollm2 /path/to/SmolLM2-135M-Instruct.Q4_1.gguf
    python scripts/make_references.py gemma3-270m /path/to/gemma-3-270m.gguf
    python scripts/make_references.py gemma3-270m-4k /path/to/gemma-3-270m.gguf    one prompt of 3,960 tokens

For every prompt: its token ids (transformers' own reading of the file's tokenizer), 64 greedy ids (32 behind the
prompt of 3,960), the largest logits behind the prompt, and the smallest gap between the two best logits met on the
way (a gap below the comparison's tolerance would make the ids a coin toss, so such prompts are refused).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parent.parent
OUTPUT = REPO / "tests" / "models" / "references"
GREEDY_TOKENS = 64
CONTEXT_GREEDY_TOKENS = 32
TOP = 32
SMALLEST_GAP = 2e-3

PROMPTS = [
    "The printing press changed the way people",
    "Write a short poem about a lighthouse in winter.",
    "def fibonacci(n):\n    ",
    "Water boils at one hundred degrees because",
    "Dear Sir or Madam, I am writing to",
    "List three reasons to learn a second language:\n1.",
    "Once upon a time there was a clockmaker who",
    "La bibliothèque du village se trouve",
    "The three largest planets of the solar system are",
    "A folded sheet of paper with sixteen pages is called",
    "Q: What is the square of twelve?\nA:",
    "In the morning the harbour was quiet, and",
    "To bake bread you need flour, water, salt and",
    "SELECT name, age FROM people WHERE",
    "The difference between a virus and a bacterium is",
    "Music theory begins with the observation that",
]
_LINE = "Entry {}: the keeper counted {} sheets, folded {} of them and put the rest on shelf {}. "
_ENTRIES = "".join(_LINE.format(i, 40 + 7 * i, 3 * i + 2, (i * i) % 11) for i in range(1, 40))
LONG_PROMPT = _ENTRIES + "In summary, the keeper"  # longer than Gemma's window of 512 tokens


def context_prompt() -> str:
    """A prompt of 3,960 tokens of Gemma's: 56 entries of a log, the licence, and the question what entry 7 said.

    That entry stands some 3,700 tokens back, seven windows of the sliding layers: only full attention sees it.
    """
    entries = "".join(_LINE.format(i, 40 + 7 * i, 3 * i + 2, (i * i) % 11) for i in range(1, 57))
    return entries + (REPO / "LICENSE").read_text() + "\nEntry 7: the keeper counted"


def load(path: Path) -> tuple[Any, Any]:
    """(model in float32, tokenizer) read from a GGUF file by transformers itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@torch.no_grad()
def answer(model: Any, ids: list[int], tokens: int = GREEDY_TOKENS) -> dict[str, Any]:
    """Greedy continuation of `ids`, plus the top logits behind the prompt."""
    out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    first = out.logits[0, -1].float()
    greedy: list[int] = []
    smallest_gap, step = float("inf"), first
    for index in range(tokens):
        best = step.topk(2)
        smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        if index + 1 < tokens:
            out = model(torch.tensor([[greedy[-1]]]), past_key_values=out.past_key_values, use_cache=True)
            step = out.logits[0, -1].float()
    top = first.topk(TOP)
    return {
        "prompt_ids": ids,
        "greedy_ids": greedy,
        "top_ids": top.indices.tolist(),
        "top_logits": [round(float(v), 5) for v in top.values],
        "logits_mean": round(float(first.mean()), 6),
        "smallest_gap": round(smallest_gap, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("smollm2", "gemma3-270m", "gemma3-270m-4k"))
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    import transformers

    torch.set_num_threads(1)
    model, tokenizer = load(args.path)
    prompts, tokens = [*PROMPTS, LONG_PROMPT], GREEDY_TOKENS
    if args.name == "gemma3-270m-4k":
        prompts, tokens = [context_prompt()], CONTEXT_GREEDY_TOKENS
    answers = []
    for prompt in prompts:
        result = answer(model, tokenizer(prompt)["input_ids"], tokens)
        print(f"{len(result['prompt_ids'])} tokens, smallest gap {result['smallest_gap']}: {prompt[:40]!r}", flush=True)
        if result["smallest_gap"] >= SMALLEST_GAP:
            answers.append({"text": prompt, **result})
    document = {
        "model": args.name,
        "file": args.path.name,
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "command": f"python scripts/make_references.py {args.name} {args.path.name}",
        "answers": answers,
    }
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / f"{args.name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

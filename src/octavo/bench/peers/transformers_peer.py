"""transformers' `generate`, greedy, a forced number of tokens. Several streams are one left-padded batch."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from protocol import serve


class Peer:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """A GGUF file is dequantised by transformers itself; weights and KV are bfloat16."""
        start = time.perf_counter()
        torch.set_num_threads(int(request["threads"]))
        path = request["model"]
        folder, _, name = path.rpartition("/")
        where = {"gguf_file": name} if path.endswith(".gguf") else {}
        source = folder if where else path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **where).eval()
        return {
            "name": "transformers",
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "weights": "bf16",
            "kv": "bf16",
            "load_s": time.perf_counter() - start,
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """As many prompts at a time as there are streams; `generate` takes nobody in before a batch is over."""
        prompts, streams = request["prompts"], int(request["streams"])
        batches = [self._batch(prompts[i : i + streams], request) for i in range(0, len(prompts), streams)]
        return {
            "wall_s": sum(batch["wall_s"] for batch in batches),
            "first_token_s": [s for batch in batches for s in batch["first_token_s"]],
            "decode_s": sum(batch["decode_s"] for batch in batches),
            "output_tokens": [ids for batch in batches for ids in batch["output_tokens"]],
        }

    @torch.inference_mode()
    def _batch(self, prompts: list[list[int]], request: dict[str, Any]) -> dict[str, Any]:
        wanted = int(request["output_tokens"])
        width = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        first = _FirstToken()
        start = time.perf_counter()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=wanted,
            min_new_tokens=wanted,
            logits_processor=[first],
            use_cache=True,
        )
        end = time.perf_counter()
        first_s = (first.at_s or end) - start
        return {
            "wall_s": end - start,
            "first_token_s": [first_s] * len(prompts),
            "decode_s": end - start - first_s,
            "output_tokens": out[:, width:].tolist(),
        }


class _FirstToken(transformers.LogitsProcessor):
    """Notes when the first logits are there; changes nothing."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at_s is None:
            self.at_s = time.perf_counter()
        return scores


if __name__ == "__main__":
    peer = Peer()
    serve({"load": peer.load, "run": peer.run})

"""vLLM on a CPU: bf16 safetensors, prefix cache off, eager. It reads a folder, not a GGUF file."""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import serve


class Peer:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        threads = int(request["threads"])
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}-{cpus[-1]}" if threads > 1 else str(cpus[0]))
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(
            request["model"],
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=int(request["context_tokens"]),
            max_num_seqs=max(int(request["streams"]), 1),
            disable_log_stats=False,
        )
        return {
            "name": "vLLM",
            "version": f"vllm {vllm.__version__}",
            "weights": "bf16",
            "kv": "bf16",
            "load_s": time.perf_counter() - start,
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        wanted = int(request["output_tokens"])
        params = self.vllm.SamplingParams(
            temperature=float(request.get("temperature", 0.0)), max_tokens=wanted, min_tokens=wanted, ignore_eos=True
        )
        start = time.perf_counter()
        results = self._answers(request["prompts"], params, int(request["streams"]))
        wall_s = time.perf_counter() - start
        first_s = []
        for result in results:
            stats = getattr(result, "metrics", None)
            latency = getattr(stats, "first_token_latency", None) if stats is not None else None
            first_s.append(float(latency) if latency else wall_s / wanted)
        return {
            "wall_s": wall_s,
            "first_token_s": first_s,
            "decode_s": wall_s - max(first_s),
            "output_tokens": [list(r.outputs[0].token_ids) for r in results],
        }

    def _answers(self, prompts: list[list[int]], params: Any, streams: int) -> list[Any]:
        """In order; `streams` requests run at a time."""
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        if len(asked) <= streams:
            return list(self.llm.generate(asked, params, use_tqdm=False))
        engine, done, begun = self.llm.llm_engine, {}, 0
        while len(done) < len(asked):
            while begun < len(asked) and begun - len(done) < streams:
                engine.add_request(str(begun), asked[begun], params)
                begun += 1
            done.update({int(out.request_id.split("-")[0]): out for out in engine.step() if out.finished})
        return [done[i] for i in range(len(asked))]


if __name__ == "__main__":
    peer = Peer()
    serve({"load": peer.load, "run": peer.run})

"""llama.cpp through the C interface of llama-cpp-python: greedy, a forced number of tokens, no Python per logit."""

from __future__ import annotations

import math
import time
from importlib.metadata import version
from typing import Any

import llama_cpp as lc
import numpy as np
from protocol import serve

BATCH_TOKENS = 2048


class Peer:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open the GGUF file with defaults of llama.cpp's own server: f16 KV, flash attention where it says so."""
        start = time.perf_counter()
        lc.llama_backend_init()
        model_params = lc.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = lc.llama_model_load_from_file(request["model"].encode(), model_params)
        if not self.model:
            raise RuntimeError(f"cannot load {request['model']}")
        self.vocab_tokens = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        params = lc.llama_context_default_params()
        streams = int(request["streams"])
        params.n_ctx = streams * int(request["context_tokens"])
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH_TOKENS, 512, streams
        params.n_threads = params.n_threads_batch = int(request["threads"])
        self.context = lc.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("cannot make a context")
        self.memory = lc.llama_get_memory(self.context)
        self.sampler = lc.llama_sampler_init_greedy()
        self.batch = lc.llama_batch_init(BATCH_TOKENS, 0, streams)
        return {
            "name": "llama.cpp",
            "version": f"llama-cpp-python {version('llama-cpp-python')}",
            "weights": "the file's",
            "kv": "f16",
            "load_s": time.perf_counter() - start,
            "system": lc.llama_print_system_info().decode(),
        }

    def _add(self, token: int, position: int, stream: int, wants_logits: bool) -> int:
        batch, index = self.batch, self.batch.n_tokens
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
        batch.logits[index] = wants_logits
        batch.n_tokens = index + 1
        return index

    def _decode(self) -> None:
        if lc.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _prefill(self, ids: list[int], slot: int) -> int:
        """The first token behind a prompt, which gets the slot to itself."""
        lc.llama_memory_seq_rm(self.memory, slot, -1, -1)
        for begin in range(0, len(ids), BATCH_TOKENS):
            self.batch.n_tokens = 0
            for offset, token in enumerate(ids[begin : begin + BATCH_TOKENS], start=begin):
                index = self._add(token, offset, slot, offset == len(ids) - 1)
            self._decode()
        return int(lc.llama_sampler_sample(self.sampler, self.context, index))

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """A slot for each stream: one prompt after the other through prefill, then one token for every slot a step."""
        prompts, wanted = request["prompts"], int(request["output_tokens"])
        slots = min(int(request["streams"]), len(prompts))
        lc.llama_memory_clear(self.memory, True)
        outputs: list[list[int]] = [[] for _ in prompts]
        first_s: list[float] = []
        step_s: list[float] = []
        running: dict[int, int] = {}  # slot -> prompt
        begun, filling_s = 0, 0.0
        start = time.perf_counter()
        while True:
            filling = time.perf_counter()
            for slot in range(slots):
                while slot not in running and begun < len(prompts):
                    asked = start if begun < slots else time.perf_counter()
                    outputs[begun].append(self._prefill(prompts[begun], slot))
                    first_s.append(time.perf_counter() - asked)
                    if wanted > 1:
                        running[slot] = begun
                    begun += 1
            step_start = time.perf_counter()
            filling_s += step_start - filling
            if not running:
                break
            self.batch.n_tokens = 0
            for slot, prompt in running.items():
                self._add(outputs[prompt][-1], len(prompts[prompt]) + len(outputs[prompt]) - 1, slot, True)
            self._decode()
            for index, prompt in enumerate(running.values()):
                outputs[prompt].append(lc.llama_sampler_sample(self.sampler, self.context, index))
            running = {slot: prompt for slot, prompt in running.items() if len(outputs[prompt]) < wanted}
            step_s.append(time.perf_counter() - step_start)
        wall_s = time.perf_counter() - start
        return {
            "wall_s": wall_s,
            "first_token_s": first_s,
            "decode_s": wall_s - filling_s,
            "output_tokens": outputs,
            "step_s": step_s,
        }

    def perplexity(self, request: dict[str, Any]) -> dict[str, Any]:
        """Negative log-likelihood (nats) over windows that each start afresh; the first token of each is given."""
        ids, window = request["token_ids"], int(request["window_tokens"])
        nll, counted = 0.0, 0
        for begin in range(0, len(ids) - 1, window):
            piece = ids[begin : begin + window]
            lc.llama_memory_clear(self.memory, True)
            self.batch.n_tokens = 0
            for position, token in enumerate(piece):
                self._add(token, position, 0, True)
            self._decode()
            for position in range(len(piece) - 1):
                pointer = lc.llama_get_logits_ith(self.context, position)
                logits = np.ctypeslib.as_array(pointer, shape=(self.vocab_tokens,)).astype(np.float64)
                top = logits.max()
                nll += top + math.log(np.exp(logits - top).sum()) - logits[piece[position + 1]]
                counted += 1
        return {"nll": float(nll), "tokens": counted}


if __name__ == "__main__":
    peer = Peer()
    serve({"load": peer.load, "run": peer.run, "perplexity": peer.perplexity})

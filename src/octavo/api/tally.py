"""What an answer adds up to: usage and speculation figures over its prompts and choices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.api.schema import Sampled
    from octavo.engine.messages import ChoiceDelta

FIGURES = ("queue_s", "prefill_s", "ttft_s", "decode_s", "e2e_s", "decode_tokens_per_s", "kv_pages", "preemptions")


class Tally:
    """Counts the deltas of one call. Prompts are counted once, however many choices they have."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self._prompts: dict[str, tuple[int, int]] = {}
        self._metrics: list[dict[str, Any]] = []

    def prompt(self, request_id: str, tokens: int) -> None:
        self._prompts[request_id] = (tokens, 0)

    def add(self, delta: ChoiceDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if delta.index == 0 and delta.prompt_tokens:
            self._prompts[delta.request_id] = (delta.prompt_tokens, delta.cached_tokens)
        if delta.finished and delta.metrics is not None:
            self._metrics.append(delta.metrics.to_dict())

    def usage(self) -> dict[str, Any]:
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }

    def metrics(self) -> dict[str, Any]:
        """Speculation summed over the choices; times of the first choice that ended."""
        spec = self._metrics
        positions = max((len(s["accepted_per_position"]) for s in spec), default=0)
        total: dict[str, Any] = {k: sum(s[k] for s in spec) for k in ("drafts", "draft_tokens", "accepted_tokens")}
        total["accepted_per_position"] = [
            sum(s["accepted_per_position"][i] for s in spec if i < len(s["accepted_per_position"]))
            for i in range(positions)
        ]
        drafts = total["drafts"]
        total["mean_accept_length"] = 1 + total["accepted_tokens"] / drafts if drafts else None
        out: dict[str, Any] = {"speculative_decoding": total}
        if self._metrics:
            first = self._metrics[0]
            out.update({name: first.get(name) for name in FIGURES})
        return out


class StreamUsage:
    """What the chunks of a stream say about usage: nothing, only the last one, or each (see `stream_options`)."""

    def __init__(self, tally: Tally, body: Sampled) -> None:
        options = body.stream_options
        self._tally = tally
        self._wanted = options is not None and bool(options.include_usage)
        self._in_each = self._wanted and options is not None and bool(options.continuous_usage_stats)
        self._metrics = bool(body.include_metrics)

    def of_chunk(self) -> dict[str, Any]:
        """Fields of a chunk with choices."""
        if not self._wanted:
            return {}
        return {"usage": self._tally.usage() if self._in_each else None}

    def of_end(self) -> dict[str, Any] | None:
        """Fields of the last chunk, which has no choices; None: there is none."""
        if not self._wanted and not self._metrics:
            return None
        metrics = {"metrics": self._tally.metrics()} if self._metrics else {}
        return {"choices": [], "usage": self._tally.usage() if self._wanted else None, **metrics}

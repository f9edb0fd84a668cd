"""What every handler needs: the engine's client, the tokenizer, the names, the metrics, and whether we are draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from octavo._version import __version__
from octavo.api.logprobs import TokenText
from octavo.engine.client import EngineClient, EngineState, RequestStream
from octavo.engine.handshake import unpack_tokenizer
from octavo.engine.messages import ChoiceDelta
from octavo.engine.request import Bootstrap, EngineRequest
from octavo.errors import EngineDead, OctavoError, UnknownModel
from octavo.obs import traces
from octavo.obs.metrics import ServerMetrics
from octavo.obs.rates import Rates

if TYPE_CHECKING:
    from octavo.config import ServerConfig
    from octavo.model.load.tokenizer import Tokenizer
    from octavo.params import SamplingParams

logger = logging.getLogger("octavo.api")
T = TypeVar("T")


class Service:
    """State of one server. Lives in `app.state.service`."""

    def __init__(self, config: ServerConfig, client: EngineClient) -> None:
        self.config, self.client = config, client
        self.metrics = ServerMetrics()
        self.rates = Rates()
        self.last_stats: dict[str, Any] = {}
        self.fingerprint = f"octavo-{__version__}"
        self.draining = False
        self.started_s = time.time()
        self._tokenizer: Tokenizer | None = None
        # Tokenisation runs here so that a long prompt does not hold up other clients' streams.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        client.on_ready = self._load_tokenizer

    def _load_tokenizer(self) -> None:
        self._tokenizer = unpack_tokenizer(self.client.tokenizer_payload)
        self.token_text = TokenText(self._tokenizer)

    # names and state

    @property
    def names(self) -> tuple[str, ...]:
        """Names clients may ask for; the first is the one in answers."""
        return self.config.served_model_name or (str(self.client.info.get("model_name", self.config.model)),)

    @property
    def model(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int | None:
        return self.client.info.get("max_model_len")

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineDead("the model is still loading")
        return self._tokenizer

    def serves(self, name: str) -> bool:
        """Whether clients may ask for `name`: also what --model was given, unless other names were chosen."""
        return name in self.names or (not self.config.served_model_name and name == self.config.model)

    def check_model(self, name: str | None) -> None:
        """Raises `UnknownModel` (404) if a request names a model that is not served."""
        if name is not None and not self.serves(name):
            shown = name[:120].encode("utf-8", "backslashreplace").decode()
            raise UnknownModel(f"model: {shown!r} is not served here; served: {', '.join(self.names)}", param="model")

    def unready(self) -> str | None:
        """Why `/ready` is 503, or None."""
        if self.draining:
            return "draining"
        if self.client.state is EngineState.STARTING:
            return "the model is loading"
        if self.client.state is not EngineState.READY or not self.client.healthy:
            return "the engine does not answer"
        if not self.client.progressing:
            return f"a step has been running for {self.client.beat.loop_age_s:.0f} s"
        return None

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    # requests

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams, priority: int,
               bootstrap: Bootstrap | None = None) -> Call:
        """Hand one prompt to the engine; await `call.accepted()` next. Raises `EngineDead` if there is none."""
        if self.draining:
            raise EngineDead("the server is stopping")
        return Call(self, EngineRequest(request_id, prompt, params, time.monotonic(), priority, bootstrap))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Call:
    """One prompt in the engine: its deltas, counted and timed as they pass."""

    def __init__(self, service: Service, request: EngineRequest) -> None:
        self.request = request
        self.stream: RequestStream = service.client.submit(request)
        self._metrics, self._rates = service.metrics, service.rates
        self._lands = service.config.role == "decode"
        self._span = traces.begin(request.request_id, len(request.prompt_token_ids), request.params.n)
        self._last_s: dict[int, float] = {}
        self._open = request.params.n

    async def accepted(self) -> None:
        """Until the engine has queued the request; on a decode server, until KV and first token of every choice have
        landed, so that a stream, too, reports a prefill server that is gone as its status: behind headers that are sent
        a router would wait for the other half. Raises the engine's refusal, or `EngineDead`; close the call then."""
        await asyncio.shield(self.stream.accepted)
        if self._lands:
            with self._counting_errors():
                await self.stream.begun()

    @contextlib.contextmanager
    def _counting_errors(self) -> Iterator[None]:
        """What ends here in an error is counted once for every choice that was open."""
        try:
            yield
        except OctavoError:
            for _ in range(self._open):
                self._metrics.count_finish("error")
            self._open = 0
            raise

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        with self._counting_errors():
            async for delta in self.stream:
                self._observe(delta)
                yield delta

    def close(self) -> None:
        """Stop now: what still runs is aborted in the engine."""
        if self._open and self.stream.running:
            for _ in range(self._open):
                self._metrics.count_finish("abort")
        self._open = 0
        self._span.end()
        self.stream.close()

    def _observe(self, delta: ChoiceDelta) -> None:
        now, count = time.monotonic(), len(delta.token_ids)
        if count:
            last = self._last_s.get(delta.index)
            if last is None:
                self._metrics.observe("time_to_first_token_seconds", now - self.request.arrival_s)
            else:
                self._metrics.observe("inter_token_latency_seconds", (now - last) / count, count)
            self._last_s[delta.index] = now
            self._rates.tokens(count, now)
        if delta.finished:
            self._open -= 1
            self._metrics.count_finish(delta.finish_reason or "stop")
            self._metrics.observe("e2e_request_latency_seconds", now - self.request.arrival_s)
            self._span.choice(delta.index, delta.finish_reason, delta.metrics)
            logger.debug("%s[%d] ended: %s, %d prompt tokens, %.3f s", self.request.request_id, delta.index,
                         delta.finish_reason, len(self.request.prompt_token_ids), now - self.request.arrival_s)
            for name in ("queue", "prefill", "decode"):
                value_s = getattr(delta.metrics, f"{name}_s", None)
                if value_s is not None:
                    self._metrics.observe(f"request_{name}_time_seconds", value_s)


def version() -> str:
    return __version__

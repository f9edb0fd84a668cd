"""The API process's side of the engine: start it, talk to it, notice when it dies.

`EngineClient` belongs to one asyncio loop. `submit` gives a `RequestStream`; closing the stream early aborts the
request in the engine. When the engine process dies or goes silent, every stream in flight ends with `EngineDead`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.engine import messages as m
from octavo.engine.process import DEFAULT_CORE, Boot
from octavo.engine.request import EngineRequest
from octavo.errors import EngineDead, OctavoError, RequestError

SILENCE_S = 4.0  # without a heartbeat for this long the engine counts as dead to clients (they are promised 5 s)
KILL_AFTER_S = 10.0  # a silent engine is killed after this long; until then it may come back (a stopped process)
WATCH_INTERVAL_S = 0.25


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"  # the process is there but no heartbeat comes
    DEAD = "dead"
    CLOSED = "closed"


class RequestStream:
    """What one submitted request sends back: an async iterator of `ChoiceDelta`, over when every choice ended."""

    def __init__(self, client: EngineClient, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self._client = client
        self._open_choices = set(range(request.params.n))
        self._queue: asyncio.Queue[m.ChoiceDelta | OctavoError] = asyncio.Queue()
        self._kept: deque[m.ChoiceDelta] = deque()  # taken out of the queue by `begun`, not yet read
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def done(self) -> bool:
        """Nothing more will come from the engine."""
        return not self._open_choices

    @property
    def running(self) -> bool:
        """The engine has taken the request and not finished it."""
        return bool(self._open_choices) and self.accepted.done()

    def put(self, delta: m.ChoiceDelta) -> None:
        if delta.index not in self._open_choices:
            return
        if delta.finished:
            self._open_choices.discard(delta.index)
        self._queue.put_nowait(delta)

    def fail(self, error: OctavoError) -> None:
        """End the stream with `error`, whatever the engine still says."""
        self._open_choices.clear()
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # seen: no warning if nobody waits any more
        self._queue.put_nowait(error)

    def cut(self) -> None:
        """End every open choice with finish_reason "abort", also where the engine has not answered yet."""
        if not self.accepted.done():
            self.accepted.set_result(None)
        for index in sorted(self._open_choices):
            self.put(m.ChoiceDelta(self.request_id, index, "", [], finished=True, finish_reason="abort"))

    async def begun(self) -> None:
        """Until something of every choice can be read. Raises what comes instead."""
        silent = set(self._open_choices)
        while silent:
            self._kept.append(await self._next())
            silent.discard(self._kept[-1].index)

    async def _next(self) -> m.ChoiceDelta:
        item = await self._queue.get()
        if isinstance(item, OctavoError):
            raise item
        if item.error is not None:
            raise item.error.error()
        return item

    async def __aiter__(self) -> AsyncIterator[m.ChoiceDelta]:
        while self._kept:
            yield self._kept.popleft()
        while not (self.done and self._queue.empty()):
            yield await self._next()

    def close(self) -> None:
        """The reader has gone: free the request's pages at the engine's next step."""
        self._client.forget(self)


class EngineClient:
    """Starts and owns one engine process at a time."""

    def __init__(self, config: Any, *, core: str = DEFAULT_CORE, restart: bool = False) -> None:
        self.config = config
        self.state = EngineState.CLOSED
        self.restart = restart
        self.restarts = 0
        self.restarting = False
        self.info: dict[str, Any] = {}
        self.tokenizer_payload = b""
        self.beat = m.Beat(False, 0, 0.0, 0)
        self.death: OctavoError | None = None
        self.on_ready: Callable[[], None] | None = None
        self._core = core
        self._context = zmq.asyncio.Context()
        self._streams: dict[str, RequestStream] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._last_beat_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._settled: asyncio.Event = asyncio.Event()  # ready, or dead for good
        self._decoder = msgspec.msgpack.Decoder(m.Event)

    # life

    async def start(self) -> None:
        """Start the engine process and return at once; `wait_ready` waits for the model."""
        self._settled.clear()
        self.death = None
        self.state = EngineState.STARTING
        self._folder = tempfile.mkdtemp(prefix="octavo-")  # mode 0700: nobody else can talk to the engine
        commands, events = (f"ipc://{self._folder}/{name}" for name in ("commands", "events"))
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._commands.bind(commands)
        self._events = self._context.socket(zmq.PULL)
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.bind(events)
        self._spawn(Boot(self.config, self._core, commands, events))
        self._last_beat_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    def _spawn(self, boot: Boot) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([package_root, os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.process"],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a signal to our process group is ours to handle: we drain, then stop it
        )
        raw = pickle.dumps((sys.path, pickle.dumps(boot)))
        pipe = self._process.stdin
        if pipe is None:
            raise EngineDead("the engine process has no input pipe")
        with contextlib.suppress(BrokenPipeError):
            pipe.write(len(raw).to_bytes(8, "little") + raw)
            pipe.flush()

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the model is loaded. Raises what the engine raised (a typed error), or `EngineDead`."""
        try:
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        except TimeoutError:
            raise EngineDead(f"the engine was not ready within {timeout_s} s") from None
        if self.state is not EngineState.READY:
            raise self.death or EngineDead("the engine process is gone")

    async def close(self, timeout_s: float = 10.0) -> None:
        """Stop the engine: politely if it listens, by SIGKILL after `timeout_s`. Streams in flight end with
        `EngineDead`."""
        if self.state is EngineState.CLOSED:
            return
        was, self.state = self.state, EngineState.CLOSED
        self._fail_all(EngineDead("the server is stopping"))
        process = self._process
        if process is not None and process.poll() is None and was is EngineState.READY:
            self._send(m.Shutdown())
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, timeout_s)
        await self._stop_tasks()
        self._reap()
        self._context.destroy(linger=0)

    async def _stop_tasks(self) -> None:
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        await asyncio.gather(*(t for t in self._tasks if t is not current), return_exceptions=True)

    def _reap(self) -> None:
        """Make sure the process is gone and its sockets and folder with it."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
        self._commands.close(0)
        self._events.close(0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # what callers ask

    @property
    def pid(self) -> int | None:
        """Process id of the engine process."""
        return None if self._process is None else self._process.pid

    @property
    def in_flight(self) -> int:
        """Requests submitted and not finished."""
        return len(self._streams)

    @property
    def healthy(self) -> bool:
        """The engine process answered a heartbeat lately."""
        return self.state in (EngineState.STARTING, EngineState.READY) and self.beat_age_s < SILENCE_S

    @property
    def beat_age_s(self) -> float:
        return time.monotonic() - self._last_beat_s

    @property
    def progressing(self) -> bool:
        """No step has been running for 5 s."""
        return not self.beat.busy or self.beat.loop_age_s < 5.0

    def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request to the engine. Raises `EngineDead` at once if there is none.

        Await `stream.accepted` to learn of a refusal (`RequestError`, `QueueFull`, …) before any output.
        """
        if self.state is not EngineState.READY:
            raise self._unavailable()
        if request.request_id in self._streams:
            raise RequestError(f"request_id: {request.request_id!r} is in use", param="request_id")
        stream = RequestStream(self, request)
        self._send(m.Submit(request))  # may refuse: only what was sent is in flight
        self._streams[request.request_id] = stream
        return stream

    def _unavailable(self) -> OctavoError:
        if self.state is EngineState.STARTING:
            return EngineDead("the model is still loading")
        if self.state is EngineState.SILENT:
            return EngineDead(f"the engine has not answered for {self.beat_age_s:.1f} s")
        return EngineDead(f"the engine is not running{f': {self.death}' if self.death else ''}")

    def forget(self, stream: RequestStream) -> None:
        """Abort what is left of `stream` in the engine; harmless when it is finished."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            if not stream.done and self.state is not EngineState.CLOSED:
                self._send(m.Abort([stream.request_id]))

    def abort(self, request_id: str) -> bool:
        """End one request (every choice) with finish_reason "abort". False if it is not in flight."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self._send(m.Abort([request_id]))
        stream.cut()
        return True

    def abort_all(self) -> int:
        """End every request in flight; returns how many there were."""
        return sum(self.abort(request_id) for request_id in list(self._streams))

    def matching(self, prefix: str) -> list[str]:
        """Ids of the requests in flight that are `prefix` or were split off from it (`prefix-0`, …)."""
        return [i for i in self._streams if i == prefix or i.startswith(prefix + "-")]

    async def query(self, what: str, timeout_s: float = 5.0) -> Any:
        """Ask the engine loop for "report", "stats" or "flush_cache"."""
        if self.state is not EngineState.READY:
            raise self._unavailable()
        self._number += 1
        number = self._number
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        self._send(m.Query(number, what))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineDead(f"the engine did not answer {what!r} within {timeout_s:g} s") from None
        finally:
            self._replies.pop(number, None)

    def _send(self, command: m.Command) -> None:
        try:
            raw = m.encoder.encode(command)
        except OverflowError:
            param = m.too_wide(command)
            raise RequestError(f"{param}: a number in it does not fit into 64 bits", param=param) from None
        self._commands.send(raw, copy=True)

    # what the engine says

    async def _read(self) -> None:
        while True:
            event = self._decoder.decode(await self._events.recv())
            if isinstance(event, m.Outputs):
                for delta in event.deltas:
                    self._deliver(delta)
            elif isinstance(event, m.Beat):
                self._hear(event)
            elif isinstance(event, (m.Accepted, m.Rejected)):
                self._decide(event)
            elif isinstance(event, m.Reply):
                future = self._replies.get(event.number)
                if future is not None and not future.done():
                    if event.error is not None:
                        future.set_exception(event.error.error())
                    else:
                        future.set_result(event.value)
            elif isinstance(event, m.Ready):
                self.info, self.tokenizer_payload = event.info, event.tokenizer
                self.state = EngineState.READY
                if self.on_ready is not None:
                    self.on_ready()
                self._settled.set()
            else:
                self.death = event.error.error()

    def _hear(self, beat: m.Beat) -> None:
        self.beat, self._last_beat_s = beat, time.monotonic()
        if self.state is EngineState.SILENT:
            self.state = EngineState.READY if self._settled.is_set() else EngineState.STARTING

    def _deliver(self, delta: m.ChoiceDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:
            return  # its reader left
        stream.put(delta)
        if stream.done:
            del self._streams[delta.request_id]

    def _decide(self, event: m.Accepted | m.Rejected) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if isinstance(event, m.Accepted):
            if not stream.accepted.done():
                stream.accepted.set_result(None)
        else:
            del self._streams[event.request_id]
            stream.fail(event.error.error())

    async def _watch(self) -> None:
        """Notice death (the process has ended) and silence (no heartbeat)."""
        woke_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            late_s = time.monotonic() - woke_s - WATCH_INTERVAL_S
            woke_s = time.monotonic()
            if late_s > 1.0:  # we were held up ourselves (suspended, say): beats may be waiting to be read
                self._last_beat_s += late_s
            if self._process is not None and self._process.poll() is not None:
                await asyncio.sleep(0.1)  # let its last words arrive
                await self._die(f"the engine process ended with exit code {self._process.returncode}")
                return
            if self.beat_age_s > SILENCE_S and self.state in (EngineState.STARTING, EngineState.READY):
                self.state = EngineState.SILENT
                streams = list(self._streams.values())
                self._fail_all(self._unavailable())
                self._send(m.Abort([stream.request_id for stream in streams]))
            if self.beat_age_s > KILL_AFTER_S:
                await self._die(f"the engine process was silent for {self.beat_age_s:.0f} s and was killed")
                return

    def _fail_all(self, error: OctavoError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(error)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)

    async def _die(self, reason: str) -> None:
        if self.state is EngineState.CLOSED:
            return
        was_ready = self._settled.is_set()
        self.state = EngineState.DEAD
        self.death = self.death or EngineDead(reason)
        self._fail_all(EngineDead(f"{self.death}; the request was lost"))
        await self._stop_tasks()
        self._reap()
        if self.restart and was_ready:
            self.restarts, self.restarting = self.restarts + 1, True
            await asyncio.sleep(min(0.5 * self.restarts, 30.0))
            self.restarting = False
            await self.start()
        else:
            self._settled.set()

"""The engine core in a process of its own: drain commands, run one step, send what came out, round again.

Started by `octavo.engine.client` as `python -m octavo.engine.process`; the configuration comes over stdin, which
then stays open for life: when it closes, the parent is gone and so are we (whatever killed it). The loop blocks in
poll while idle, so an idle engine uses no CPU. A second thread sends a heartbeat, so a long step is not mistaken
for death; a stopped or killed process sends none.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from octavo.engine import messages as m
from octavo.engine.handshake import describe, pack_tokenizer
from octavo.engine.output import TokenLogprob
from octavo.engine.request import ChoiceOutput
from octavo.errors import OctavoError
from octavo.obs import logs

BEAT_INTERVAL_S = 0.5
DEFAULT_CORE = "octavo.engine.core:EngineCore"


@dataclasses.dataclass(frozen=True)
class Boot:
    """What the parent tells a new engine process. `core` is `module:Class` of the engine core."""

    config: Any
    core: str
    command_address: str
    event_address: str


class Heart:
    """The heartbeat thread and the two numbers the loop gives it."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.busy = False
        self.steps = 0
        self.last_pass_s = time.monotonic()
        self._context, self._address = context, address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def mark(self, busy: bool) -> None:
        self.busy = busy
        self.last_pass_s = time.monotonic()

    def _run(self) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address)
        while True:
            age_s = time.monotonic() - self.last_pass_s if self.busy else 0.0
            socket.send(m.encoder.encode(m.Beat(self.busy, self.steps, age_s, rss_bytes())))
            if self._stop.wait(BEAT_INTERVAL_S):
                break
        socket.close()


def rss_bytes() -> int:
    """Resident memory of this process in bytes (0 where /proc is missing)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def builtins_of(value: Any) -> Any:
    """`value` as JSON-able builtins: dataclasses and numpy scalars included."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_other)


def _other(value: Any) -> Any:
    for method in ("tolist", "item", "to_dict"):
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value)


def delta_of(output: ChoiceOutput) -> m.ChoiceDelta:
    """The wire form of a core's output."""
    return m.ChoiceDelta(
        request_id=output.request_id,
        index=output.index,
        text=output.text,
        token_ids=[int(t) for t in output.token_ids],
        logprobs=_entries(output.logprobs),
        finished=output.finished,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        prompt_tokens=output.prompt_tokens,
        cached_tokens=output.cached_tokens,
        metrics=output.metrics,
        error=None if output.error is None else m.ErrorInfo.of(output.error),
        prompt_logprobs=_entries(output.prompt_logprobs),
    )


def _entries(entries: Any) -> Any:
    """Log-probabilities as plain numbers, None where there is none."""
    if entries is None:
        return None
    return [None if p is None else TokenLogprob(int(p.token_id), float(p.logprob), _pairs(p.top)) for p in entries]


def _pairs(top: Any) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), float(logprob)) for token, logprob in top)


class EngineLoop:
    """Commands in, steps, outputs out. One thread; owns the core and both sockets."""

    def __init__(self, core: Any, commands: zmq.Socket[Any], events: zmq.Socket[Any], heart: Heart, wake: int) -> None:
        self.core, self.commands, self.events, self.heart = core, commands, events, heart
        self.stopping = False
        self._wake = wake
        self._decoder = msgspec.msgpack.Decoder(m.Command)
        self._poller = zmq.Poller()
        self._poller.register(commands, zmq.POLLIN)
        self._poller.register(wake, zmq.POLLIN)
        self._news = os.eventfd(0, os.EFD_NONBLOCK)  # other servers have said something, a transfer has ended
        self._poller.register(self._news, zmq.POLLIN)
        side = getattr(core, "side", None)
        if side is not None:
            side.on_news(lambda: os.eventfd_write(self._news, 1))

    def run(self) -> None:
        """Until `Shutdown` or a signal. What the core raises here ends the process: its state is not to be trusted."""
        while not self.stopping:
            busy = self.core.has_work()
            self.heart.mark(busy)
            ready = dict(self._poller.poll(0 if busy else self._patience_ms()))
            if self._news in ready:
                os.eventfd_read(self._news)
            if self._wake in ready:
                os.read(self._wake, 64)
                self.stopping = True
            if self.commands in ready:
                self._drain()
            if not self.stopping and self.core.has_work():
                self.heart.mark(True)
                outputs = self.core.step()
                self.heart.steps += 1
                if outputs:
                    self.send(m.Outputs([delta_of(output) for output in outputs]))

    def _patience_ms(self) -> int | None:
        ask = getattr(self.core, "patience_s", None)
        patience_s = ask() if ask is not None else None
        return None if patience_s is None else max(1, int(patience_s * 1000))

    def send(self, event: m.Event) -> None:
        self.events.send(m.encoder.encode(event))

    def _drain(self) -> None:
        while not self.stopping:
            try:
                raw = self.commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(self._decoder.decode(raw))

    def _obey(self, command: m.Command) -> None:
        if isinstance(command, m.Submit):
            self._submit(command)
        elif isinstance(command, m.Abort):
            for request_id in command.request_ids:
                self.core.abort(request_id)
        elif isinstance(command, m.Query):
            self._answer(command)
        else:
            self.stopping = True

    def _submit(self, command: m.Submit) -> None:
        request = command.request
        try:
            self.core.add_request(request)
        except OctavoError as error:
            self.send(m.Rejected(request.request_id, m.ErrorInfo.of(error)))
        except Exception as error:  # a fault of ours that one request has found must not take the others along
            traceback.print_exc()
            self.send(m.Rejected(request.request_id, m.ErrorInfo.of(error)))
        else:
            self.send(m.Accepted(request.request_id))

    def _answer(self, query: m.Query) -> None:
        questions: dict[str, Callable[[], Any]] = {
            "report": self.core.report,
            "stats": self.core.stats,
            "flush_cache": self.core.flush_cache,
        }
        try:
            self.send(m.Reply(query.number, builtins_of(questions[query.what]())))
        except OctavoError as error:
            self.send(m.Reply(query.number, None, m.ErrorInfo.of(error)))


def _watch_parent() -> None:
    """Block until stdin closes, that is until the parent is gone, then leave at once."""
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(3)


def _load_core(boot: Boot) -> Any:
    module, _, name = boot.core.partition(":")
    return getattr(importlib.import_module(module), name)(boot.config)


def main() -> int:
    """Entry point of the child process. Returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent, which drains us
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGTERM, lambda *_: os.write(wake_write, b"x") and None)
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    boot_raw = sys.stdin.buffer.read(size)
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    boot_paths, boot_pickle = pickle.loads(boot_raw)
    sys.path[:] = boot_paths
    boot: Boot = pickle.loads(boot_pickle)
    return _serve(boot, wake_read)


def _serve(boot: Boot, wake: int) -> int:
    context = zmq.Context(1)
    events = context.socket(zmq.PUSH)
    events.setsockopt(zmq.SNDHWM, 0)
    events.setsockopt(zmq.LINGER, 2000)
    events.connect(boot.event_address)
    commands = context.socket(zmq.PULL)
    commands.setsockopt(zmq.RCVHWM, 0)
    commands.connect(boot.command_address)
    heart = Heart(context, boot.event_address)
    heart.start()
    level = getattr(boot.config, "log_level", None)  # a library call leaves logging to its program
    if level is not None:
        logs.configure(level, as_json=boot.config.log_json)
    try:
        core = _load_core(boot)
        ready = m.Ready(builtins_of(describe(core)), pack_tokenizer(core.tokenizer))
        events.send(m.encoder.encode(ready))
        EngineLoop(core, commands, events, heart, wake).run()
        core.close()  # checks the books: what it raises is reported like any other failure
        return 0
    except BaseException as error:
        if not isinstance(error, OctavoError) or error.status >= 500:
            traceback.print_exc()
        events.send(m.encoder.encode(m.Fatal(m.ErrorInfo.of(error))))
        return 1
    finally:
        heart.stop()
        events.close()
        commands.close(0)
        context.term()


if __name__ == "__main__":
    from octavo.engine.process import main as _main  # one copy of this module, also for what is unpickled

    # Leave without running other modules' exit handlers: threads of a numeric library may still be busy.
    code = _main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

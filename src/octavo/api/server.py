"""`octavo serve`: bind, start the engine process, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from octavo.api.app import create_app
from octavo.api.service import Service
from octavo.api.watch import log_load
from octavo.engine.client import EngineClient, EngineState
from octavo.engine.process import DEFAULT_CORE
from octavo.errors import ConfigError
from octavo.obs import logs

if TYPE_CHECKING:
    from octavo.config import ServerConfig

logger = logging.getLogger("octavo.server")

LINGER_S = 5.0  # after the engine died for good: time for probes and clients to see 503 before the process exits
FLUSH_S = 2.0  # for the last bytes of answers at shutdown
OK, FAILED, INTERRUPTED = 0, 1, 130


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: a stop signal drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServerConfig, *, core: str = DEFAULT_CORE) -> int:
    """Run the server until a stop signal. Returns the exit code: 0, 1 (the engine died), 130 (Ctrl-C).

    Raises `ConfigError` for an address or a TLS file that cannot be used and what the engine raises at start
    (`ModelError`, `ConfigError`). The address is bound before the model is loaded: a port in use costs no wait.
    """
    logs.configure(config.log_level, as_json=config.log_json, log_prompts=config.log_prompts)
    _check_tls(config)
    listener = bind(config.host, config.port)
    try:
        return asyncio.run(_run(config, core, listener))
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `ConfigError` naming host or port."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError("--host", host, f"allowed: an address of this machine ({error})") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("--port", port, f"allowed: a free port; {host}:{port} is in use") from None
        if error.errno == errno.EACCES:
            raise ConfigError("--port", port, f"allowed: a port this user may listen on ({error.strerror})") from None
        raise ConfigError("--host", host, f"allowed: an address of this machine ({error.strerror})") from None
    listener.setblocking(False)
    return listener


def _check_tls(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("--ssl-certfile", config.ssl_certfile,
                          f"allowed: a PEM certificate and, as --ssl-keyfile, its key ({error})") from None


async def _run(config: ServerConfig, core: str, listener: socket.socket) -> int:
    client = EngineClient(config, core=core, restart=config.restart_engine)
    app = create_app(config, client)
    service: Service = app.state.service
    tls: dict[str, Any] = {"ssl_certfile": config.ssl_certfile, "ssl_keyfile": config.ssl_keyfile}
    server = _Uvicorn(uvicorn.Config(
        app, loop="asyncio", lifespan="off", log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=int(FLUSH_S), timeout_keep_alive=75, **tls,
    ))
    stop: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.put_nowait, number)
    await client.start()
    logger.info("listening on %s; loading %s", address_of(config, listener), config.model)
    if config.api_key is None and not _is_loopback(listener):
        logger.warning("no --api-key: whoever reaches %s can use this server", address_of(config, listener))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    logging_load = asyncio.create_task(log_load(service))
    try:
        return await _until_stopped(config, client, service, stop, listener)
    finally:
        await client.close()
        server.should_exit = True
        await serving
        logging_load.cancel()
        service.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        logger.info("stopped")


async def _until_stopped(config: ServerConfig, client: EngineClient, service: Service, stop: asyncio.Queue[int],
                         listener: socket.socket) -> int:
    ready = asyncio.create_task(client.wait_ready())
    stopping = asyncio.create_task(stop.get())
    try:
        await asyncio.wait({ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return _code(stopping.result())
        ready.result()  # raises what the engine raised
        _announce(config, client, listener)
        died = asyncio.create_task(_dead_for_good(client))
        await asyncio.wait({stopping, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if stopping.done():
            await _drain(config, client, service, stop)
            return _code(stopping.result())
        logger.error("%s; no restart is configured (--restart-engine): exiting", client.death)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(stopping), LINGER_S)
        return FAILED
    finally:
        for task in (ready, stopping):
            task.cancel()


def _code(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else OK


def _announce(config: ServerConfig, client: EngineClient, listener: socket.socket) -> None:
    for line in client.info.get("startup_lines", ()):
        logger.info("%s", line)
    logger.info("ready: %s (live KV books at /kv)", address_of(config, listener))


def address_of(config: ServerConfig, listener: socket.socket) -> str:
    """URL of the server as it is bound."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}{config.root_path}"


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


async def _dead_for_good(client: EngineClient) -> None:
    while client.state is not EngineState.DEAD or client.restarting:
        await asyncio.sleep(0.2)


async def _drain(config: ServerConfig, client: EngineClient, service: Service, stop: asyncio.Queue[int]) -> None:
    """Let running requests finish for `shutdown_timeout_s`, then cut them off; a second signal cuts at once."""
    service.draining = True
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + config.shutdown_timeout_s
    if client.in_flight:
        logger.info("stopping: %d requests in flight, up to %g s to finish", client.in_flight,
                    config.shutdown_timeout_s)
    while client.in_flight and loop.time() < deadline_s and stop.empty():
        await asyncio.sleep(0.05)
    if client.in_flight:
        logger.info("stopping: %d requests cut off", client.abort_all())

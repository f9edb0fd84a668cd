"""The HTTP application: routes, middleware, errors. Imports no torch (a test enforces it)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from octavo._version import __version__
from octavo.api import admin, chat, completions, errors
from octavo.api.disconnect import EventStream, JsonLater, unless_gone
from octavo.api.middleware import Gate
from octavo.api.schema import BODIES, ChatRequest, CompletionRequest
from octavo.api.service import Service
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.api.chat import Chat
    from octavo.api.completions import Completion
    from octavo.config import ServerConfig
    from octavo.engine.client import EngineClient

logger = logging.getLogger("octavo.api")
router = APIRouter()
_ERRORS = {code: {"description": what} for code, what in {
    400: "the request is wrong; the message names the field", 404: "unknown model", 413: "the body is too large",
    415: "not JSON", 429: "the queue is full; Retry-After says when to come back", 503: "the engine is not there",
}.items()}


@router.post("/v1/chat/completions", tags=["generate"], responses=_ERRORS)  # type: ignore[arg-type]
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation; with `stream: true` as server-sent events."""
    return await _respond(request, await chat.prepare(admin.service_of(request), body), bool(body.stream))


@router.post("/v1/completions", tags=["generate"], responses=_ERRORS)  # type: ignore[arg-type]
async def text_completions(body: CompletionRequest, request: Request) -> Response:
    """Continue raw prompts; with `stream: true` as server-sent events."""
    return await _respond(request, await completions.prepare(admin.service_of(request), body), bool(body.stream))


async def _respond(request: Request, call: Chat | Completion, stream: bool) -> Response:
    """A refusal is an HTTP error, also for a stream: nothing is sent before the engine has taken the request."""
    await unless_gone(request, call.start())
    if stream:
        return EventStream(call.events(), call.close)
    if call.service.config.role == "prefill":
        return JsonLater(_half(call), call.close)
    try:
        return JSONResponse(await unless_gone(request, call.answer()))
    finally:
        call.close()


async def _half(call: Chat | Completion) -> AsyncGenerator[bytes, None]:
    """A prefill server's half of an answer. A router waits for the headers of both halves: where this server stops in
    the middle of a request, its headers are there already and the decode server's half tells the client."""
    try:
        value = await call.answer()
    except OctavoError as error:
        logger.error("%s: %s", call.id, error)
        value = errors.body_of(error)
    yield msgspec.json.encode(value)


def create_app(config: ServerConfig, client: EngineClient) -> FastAPI:
    """The application over an engine client, which the caller starts and closes."""
    app = FastAPI(title="Octavo", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = Service(config, client)
    app.include_router(router)
    app.include_router(admin.router)
    endpoints: dict[str, list[str]] = {}
    for route in (*router.routes, *admin.router.routes):
        if isinstance(route, Route):
            methods = sorted((route.methods or set()) - {"HEAD"})
            endpoints.setdefault(route.path.replace(":path", ""), []).extend(methods)
    errors.install(app, endpoints, BODIES)
    app.add_middleware(Gate, api_key=config.api_key, max_body_bytes=config.max_body_bytes,
                       root_path=config.root_path)
    if config.cors_origin:
        app.add_middleware(CORSMiddleware, allow_origins=list(config.cors_origin), allow_methods=["GET", "POST"],
                           allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"])
    return app

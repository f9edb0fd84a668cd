"""Everything beside generation: health, models, tokenisation, facts, metrics, the KV books, abort, flush."""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from octavo.api.convert import chat_ids
from octavo.api.schema import AbortRequest, DetokenizeRequest, TokenizeRequest
from octavo.api.scrape import kv_view, metric_values
from octavo.api.service import Service, version
from octavo.errors import RequestError
from octavo.obs.metrics import CONTENT_TYPE

router = APIRouter()


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["state"])
async def health(request: Request) -> Response:
    """200 while the engine process answers its heartbeat."""
    client = service_of(request).client
    if client.healthy:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unhealthy", "reason": f"the engine process is {client.state.value}"}, 503)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", tags=["state"])
async def ready(request: Request) -> Response:
    """200 when requests would be served now: model loaded, engine making progress, not draining."""
    reason = service_of(request).unready()
    if reason is None:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready", "reason": reason}, 503)


@router.get("/version", tags=["state"])
async def get_version() -> dict[str, str]:
    return {"version": version()}


@router.get("/v1/models", tags=["models"])
async def models(request: Request) -> dict[str, Any]:
    service = service_of(request)
    return {"object": "list", "data": [_model(service, name) for name in service.names]}


@router.get("/v1/models/{name:path}", tags=["models"])
async def model(name: str, request: Request) -> dict[str, Any]:
    service = service_of(request)
    service.check_model(name)
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(service.started_s), "owned_by": "octavo",
            "root": service.config.model, "parent": None, "max_model_len": service.max_model_len}


@router.post("/tokenize", tags=["tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Token ids of `prompt`, or of `messages` in the chat template."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = service.tokenizer
    text = body.prompt if body.prompt is not None else body.content
    if sum(given is not None for given in (body.prompt, body.content, body.messages)) != 1:
        raise RequestError("prompt: give either prompt (or content, its other name) or messages", param="prompt")
    if body.messages is not None:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] or None
        ids = await service.in_thread(chat_ids, tokenizer, body, tools)
    else:
        special = body.add_special_tokens is not False
        ids = await service.in_thread(lambda: tokenizer.encode(text or "", add_special_tokens=special))
    out: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len}
    if body.return_token_strs:
        out["token_strs"] = [tokenizer.id_to_token(i) for i in ids]
    return out


@router.post("/detokenize", tags=["tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """Text of token ids. `prompt` and `content` are the same text under the names that other servers use."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = service.tokenizer
    size = tokenizer.vocab_size
    bad = next((t for t in body.tokens if not 0 <= t < size), None)
    if bad is not None:
        raise RequestError(f"tokens: got {str(bad)[:40]}; token ids are 0 to {size - 1}", param="tokens")
    text = await service.in_thread(tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
    return {"prompt": text, "content": text, "text": text}


@router.get("/tokenizer_info", tags=["tokens"])
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What a client needs to use this tokenizer from afar: its control tokens and the chat template."""
    tokenizer = service_of(request).tokenizer
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id,
             "unk_token": tokenizer.unk_id}
    return {
        **{name: None if i is None else tokenizer.id_to_token(i) for name, i in names.items()},
        "eos_tokens": [tokenizer.id_to_token(i) for i in sorted(tokenizer.eos_ids)],
        "add_bos_token": tokenizer.adds_bos,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service_of(request).max_model_len,
        "chat_template": tokenizer.chat_template,
    }


@router.get("/metrics", tags=["state"])
async def metrics(request: Request) -> Response:
    """Prometheus metrics; docs/metrics.md lists them."""
    service = service_of(request)
    return Response(service.metrics.render(await metric_values(service)), media_type=CONTENT_TYPE)


@router.get("/server_info", tags=["state"])
@router.get("/get_server_info", tags=["state"])
async def server_info(request: Request) -> dict[str, Any]:
    """What runs and how it was configured (without secrets)."""
    service = service_of(request)
    client = service.client
    return {
        "version": version(),
        "model_id": service.model,
        "model_path": service.config.model,
        "served_model_name": service.model,
        "max_model_len": service.max_model_len,
        "max_total_tokens": client.info.get("kv_tokens"),
        "uptime_s": round(time.time() - service.started_s, 3),
        "state": client.state.value,
        "ready": service.unready() is None,
        "draining": service.draining,
        "requests_in_flight": client.in_flight,
        "engine_restarts": client.restarts,
        "disaggregation_mode": "null" if service.config.role == "both" else service.config.role,
        "tp_size": 1,
        "dp_size": 1,
        "engine": client.info,
        "config": public_config(service.config),
    }


@router.get("/model_info", tags=["models"])
async def model_info(request: Request) -> dict[str, Any]:
    service = service_of(request)
    template = service.tokenizer.chat_template is not None
    return {
        "model_path": service.config.model,
        "tokenizer_path": service.config.model,
        "served_model_name": service.model,
        "model_type": service.client.info.get("architecture"),
        "max_model_len": service.max_model_len,
        "vocab_size": service.client.info.get("vocab_size"),
        "is_generation": True,
        "has_chat_template": template,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def public_config(config: Any) -> dict[str, Any]:
    """The configuration without what must not be shown."""
    import dataclasses

    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.repr}


@router.post("/abort_request", tags=["state"])
async def abort_request(body: AbortRequest, request: Request) -> dict[str, Any]:
    """End requests now; their streams finish with finish_reason "abort". Says how many there were."""
    client = service_of(request).client
    if body.abort_all:
        return {"aborted": client.abort_all()}
    rid = body.rid if body.rid is not None else body.request_id
    if not rid:
        raise RequestError("rid: the id of a request, or abort_all: true, is needed", param="rid")
    return {"aborted": sum(client.abort(request_id) for request_id in client.matching(rid))}


@router.post("/flush_cache", tags=["state"])
async def flush_cache(request: Request) -> Response:
    """Forget every cached prefix. 409 while requests run."""
    if await service_of(request).client.query("flush_cache"):
        return JSONResponse({"flushed": True})
    error = RequestError("requests are running; the cache can be flushed when the server is idle", code="busy")
    error.status = 409
    raise error


@router.get("/kv.json", tags=["books"])
async def kv_json(request: Request) -> Response:
    """The KV books now: pools, requests, rates. Feeds the page at /kv."""
    return JSONResponse(await kv_view(service_of(request)), headers={"Cache-Control": "no-store"})


@router.get("/kv", tags=["books"])
async def kv_page() -> HTMLResponse:
    """A live view of the KV books in a browser."""
    html = resources.files("octavo.api").joinpath("kv.html").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; " \
             "img-src data:; frame-ancestors 'none'; base-uri 'none'"
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

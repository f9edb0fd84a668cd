"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}, whatever went wrong where."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from octavo.api.disconnect import ClientGone
from octavo.api.neutral import shown
from octavo.errors import BodyTooLarge, EngineDead, OctavoError, QueueFull, RequestError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

logger = logging.getLogger("octavo.api")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON object of an error."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    clean = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return {"error": {"message": clean, "type": kind, "param": param, "code": code}}


def body_of(error: OctavoError) -> dict[str, Any]:
    """The JSON object of an error. Its message names its field."""
    message, param = str(error), getattr(error, "param", None)
    if param is not None and param.rpartition(".")[2].partition("[")[0] not in message:
        message = f"{param}: {message}"
    return error_body(message, error.status, param=param, code=error.code)


def response_of(error: OctavoError) -> JSONResponse:
    headers = {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = "1"
    elif isinstance(error, EngineDead):
        headers["Retry-After"] = "5"
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(error), status_code=error.status, headers=headers)


def install(app: FastAPI, endpoints: Mapping[str, list[str]], bodies: Mapping[str, type[BaseModel]]) -> None:
    """Register the handlers on `app`. `endpoints` (path → methods) is told to those who ask for another path;
    `bodies` (path → model) says what a field allows."""

    async def octavo_error(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, OctavoError):
            raise error
        if error.status >= 500 and not isinstance(error, EngineDead):
            logger.error("%s %s: %s", request.method, request.url.path, error)
        return response_of(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, RequestValidationError):
            raise error
        return response_of(request_error(error.errors(), bodies.get(request.url.path)))

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        return _http(request, error, endpoints)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; 499 is what access logs call this

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
        return JSONResponse(error_body(f"internal error: {type(error).__name__}", 500, code="internal_error"), 500)

    app.add_exception_handler(OctavoError, octavo_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(Exception, unexpected)


def _http(request: Request, error: HTTPException, endpoints: Mapping[str, list[str]]) -> JSONResponse:
    path, message, code = request.url.path, str(error.detail), None
    if error.status_code == 404:
        known = ", ".join(f"{'/'.join(methods)} {known}" for known, methods in endpoints.items())
        message, code = f"no such path: {shown(path)}; there are: {known}", "unknown_path"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow") or ", ".join(endpoints.get(path, []))
        message, code = f"{request.method} is not allowed for {path}; allowed: {allowed}", "method_not_allowed"
    elif error.status_code == 400:
        code = "invalid_json"
        message = "the request body is not valid JSON" if "parsing" in message else message
    elif error.status_code == 413:
        code = BodyTooLarge.code
    return JSONResponse(error_body(message, error.status_code, code=code), error.status_code, headers=error.headers)


def request_error(problems: list[ErrorDetails] | list[dict[str, Any]] | Any,
                  model: type[BaseModel] | None = None) -> RequestError:
    """One readable error out of what the validation of a body found: the first problem, by its field of `model`."""
    problem = problems[0]
    path = [part for part in problem["loc"] if part != "body"]
    kind = problem["type"]
    if kind == "json_invalid":
        return RequestError(f"the request body is not valid JSON: {problem.get('ctx', {}).get('error', '')}",
                            code="invalid_json")
    if not path:
        return RequestError(f"a JSON object is needed as the request body, got {shown(problem.get('input'))}",
                            code="invalid_request_error")
    param = _field(path)
    if kind == "missing":
        return RequestError(f"{param}: this field is needed", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return RequestError(f"{param}: unknown field; Octavo refuses what it would have to ignore", param=param,
                            code="unknown_parameter")
    return RequestError(f"{param}: got {shown(problem.get('input'))}; {_words(problem, path, model)}", param=param)


def _field(path: list[Any]) -> str:
    """`messages.0.content` out of a validation location, without the names of union members."""
    kept: list[str] = []
    for part in path:
        if isinstance(part, int):
            kept.append(f"[{part}]")
        elif part.isidentifier() and part not in _UNION_TAGS:
            kept.append("." * bool(kept) + part)
        elif part not in _UNION_TAGS and not any(c in part for c in "[(,"):
            kept.append("." * bool(kept) + shown(part, 40).strip("'"))
    return "".join(kept) or "body"


_UNION_TAGS = frozenset({"str", "int", "float", "bool", "none", "NamedTool", "dict", "list"})


def _words(problem: Any, path: list[Any], model: type[BaseModel] | None) -> str:
    """What the innermost field on the way to the problem allows, in its own words."""
    words = str(problem["msg"])
    for part in path:
        if model is None:
            break
        field = model.model_fields.get("schema_" if part == "schema" else part) if isinstance(part, str) else None
        if field is not None:
            words = f"allowed: {field.description}" if field.description else words
            model = _model_in(field.annotation)
    return words


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first body model inside a type such as `list[Message] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner)) is not None), None)

"""Every error Octavo raises on purpose, on one page.

`OctavoError`
├── `UserError`            somebody can mend it by changing what they passed in (exit code 1, HTTP 4xx)
│   ├── `ConfigError`      an option, environment name or argument (exit code 2)
│   ├── `UsageError`       a command's arguments that are missing or exclude each other (exit code 2)
│   ├── `ModelError`       a checkpoint: names the file and, where known, the tensor
│   │   └── `ModelNotFound`
│   ├── `RequestError`     one request: names the field
│   │   ├── `ContextLengthExceeded`
│   │   ├── `NeverFits`    the request is larger than a whole pool
│   │   ├── `UnknownModel` another model's name (HTTP 404)
│   │   ├── `BodyTooLarge` (HTTP 413)
│   │   └── `BadMediaType` not JSON (HTTP 415)
│   ├── `Unauthorized`     the API key is missing or wrong (HTTP 401)
│   └── `QueueFull`        try again later (HTTP 429)
├── `GrammarError`         a constrained answer cannot go on (a limit of the grammar engine)
├── `OutOfPages`           a pool cannot give what a plan needs now; the scheduler answers it, users never see it
├── `HostTierLost`         the file of the host tier was removed or cut: requests whose pages it held end (HTTP 500)
├── `HandoverFailed`   the other half of a prefill/decode pair failed this request (HTTP 502)
│   └── `HandoverTimeout`  it took too long (HTTP 504)
├── `EngineDead`           the engine process or loop is gone (HTTP 503)
└── `LawViolation`         the KV books are wrong: names the law, the row and the numbers
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all typed errors. `status` is the HTTP status, `code` the machine-readable name."""

    status = 500
    code = "internal_error"
    exit_code = 1


class UserError(OctavoError):
    """Bad input: the message names it and says what is allowed."""

    status = 400
    code = "invalid_request_error"


class ConfigError(UserError):
    """An option with a bad value. Raised with the option's name, the value and what is allowed."""

    code = "invalid_option"
    exit_code = 2

    def __init__(self, option: str, value: object, allowed: str) -> None:
        self.option, self.value, self.allowed = option, value, allowed
        super().__init__(f"{option}: got {value!r}; {allowed}")


class UsageError(UserError):
    """A command was called in a way that makes no sense: arguments that are missing or exclude each other."""

    exit_code = 2


class ModelError(UserError):
    """A checkpoint that cannot be used. `file` and `tensor` say where, if known."""

    code = "invalid_model"

    def __init__(self, message: str, *, file: object = None, tensor: str | None = None) -> None:
        self.file, self.tensor = file, tensor
        where = [f"file {file}"] if file is not None else []
        if tensor is not None:
            where.append(f"tensor {tensor!r}")
        super().__init__(f"{', '.join(where)}: {message}" if where else message)


class ModelNotFound(ModelError):
    status = 404
    code = "model_not_found"


class RequestError(UserError):
    """One request's field is wrong; `param` names it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        if code is not None:
            self.code = code
        super().__init__(message)


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class NeverFits(RequestError):
    """The request needs more pages than its pool has in total: waiting would not help."""

    code = "request_too_large"


class UnknownModel(RequestError):
    status = 404
    code = "model_not_found"


class BodyTooLarge(RequestError):
    status = 413
    code = "request_body_too_large"


class BadMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class Unauthorized(UserError):
    status = 401
    code = "invalid_api_key"


class GrammarError(OctavoError):
    """A constrained answer cannot go on: what was asked for hit a limit of the grammar engine (status 400, `param`
    names the field), or the engine chose a token that the grammar forbids (a fault of ours)."""

    code = "grammar_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        if param is not None:
            self.status = 400
        super().__init__(message)


class QueueFull(UserError):
    status = 429
    code = "queue_full"


class OutOfPages(OctavoError):
    """An all-or-nothing allocation that was not made: nothing has changed (law 11)."""

    code = "out_of_pages"

    def __init__(self, pool: str, needed_pages: int, available_pages: int) -> None:
        self.pool, self.needed_pages, self.available_pages = pool, needed_pages, available_pages
        super().__init__(f"{pool} pool: {needed_pages} pages needed, {available_pages} available")


class HostTierLost(OctavoError):
    """The file of the host tier was removed or cut short. `intact_pages` pages from the first on can be read."""

    code = "host_tier_lost"

    def __init__(self, message: str, *, intact_pages: int) -> None:
        self.intact_pages = intact_pages
        super().__init__(message)


class EngineDead(OctavoError):
    status = 503
    code = "engine_dead"


class HandoverFailed(OctavoError):
    """The other half of a prefill/decode pair, or the way between them, failed this request."""

    status = 502
    code = "handover_failed"
    cause = "other"  # one of octavo.disagg.failures.CAUSES: what the metrics count it under


class HandoverTimeout(HandoverFailed):
    status = 504
    code = "handover_timeout"


class LawViolation(OctavoError):
    """A law of docs/invariants.md does not hold. `numbers` carries the values that show it."""

    code = "kv_law_violated"

    def __init__(self, law: int, message: str, *, row: int | None = None, **numbers: object) -> None:
        self.law, self.row, self.numbers = law, row, numbers
        shown = ", ".join(f"{k}={v}" for k, v in numbers.items())
        at = f" row {row}" if row is not None else ""
        super().__init__(f"law {law}{at}: {message}" + (f" ({shown})" if shown else ""))

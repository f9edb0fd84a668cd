"""The id of the HTTP request that the current task works for; empty outside one."""

from __future__ import annotations

import contextvars

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("octavo_request_id", default="")

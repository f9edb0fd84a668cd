"""Logging: lines for people or JSON lines for machines, each with the id of the request it is about.

Prompts, answers and keys are never logged; with --log-prompts the `octavo.prompts` logger writes prompts and answers.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from octavo.obs.context import request_id_var

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
prompts = logging.getLogger("octavo.prompts")


class TextFormatter(logging.Formatter):
    """`12:00:00 INFO octavo.api [request id] message`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        request_id = getattr(record, "request_id", "") or request_id_var.get()
        mark = f" [{request_id}]" if request_id else ""
        line = f"{stamp} {record.levelname} {record.name}{mark} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, seconds), level, logger, message, request_id, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", "") or request_id_var.get()
        if request_id:
            entry["request_id"] = request_id
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(level: str, *, as_json: bool = False, log_prompts: bool = False) -> None:
    """Set up the `octavo` and `uvicorn` loggers to write to stderr. `level` is one of `LEVELS`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    for name in ("octavo", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(LEVELS[level])
    if LEVELS[level] > logging.DEBUG:
        logging.getLogger("uvicorn").setLevel(max(LEVELS[level], logging.WARNING))
    prompts.setLevel(logging.INFO if log_prompts else logging.CRITICAL + 1)

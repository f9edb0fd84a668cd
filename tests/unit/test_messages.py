"""Errors that cross the border between engine and API process: the same type, words and attributes behind it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import errors
from octavo.engine import messages as m

ONE_OF_EACH = [
    errors.ConfigError("draft_tokens", 20, "at most 19"),
    errors.UsageError("a file or --text"),
    errors.ModelError("missing", file="/models/config.json", tensor="fc.weight"),
    errors.ModelNotFound("no such draft", file="/models/draft"),
    errors.RequestError("stop: too long", param="stop"),
    errors.ContextLengthExceeded("too long", param="prompt"),
    errors.NeverFits("too large", param="prompt", code="other"),
    errors.UnknownModel("no model 'x'", param="model"),
    errors.BodyTooLarge("a body of 9 MB"),
    errors.BadMediaType("text/plain"),
    errors.Unauthorized("no key"),
    errors.GrammarError("too many states", param="regex"),
    errors.QueueFull("9 wait"),
    errors.OutOfPages("full", 3, 2),
    errors.HostTierLost("cut", intact_pages=4),
    errors.EngineDead("gone"),
    errors.HandoverFailed("peer gone"),
    errors.HandoverTimeout("too late"),
    errors.LawViolation(5, "pages lost", row=2, free=3, rows=[1, 2]),
]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda e: type(e).__name__)
def test_an_error_is_the_same_behind_the_border(error: errors.OctavoError) -> None:
    sent = m.encoder.encode(m.ErrorInfo.of(error))
    got = m.msgspec.msgpack.decode(sent, type=m.ErrorInfo).error()
    assert type(got) is type(error) and str(got) == str(error) and vars(got).items() >= vars(error).items()
    assert (got.status, got.code, got.exit_code) == (error.status, error.code, error.exit_code)


def test_every_type_is_tried() -> None:
    kinds = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.OctavoError)}
    assert kinds - {type(e) for e in ONE_OF_EACH} == {errors.OctavoError, errors.UserError}


def test_what_has_no_encoding_is_spelled_out() -> None:
    odd = errors.LawViolation(4, "half \ud800", row=3, big=10**30, array=np.int64(7), kind={"\udc00": (1, object)})
    got = m.msgspec.msgpack.decode(m.encoder.encode(m.ErrorInfo.of(odd)), type=m.ErrorInfo).error()
    assert isinstance(got, errors.LawViolation) and got.row == 3 and r"\ud800" in str(got)
    assert got.numbers == {"big": str(10**30), "array": 7, "kind": {r"\udc00": [1, str(object)]}}
    other = m.ErrorInfo.of(ZeroDivisionError("\ud800")).error()
    assert type(other) is errors.OctavoError and str(other) == r"ZeroDivisionError: \ud800"

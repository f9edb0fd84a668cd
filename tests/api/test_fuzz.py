"""Requests generated from the server's own OpenAPI description, right ones and wrong ones, never get a 5xx."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.api.serving import Server, running


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A short context, so that a request without max_tokens ends soon."""
    with running(tmp_path_factory.mktemp("fuzz"), max_model_len=48, check_books=True) as server:
        yield server
        assert server.metric("kv_balance_violations_total") == 0


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_server_error(target: Server, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(target.url + "/openapi.json")
    statuses: dict[int, int] = {}
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 17
    for operation in operations:

        @settings(max_examples=40, deadline=None, database=None, derandomize=True,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: schemathesis.Case) -> None:
            response = case.call(timeout=60)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            case.validate_response(response, checks=[not_a_server_error])

        with contextlib.suppress(Unsatisfiable):  # an operation without parameters has no wrong requests
            run()
    print(mode, dict(sorted(statuses.items())))
    assert not any(status >= 500 for status in statuses)
    assert sum(statuses.values()) > 100
    assert (200 in statuses) == (mode is GenerationMode.POSITIVE), "wrong requests are refused, right ones are not"
    assert target.get("/health").status_code == 200

"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.serving import Server, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny random model behind the real server; the books are checked after every step."""
    with running(tmp_path_factory.mktemp("server"), check_books=True, served_model_name=("tiny", "alias")) as shared:
        yield shared
        assert shared.metric("kv_balance_violations_total") == 0

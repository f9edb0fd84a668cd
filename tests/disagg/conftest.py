"""A prefill server, a decode server and the router, shared by the tests that leave them as they found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.disagg.processes import Trio, trio


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with trio(tmp_path_factory.mktemp("trio")) as started:
        yield started
        started.check_at_rest()

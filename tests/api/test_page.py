"""/kv in a real browser: phone and desk, light and dark; the chat box; screenshots are kept in test-artifacts/."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.browser import NAMES, browser
from tests.api.serving import ROOT, Server, running

ARTEFACTS = ROOT / "test-artifacts"
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, NAMES)) and "CI" not in os.environ,
    reason="no Chromium (Debian package chromium): the test command says so",
)


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with requests that take long enough to be looked at: 24 s."""
    folder = tmp_path_factory.mktemp("lively")
    with running(folder, env={"OCTAVO_TEST_STEP_S": "0.08"}, api_key="page-key", num_pages=600) as server:
        yield server


def test_page_is_one_file_that_loads_nothing(lively: Server) -> None:
    page = lively.get("/kv")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text and " src=" not in page.text


def test_page_in_a_browser(lively: Server, tmp_path: Path) -> None:
    bodies = [{"prompt": f"request {n} " + "words " * 10 * n, "max_tokens": 300, "ignore_eos": True} for n in range(4)]
    load = [threading.Thread(target=lambda b=body: lively.post("/v1/completions", b)) for body in bodies]
    with browser(tmp_path / "profile") as page:
        page.size(390, 844, mobile=True)
        page.call("Page.navigate", url=lively.url + "/kv")
        page.wait_for("document.getElementById('login') && !document.getElementById('login').hidden")
        page.evaluate("document.getElementById('key').value = 'page-key';"
                      "document.getElementById('login').requestSubmit()")  # fmt: skip
        for thread in load:
            thread.start()
        page.wait_for("document.body.dataset.live === '1'")
        page.wait_for("document.querySelectorAll('#rows .row').length === 4")
        assert page.evaluate("document.getElementById('model').textContent") == "tiny-llama"
        assert page.evaluate("document.getElementById('running').textContent") == "4"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "no sideways scrolling on a phone"
        shares = page.evaluate(
            "[...document.querySelectorAll('#rows .row')].map(r => [...r.querySelectorAll('.bar i')]"
            ".map(i => parseFloat(i.style.width)))"
        )
        for allocated, committed, evicted in shares:
            assert 0 <= evicted <= committed <= allocated <= 100
        colours = page.evaluate(
            "(() => { const c = document.querySelector('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width,"
            " c.height).data; const s = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3]) s.add(d[i] +"
            " ',' + d[i + 1] + ',' + d[i + 2]); return s.size; })()"
        )
        assert colours >= 5, "free pages and those of four requests differ in colour"
        page.screenshot(ARTEFACTS / "kv-phone-light.png")

        page.evaluate("document.getElementById('ask').value = 'Hello there';"
                      "document.getElementById('chat').requestSubmit()")  # fmt: skip
        page.wait_for("document.querySelectorAll('.say').length === 2 &&"
                      "document.querySelectorAll('.say')[1].textContent.length > 3")  # fmt: skip
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.size(1280, 900, dark=True)
        page.wait_for(f"getComputedStyle(document.body).backgroundColor !== {light!r}")
        page.wait_for("document.getElementById('rate').textContent !== '0.0'")
        page.screenshot(ARTEFACTS / "kv-desk-dark.png")
        page.evaluate("document.getElementById('chat').requestSubmit()")  # Stop
        page.wait_for("document.getElementById('send').textContent === 'Send'")
        assert all("401" in line for line in page.console), "no error but the first fetches, without a key"
    lively.post("/abort_request", {"abort_all": True})
    for thread in load:
        thread.join(120)
    assert (ARTEFACTS / "kv-phone-light.png").stat().st_size > 10_000

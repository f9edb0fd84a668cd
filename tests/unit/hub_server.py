"""A small HTTP server that answers like a model hub: files with ranges, file lists, gates and broken connections."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has and how it behaves; `log` lists (method, path, range) of every request."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)  # repository: the token that opens it
    cut_after_bytes: dict[str, int] = field(default_factory=dict)  # file: hang up after so many, until popped
    cut_always: bool = False
    redirect_to: str | None = None  # serve weights from another host
    wrong_digest: bool = False
    status: int | None = None  # answer everything so
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens_seen: list[str | None] = field(default_factory=list)

    def add_folder(self, repo: str, folder: Path) -> None:
        self.repos[repo] = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def fetched(self, name: str) -> list[str | None]:
        """The Range headers of all requests for a file."""
        return [wanted for _, path, wanted in self.log if path.endswith(f"/{name}")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.log.append(("GET", path, self.headers.get("Range")))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.tokens_seen.append(token)
        if hub.status is not None:
            return self.refuse(hub.status, "Broken")
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/").split("/revision/")[0]
            if repo not in hub.repos:
                return self.refuse(404, "RepoNotFound")
            files = [{"rfilename": name} for name in hub.repos[repo]]
            return self.send(json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode(), {})
        direct = path.startswith("/cdn/")
        owner, name, _, rest = path.removeprefix("/cdn").lstrip("/").split("/", 3)
        repo, file = f"{owner}/{name}", rest.split("/", 1)[1]
        if repo not in hub.repos:
            return self.refuse(401, "RepoNotFound")  # as the real one does, so as not to tell what exists
        if not direct and hub.gated.get(repo, token) != token:
            return self.refuse(401 if token is None else 403, "GatedRepo")
        if file not in hub.repos[repo]:
            return self.refuse(404, "EntryNotFound")
        data = hub.repos[repo][file]
        digest = hashlib.sha256(b"other" if hub.wrong_digest else data).hexdigest()
        marks = {"X-Repo-Commit": COMMIT}
        if not file.endswith(".json"):
            marks["X-Linked-Etag"] = f'"{digest}"'
        if hub.redirect_to is not None and not direct and not file.endswith(".json"):
            self.send_response(302)
            self.send_header("Location", f"{hub.redirect_to}/cdn{path}")
            self.send_header("Content-Length", "0")
            for key, value in marks.items():
                self.send_header(key, value)
            return self.end_headers()
        self.send(data, marks | {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}, file)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, data: bytes, headers: dict[str, str], file: str = "") -> None:
        wanted, start = self.headers.get("Range"), 0
        if wanted:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                return self.end_headers()
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        limit = self.hub.cut_after_bytes.get(file)
        if limit is not None:
            if not self.hub.cut_always:
                del self.hub.cut_after_bytes[file]
            self.wfile.write(data[start : start + limit])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(data[start:])


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of this machine until the block ends."""
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

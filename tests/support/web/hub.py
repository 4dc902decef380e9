"""A server on this machine that takes uploads as the Hugging Face hub does: repositories, large files, commits."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_standin"
LARGE = ".safetensors"  # what goes as a large file


@dataclass
class Hub:
    """The content of the server. repositories: {owner/name: {file: content}}; private: names of those; asked: the
    requests."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    large: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    commits: int = 0
    url: str = ""

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        """Take a commit whole."""
        files = self.repositories[repo]
        for line in lines:
            told = line["value"]
            if line["key"] == "file":
                files[told["path"]] = base64.b64decode(told["content"])
            elif line["key"] == "lfsFile":
                files[told["path"]] = self.large[told["oid"]]
            elif line["key"] == "deletedFile":
                del files[told["path"]]
        self.commits += 1


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def answer(self, value: Any, status: int = 200, error: str | None = None) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if error is not None:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            self.wfile.write(content)

        def refused(self) -> bool:
            """Answers 401 to a request without the token."""
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                return False
            self.body()
            self.answer({"error": "Invalid username or password."}, 401)
            return True

        def do_GET(self) -> None:
            hub.asked.append(f"GET {self.path}")
            if self.refused():
                return
            repo = "/".join(self.path.split("?")[0].split("/")[3:5])
            if repo not in hub.repositories:
                self.answer({"error": "Repository not found"}, 404, "RepoNotFound")
                return
            held = sorted(hub.repositories[repo].items())
            if "/tree/" in self.path:
                self.answer([{"type": "file", "path": name, "size": len(c), "oid": "0" * 40} for name, c in held])
                return
            files = [{"rfilename": name} for name, _ in held]
            self.answer({"id": repo, "sha": f"{hub.commits:040x}", "siblings": files, "private": False, "tags": []})

        def do_PUT(self) -> None:
            hub.asked.append(f"PUT {self.path}")
            hub.large[self.path.rpartition("/")[2]] = self.body()
            self.answer({})

        def do_POST(self) -> None:
            hub.asked.append(f"POST {self.path}")
            if self.refused():
                return
            body, path = self.body(), self.path.split("?")[0]
            if path == "/api/repos/create":
                told = json.loads(body)
                repo = f"{told['organization']}/{told['name']}"
                hub.repositories.setdefault(repo, {".gitattributes": b""})
                if told.get("private") or told.get("visibility") == "private":
                    hub.private.add(repo)
                self.answer({"url": f"{hub.url}/{repo}", "name": repo, "id": repo})
            elif path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif path.endswith("/objects/batch"):
                wanted = [(each["oid"], each["size"]) for each in json.loads(body)["objects"]]
                objects = [
                    {"oid": oid, "size": size, "actions": {"upload": {"href": f"{hub.url}/large/{oid}"}}}
                    for oid, size in wanted
                ]
                self.answer({"transfer": "basic", "objects": objects})
            elif "/preupload/" in path:
                names = [each["path"] for each in json.loads(body)["files"]]
                modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
                files = [{"path": n, "uploadMode": m, "shouldIgnore": False, "oid": None} for n, m in modes.items()]
                self.answer({"files": files})
            else:
                repo = "/".join(path.split("/")[3:5])
                hub.commit(repo, [json.loads(line) for line in body.splitlines() if line])
                oid = f"{hub.commits:040x}"
                self.answer({"commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid, "success": True})

    return Handler


@contextmanager
def serving() -> Iterator[Hub]:
    """A running server."""
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(hub)) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()

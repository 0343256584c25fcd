"""A server in this process that speaks the Hugging Face hub's protocol, as far as reading models and data sets needs it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

Kind = Literal["models", "datasets"]
Files = Mapping[str, bytes]

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """The repositories of a server. A revision is a branch or a commit; a new commit moves its branch."""

    endpoint: str = ""
    branches: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)  # by kind and name: branch to commit
    commits: dict[str, Files] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # names of repositories that are given to nobody
    broken: bool = False  # every request fails
    requests: list[str] = field(default_factory=list)

    def commit(self, kind: Kind, name: str, files: Files, branch: str = "main") -> str:
        content = json.dumps([name, branch, {path: hashlib.sha1(data).hexdigest() for path, data in files.items()}])
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches.setdefault((kind, name), {})[branch] = sha
        return sha

    def commit_folder(self, kind: Kind, name: str, folder: Path) -> str:
        return self.commit(kind, name, {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()})

    def use_in_tests(self, patch: pytest.MonkeyPatch, cache: Path) -> None:
        """Data sets of this process come from this hub. huggingface_hub reads its variables when it is imported."""
        patch.setenv("HF_ENDPOINT", self.endpoint)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that is to use this hub and a cache of its own."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {unquote(self.path)}")
            path = urlsplit(self.path).path
            if hub.broken:
                self.refuse(503, "")
            elif match := API.fullmatch(path):
                self.answer_api(match)
            elif match := FILE.fullmatch(path):
                self.answer_file("datasets" if match[1] else "models", *map(unquote, match.groups()[1:]))
            else:
                self.refuse(404, "EntryNotFound")

        do_HEAD = do_GET

        def find(self, kind: str, name: str, revision: str) -> str | None:
            branches = hub.branches.get((kind, name))
            if branches is None:
                return self.refuse(401, "RepoNotFound")
            if name in hub.gated:
                return self.refuse(403, "GatedRepo")
            sha = branches.get(revision, revision)
            return sha if sha in hub.commits else self.refuse(404, "RevisionNotFound")

        def answer_api(self, match: re.Match[str]) -> None:
            kind, name, what, revision = match[1], match[2], match[3], unquote(match[4] or "main")
            sha = self.find(kind, name, revision)
            if sha is None:
                return
            files = hub.commits[sha]
            if what == "tree":
                shown: object = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for path, data in files.items()
                ]
            else:
                shown = {"id": name, "sha": sha, "private": False, "gated": False, "siblings": [{"rfilename": path} for path in files]}
            self.send(200, json.dumps(shown).encode(), {"Content-Type": "application/json"})

        def answer_file(self, kind: str, name: str, revision: str, path: str) -> None:
            sha = self.find(kind, name, revision)
            if sha is None:
                return
            data = hub.commits[sha].get(path)
            if data is None:
                self.refuse(404, "EntryNotFound", {"X-Repo-Commit": sha})
                return
            about = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked is None:
                self.send(200, data, about)
                return
            start, end = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            self.send(206, data[start : end + 1], {**about, "Content-Range": f"bytes {start}-{end}/{len(data)}"})

        def refuse(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
            self.send(status, b"", {**(headers or {}), **({"X-Error-Code": code, "X-Error-Message": code} if code else {})})

        def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

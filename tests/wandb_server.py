"""As much of W&B's server as its client needs: runs, their histories by line number, and uploads that are dropped."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY = "wandb-history.jsonl"
KEY = "k" * 40


class Server:
    """files: run id -> file -> its lines, as they lie on the server; statuses: what was said of a run's end."""

    def __init__(self, url: str, accept: bool) -> None:
        self.url, self.accept = url, accept
        self.files: dict[str, dict[str, list[str]]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.exit_codes: list[int] = []

    def history(self, run_id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files[run_id].get(HISTORY, [])]

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path.endswith("/graphql"):
            if not self.accept:
                return 401, {"errors": [{"message": "user is not logged in"}]}
            asked = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            return 200, {"data": self._query(name[1] if name else "", asked.get("variables") or {})}
        stream = re.search(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path)
        if stream:
            self._stream(self.files.setdefault(stream[1], {}), json.loads(body))
        return 200, {}

    def _stream(self, files: dict[str, list[str]], sent: dict[str, Any]) -> None:
        for name, part in (sent.get("files") or {}).items():
            lines, start = files.setdefault(name, []), part["offset"]
            assert start <= len(lines), f"{name} has a gap: {start} after {len(lines)}"
            lines[start : start + len(part["content"])] = part["content"]
        if sent.get("complete"):
            self.exit_codes.append(sent["exitcode"])

    def _query(self, name: str, given: dict[str, Any]) -> Any:
        project = {"id": "p", "name": given.get("project") or "p", "entity": {"id": "e", "name": "me"}}
        if name == "RunResumeStatus":
            files = self.files.get(given["name"])
            return {"model": {**project, "bucket": None if files is None else self._known(given["name"], files)}}
        if name == "UpsertBucket":
            self.files.setdefault(given["name"], {})
            if given.get("config"):
                self.configs.setdefault(given["name"], {}).update(json.loads(given["config"]))
            bucket = {"id": "b", "name": given["name"], "displayName": "d", "description": "", "config": "{}"}
            bucket |= {"sweepName": "", "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"inserted": True, "bucket": bucket}}
        if name == "CreateRunFiles":
            places = [{"name": file, "uploadUrl": f"{self.url}/upload/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": places}}
        return {}

    def _known(self, run_id: str, files: dict[str, list[str]]) -> dict[str, Any]:
        rows = files.get(HISTORY, [])
        return {
            "id": "b", "name": run_id, "displayName": "d",
            "summaryMetrics": files.get("wandb-summary.json", ["{}"])[-1], "config": "{}", "tags": [],
            "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "historyLineCount": len(rows),
            "historyTail": json.dumps(rows[-1:]), "wandbConfig": '{"t": 1}',
        }  # fmt: skip


@contextmanager
def serving(accept: bool = True) -> Iterator[Server]:
    """A server on a free port of this machine. accept False: no key is good."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True  # the client has gone

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = server.answer(self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server = Server(f"http://127.0.0.1:{http.server_port}", accept)
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()

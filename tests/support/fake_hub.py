"""A hub of one repository, and the environment of a process that downloads from it."""

import hashlib
import http.server
import json
import os
import threading

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(http.server.ThreadingHTTPServer):
    """As much of the hub's API as a snapshot download needs: one repository at one commit; owner/gated has locked files."""

    daemon_threads = True

    def __init__(self, folder, repository="owner/tiny"):
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.repository = repository
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.files["pytorch_model.bin"] = b"pickled"
        self.files["original/consolidated.safetensors"] = self.files["consolidated.safetensors"] = b"a second copy"
        self.downloaded = []
        self.tokens = set()
        self.stalled, self.goes_on = "", threading.Event()  # a repository that gets no answer, and connections are closed then


class FakeHubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        hub = self.server
        hub.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        if hub.stalled and hub.stalled in path:
            self.close_connection = hub.goes_on.wait(60)
            return None
        repository = next((name for name in ("owner/gated", hub.repository) if f"{name}/" in f"{path}/"), hub.repository)
        api = f"/api/models/{repository}"
        if path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in hub.files]
            return self.answer(json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())
        if path == f"{api}/revision/nothere":
            return self.answer(b"{}", 404, X_Error_Code="RevisionNotFound")
        if path == f"{api}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            return self.answer(json.dumps(tree).encode())
        name = path.removeprefix(f"/{repository}/resolve/{COMMIT}/")
        if name == path or name not in hub.files:
            return self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
        if repository == "owner/gated":
            return self.answer(b"{}", 401, X_Error_Code="GatedRepo", X_Error_Message="gated")
        if self.command == "GET":
            hub.downloaded.append(name)
        etag = f'"{hashlib.sha1(hub.files[name]).hexdigest()}"'
        return self.answer(hub.files[name], X_Repo_Commit=COMMIT, ETag=etag)

    do_HEAD = do_GET


def hub_environment(hub, cache, **env):
    """huggingface_hub reads it when it is imported."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()},
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **env,
    }

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from common.errors import CheckpointError, ConfigError
from tests.support.published import write_published
from tests.support.records import record_of
from trainer.interop.import_model import import_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = Path("org/model-1.0")


class Hub(ThreadingHTTPServer):
    """The part of the Hub's interface that its client uses for a download."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.directory = directory
        self.downloaded: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        api, files = f"/api/models/{NAME}/", f"/{NAME}/resolve/{COMMIT}/"
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/gated"):
            self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        elif not path.startswith((api, files)):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(f"{api}revision/"):
            known = path.rpartition("/")[2] in ("main", "v1")
            self._send(200, json.dumps({"sha": COMMIT, "id": str(NAME), "siblings": []}).encode(), {}) if known else self._send(
                404, b"", {"X-Error-Code": "RevisionNotFound"}
            )
        elif path.startswith(f"{api}tree/"):
            files_of = [path for path in self.server.directory.rglob("*") if path.is_file()]
            names = [path.relative_to(self.server.directory).as_posix() for path in files_of]
            tree = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": sha1(name.encode()).hexdigest()}
                for name, path in zip(names, files_of, strict=True)
            ]
            self._send(200, json.dumps(tree).encode(), {})
        else:
            name = path.removeprefix(files)
            if self.command == "GET":
                self.server.downloaded.append(name)
            content = (self.server.directory / name).read_bytes()
            self._send(200, content, {"ETag": f'"{sha1(name.encode()).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content)), "Content-Type": "application/json"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(write_published(tmp_path / "published", "qwen3", num_files=2))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_is_downloaded_once_and_imported(hub: Hub, tmp_path: Path) -> None:
    for other in ("pytorch_model.bin", "consolidated.safetensors", "onnx/config.json"):
        (hub.directory / other).parent.mkdir(exist_ok=True)
        (hub.directory / other).write_bytes(b"another format")
    local = import_model(hub.directory, tmp_path / "local")
    found = import_model(NAME, tmp_path / "run")
    assert found == local
    assert (
        sorted(set(hub.downloaded))
        == sorted(hub.downloaded)
        == sorted(
            path.name
            for path in hub.directory.iterdir()
            if path.is_file() and path.name not in ("pytorch_model.bin", "consolidated.safetensors")
        )
    )
    record = record_of(tmp_path / "run")
    assert (record["imported"]["repository"], record["imported"]["commit"]) == (str(NAME), COMMIT)
    assert record["imported"]["files"] == record_of(tmp_path / "local")["imported"]["files"]
    hub.downloaded.clear()
    cached = tmp_path / "cache/models--org--model-1.0/snapshots" / COMMIT
    for again, named in {"v1": Path(f"{NAME}@v1"), "commit": Path(f"{NAME}@{COMMIT}"), "from-cache": cached}.items():
        assert import_model(named, tmp_path / again) == found
        assert record_of(tmp_path / again)["imported"] == record["imported"]
    assert not hub.downloaded
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_the_cache_is_used_when_the_hub_does_not_answer(hub: Hub, tmp_path: Path) -> None:
    found = import_model(NAME, tmp_path / "run")
    hub.shutdown()
    hub.server_close()
    assert import_model(NAME, tmp_path / "offline") == found
    with pytest.raises(ConfigError, match=r"cannot be downloaded .*hf download org/other --revision v2 --local-dir models/other,"):
        import_model(Path("org/other@v2"), tmp_path / "other")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("org/unknown", r"the Hub shows no model org/unknown to this account; correct the name, or set HF_TOKEN"),
        ("org/gated", r"org/gated: its owner asks for consent; agree on its page of the Hub, and set HF_TOKEN"),
        (f"{NAME}@v9", r"org/model-1.0 has no revision v9; name a branch, a tag or a commit"),
        ("model", r"model: no such directory; .* or a model of the Hub as organisation/name"),
        ("../org/model", r"no such directory"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_with_what_to_do(hub: Hub, named: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        import_model(Path(named), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_link_that_leads_out_of_the_cache_is_refused_and_errors_name_the_cache(hub: Hub, tmp_path: Path) -> None:
    import_model(NAME, tmp_path / "run")
    cached = tmp_path / "cache/models--org--model-1.0/snapshots" / COMMIT
    (tmp_path / "secret").write_text("{}")
    (cached / "notes.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"notes.json: a link to .*secret, outside of .*blobs; download the model again"):
        import_model(cached, tmp_path / "other")
    (cached / "notes.json").unlink()
    (cached / "config.json").resolve().write_text("{")
    with pytest.raises((ConfigError, CheckpointError), match=str(cached / "config.json")):
        import_model(cached, tmp_path / "other")

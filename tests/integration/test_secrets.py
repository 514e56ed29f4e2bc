"""Files and output of a preparation or a run contain no secret of an address or of the environment."""

import contextlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.cached import CachingFileSystem, SimpleCacheFileSystem, WholeFileCacheFileSystem
from fsspec.registry import _registry
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.command_line import run_command as end_of
from data_pipeline.__main__ import main
from tests.support.prepared import write_prepared
from tests.support.runs import arguments, run_command, tiny_config
from tests.support.secret_urls import SecretUrl, secret_urls

TEXT = b"".join(b"This is line %d of a text that is long enough to be kept by all of the rules.\n" % number for number in range(40))


class Bucket(fsspec.AbstractFileSystem):
    """A store that has a file for each name, except names that end in `gone`."""

    cachable = False
    fails = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.partition("://")[2].rpartition("@")[2].partition("?")[0] or path

    def info(self, path: str, **_: object) -> dict[str, Any]:
        if type(self).fails:
            raise OSError(f"403 {path} {self.storage_options}")
        return {"name": path, "size": len(TEXT), "type": "file", "ETag": '"1"'}

    def glob(self, path: str, **_: object) -> dict[str, Any]:
        return {path.replace("*", "a"): self.info(path)}

    def _open(self, path: str, mode: str = "rb", **_: object) -> io.BytesIO:
        return io.BytesIO(TEXT)


class Web(Bucket):
    """A store that identifies files by their complete addresses."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path


@pytest.fixture(scope="module", autouse=True)
def stores() -> Iterator[None]:
    protocols = {"s3": Bucket, "gs": Bucket, "hf": Bucket, "http": Web, "https": Web}
    with patch.dict(_registry, protocols):
        yield
    for store in (CachingFileSystem, WholeFileCacheFileSystem, SimpleCacheFileSystem):
        store.clear_instance_cache()  # otherwise later tests get instances that use the stores above


def written_below(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "\n".join(f"{path}\n{path.read_bytes().decode('latin-1')}" for path in files)


environments = st.dictionaries(
    st.sampled_from(["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "GITHUB_TOKEN", "DB_URL"]),
    st.integers(10**7, 10**8).map(lambda number: f"canaryenv{number}"),
)


@settings(max_examples=15)
@given(
    secret_urls(protocols=("s3", "gs", "hf", "http", "https")),
    environments,
    st.sampled_from(["words", "environment", "recipe"]),
    st.booleans(),
)
@example(SecretUrl("s3://AKIA:canary1/x@bucket/dir/a.txt", ("canary1",)), {}, "words", False)
@example(SecretUrl("https://me:canary1#@host/dir/a.txt?sig=canary2", ("canary1", "canary2")), {}, "words", False)
@example(SecretUrl("s3://AKIA:canary1/x@bucket/dir/a.txt", ("canary1",)), {}, "recipe", True)
@example(SecretUrl("gone://me:canary1@host/dir/a.txt", ("canary1",)), {}, "environment", True)
def test_a_preparation_writes_and_prints_no_secret(source: SecretUrl, environment: dict[str, str], place: str, fails: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.object(Bucket, "fails", fails), patch.object(Web, "fails", fails):
        output = Path(folder, "data")
        words = ["prepare", "--output", str(output), "--workers", "1", "--tokenizer.kind", "byte", "--limits.retries", "1"]
        words += ["--limits.retry_wait_s", "0", "--row_length", "64", "--keep_rejects", "true"]
        if place == "words":
            words += ["--sources", source.url]
        elif place == "environment":
            environment = environment | {"PREP_SOURCES": json.dumps([source.url])}
        else:
            Path(folder, "recipe.toml").write_text(f"[prepare.source.own]\npaths = [{json.dumps(source.url)}]\n")
            words += ["--recipe", str(Path(folder, "recipe.toml"))]
        printed = io.StringIO()
        logger = logging.getLogger("data_pipeline")
        handlers = list(logger.handlers)
        with patch.dict(os.environ, environment), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = end_of(main, words)
        logger.handlers[:] = handlers
        assert code in (0, 2, 3), printed.getvalue()
        seen = printed.getvalue() + written_below(output)
    assert not source.seen_in(seen)
    assert not [value for name, value in environment.items() if name != "PREP_SOURCES" and value in seen]


@pytest.mark.parametrize("words", [("PREP_SOURCES", "https://me:canary1'x@host/a"), ("PREP_SOURCE", "s3://k:canary1@b/a")])
def test_a_setting_that_is_refused_is_shown_without_its_secrets(words: tuple[str, str]) -> None:
    done = run_command("data_pipeline", "prepare", **dict([words]))
    assert done.returncode == 2
    assert "canary1" not in done.stdout + done.stderr


SERVICE = '''
"""A stand-in for MLflow that tells everybody what it was given."""
import logging, os, types
_seen = open(os.environ["SEEN"], "a")
entities = types.SimpleNamespace(Metric=lambda *values: values, Param=lambda name, value: _seen.write(f"{name}={value}\\n"))
class MlflowClient:
    def __init__(self, tracking_uri):
        self.uri = tracking_uri
        _seen.write(f"uri={tracking_uri}\\n")
        _seen.flush()
        logging.getLogger("urllib3").warning("Retrying after url: %s and %s", self.uri, self.uri.partition("?")[2])
        if "refuse" in os.environ.get("MODE", ""):
            raise OSError(f"Max retries exceeded with url: {self.uri} /api?{self.uri.partition('?')[2]}")
    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="1")
    def create_run(self, *_, **__):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))
    def log_batch(self, *_, metrics=(), **__):
        if metrics:
            raise OSError(f"no answer from {self.uri} for /api?{self.uri.partition('?')[2]}")
    def __getattr__(self, name):
        return lambda *_, **__: types.SimpleNamespace(wait=lambda: None)
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data") / "data")


def test_a_run_writes_and_prints_no_secret_and_goes_on_with_it(data: Path, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "mlflow.py").write_text(SERVICE)
    uri = "https://canary-user@host/mlflow?token=canary-token&key=canary%2Fkey#canary-rest"
    secrets = ("canary-user", "canary-token", "canary%2Fkey", "canary/key", "canary-rest")
    variables = {
        "PYTHONPATH": str(tmp_path / "packages"),
        "SEEN": str(tmp_path / "seen"),
        "TRAIN_LOG__MLFLOW_URI": uri,
        "MLFLOW_TRACKING_PASSWORD": "canary-password",
    }
    run = tmp_path / "run"
    printed = ""
    for steps in (2, 4):
        config = tiny_config(data, run, limits={"steps": steps}, schedule={"warmup_steps": 1, "decay_steps": 4})
        done = run_command("trainer", "train", *arguments(config), **variables)
        assert done.returncode == 0, done.stderr
        printed += done.stdout + done.stderr
    done = run_command("trainer", "report", str(run))
    assert done.returncode == 0, done.stderr
    printed += done.stdout + done.stderr
    seen = printed + written_below(run)
    assert not [secret for secret in (*secrets, "canary-password") if secret in seen]
    assert 'mlflow_uri = "https://host/mlflow"' in (run / "config.toml").read_text()
    received = (tmp_path / "seen").read_text()
    assert received.count(f"uri={uri}") == 2, "the URI was not taken from the environment both times"
    assert "canary" not in received.replace(uri, "")

    done = run_command("trainer", "train", *arguments(tiny_config(data, tmp_path / "other")), **variables, MODE="refuse")
    assert done.returncode == 2
    assert "the store does not take the run" in done.stderr
    assert not [secret for secret in secrets if secret in done.stdout + done.stderr]

"""make release, make pins and env/rebuild, with a stand-in for docker that records its calls. No engine is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.containers.services import ROOT

DOCKER = r"""#!/usr/bin/env bash
echo "$*" >>"$STAND_IN/calls"
case "$*" in
    "buildx imagetools inspect "*) [ ! -e "$STAND_IN/digest" ] && exit 1; cat "$STAND_IN/digest" ;;
    *"image.base.name"*) echo own:1 ;;
    *"image.revision"*) git rev-parse HEAD ;;
    "image inspect --format {{range"*own:1) echo sha256:base ;;
    "image inspect --format {{range"*-again) printf 'sha256:base\nsha256:%s\nsha256:app\n' "${SECOND:-venv}" ;;
    "image inspect --format {{range"*) printf 'sha256:base\nsha256:venv\nsha256:app\n' ;;
    "run "*) printf '# test-1.lock: packages\ng++=4:13\nlibc6=2.39\n' ;;
esac
"""
FILES = (
    *("env/release", "env/pins", "env/rebuild"),
    *("env/image-arguments", "env/build-secrets", "env/empty", "env/requirements-image.lock"),
)
PINNED = ("Dockerfile", "docker-compose.yml", "docs/containers.md")
PIN = re.compile(r"[a-z0-9./-]+:[\w.-]+@(sha256:[0-9a-f]{64})")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed checkout with these scripts; `docker` is the stand-in."""
    folder = tmp_path / "checkout"
    for name in (*FILES, *PINNED, "common/paths.py", ".gitignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "env/apt").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(DOCKER)
    (tmp_path / "bin/docker").chmod(0o755)
    for name, value in {"STAND_IN": str(tmp_path), "CA_BUNDLE": "env/empty", "PIP_CONF": "env/empty"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("BASE_IMAGE", raising=False)
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    return folder


def run(checkout: Path, *command: str) -> tuple[int, str]:
    result = subprocess.run([checkout / command[0], *command[1:]], capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stdout + result.stderr


def calls(checkout: Path) -> list[str]:
    path = checkout.parent / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_a_release_has_an_sbom_provenance_and_dates_of_the_commit(checkout: Path) -> None:
    code, said = run(checkout, "env/release", "registry.example.org/trainer:1")
    assert code == 0, said
    (build,) = calls(checkout)
    assert build.startswith("buildx build --sbom=true --provenance=mode=max --output type=image,")
    assert ",name=registry.example.org/trainer:1,push=true,rewrite-timestamp=true " in build
    pinned = PIN.search((checkout / "Dockerfile").read_text().split("ARG BASE_IMAGE=")[1])
    assert pinned
    assert f"BASE_DIGEST={pinned[1]} " in build
    assert re.search(r"REVISION=[0-9a-f]{40} ", build)


@pytest.mark.parametrize(
    ("image", "base", "change", "reason"),
    [
        ("trainer:1", None, False, "is no name of an image in a registry"),
        ("registry.example.org/trainer:1", "trainer-base:1", False, "is not pinned by a digest"),
        ("registry.example.org/trainer:1", None, True, "Commit or remove your changes first"),
    ],
)
def test_a_release_that_nobody_could_build_again_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, image: str, base: str | None, change: bool, reason: str
) -> None:
    if base:
        monkeypatch.setenv("BASE_IMAGE", base)
    if change:
        (checkout / "new.py").touch()
    code, said = run(checkout, "env/release", image)
    assert (code, reason in said) == (1, True), said
    assert calls(checkout) == []


def test_pins_writes_the_new_digest_into_every_file_and_a_lock_of_debian_packages(checkout: Path) -> None:
    digest = f"sha256:{'e' * 64}"
    (checkout.parent / "digest").write_text(digest)
    code, said = run(checkout, "env/pins")
    assert code == 0, said
    for name in PINNED:
        found = PIN.findall((checkout / name).read_text())
        assert found
        assert set(found) == {digest}, name
    assert (checkout / "env/apt/test-1.lock").read_text().splitlines()[1:] == ["g++=4:13", "libc6=2.39"]


@pytest.mark.parametrize("answer", [None, "sha256:short", "<html>login</html>"])
def test_without_a_digest_from_the_registry_pins_changes_nothing(checkout: Path, answer: str | None) -> None:
    if answer is not None:
        (checkout.parent / "digest").write_text(answer)
    before = [(checkout / name).read_bytes() for name in PINNED]
    code, said = run(checkout, "env/pins")
    assert code == 1
    assert "does not answer with a digest of pytorch/pytorch:" in said
    assert [(checkout / name).read_bytes() for name in PINNED] == before
    assert list((checkout / "env/apt").iterdir()) == []


def test_a_second_build_is_compared_layer_by_layer_above_the_base(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(checkout, "env/rebuild", "trainer:x")
    assert code == 0, said
    assert "rebuild: sha256:venv  the same\nrebuild: sha256:app  the same\n" in said
    assert "sha256:base" not in said
    assert any(call.startswith("build --quiet --no-cache --tag trainer:x-again ") for call in calls(checkout))
    monkeypatch.setenv("SECOND", "other")
    code, said = run(checkout, "env/rebuild", "trainer:x")
    assert (code, "rebuild: sha256:venv  now sha256:other" in said) == (1, True), said
    assert calls(checkout)[-1] == "image rm trainer:x-again"


def test_an_image_of_another_commit_is_not_built_again(checkout: Path) -> None:
    (checkout / "new.py").touch()
    code, said = run(checkout, "env/rebuild", "trainer:x")
    assert (code, "Build it again with `make image`" in said) == (1, True), said
    assert not any(call.startswith("build") for call in calls(checkout))


@pytest.mark.parametrize("lock", sorted((ROOT / "env/apt").glob("*.lock")), ids=lambda path: path.name)
def test_a_lock_of_debian_packages_has_one_whole_version_of_each(lock: Path) -> None:
    first, *pins = lock.read_text().splitlines()
    assert first.startswith(f"# {lock.name}: ")
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.+-]+=[0-9][\w.+:~-]*", pin) for pin in pins), pins
    names = [pin.partition("=")[0] for pin in pins]
    assert names == sorted(set(names))
    assert {"g++", "libpython3-dev"} <= set(names)

"""Locks match their inputs, every package is pinned by hash, and image digests are whole."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
ENV = ROOT / "env"


def load_lock_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lock", ENV / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOCK = load_lock_script()


def blocks(lock: str) -> dict[str, str]:
    return LOCK.parse_blocks((ENV / lock).read_text())


@pytest.mark.parametrize("lock", LOCK.INPUTS)
def test_a_lock_was_made_from_the_inputs_as_they_are(lock: str) -> None:
    assert (ENV / lock).read_text().startswith(LOCK.header(lock)), f"env/{lock} is stale: run `make lock`"


@pytest.mark.parametrize("lock", LOCK.INPUTS)
def test_every_package_is_pinned_to_one_version_with_hashes_and_no_index(lock: str) -> None:
    text = (ENV / lock).read_text()
    assert "://" not in text
    assert "--index" not in text
    for name, block in blocks(lock).items():
        for pin in re.findall(rf"^{re.escape(name)}==[^\n]+(?:\n    --hash[^\n]+)+", block, re.MULTILINE | re.IGNORECASE):
            assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", pin), f"{lock}: {name} has no hash"


@pytest.mark.parametrize("lock", [lock for lock in LOCK.INPUTS if lock not in ("requirements-cpu.lock", "requirements-cuda.lock")])
def test_a_lock_satisfies_what_its_inputs_ask_for(lock: str) -> None:
    available = {**blocks("requirements.lock"), **blocks("requirements-cuda.lock"), **blocks(lock)}
    for source in LOCK.INPUTS[lock]:
        for line in (ENV / source).read_text().splitlines():
            if line and not line.startswith(("#", "-r")):
                wanted = Requirement(line)
                versions = re.findall(r"==([^ ;\\\n]+)", available[wanted.name.lower()])
                assert any(wanted.specifier.contains(version) for version in versions), f"{lock}: {line} is not met by {versions}"


def test_the_native_lock_accepts_the_cpu_and_the_registry_build_of_torch() -> None:
    native = blocks("requirements.lock")["torch"]
    assert native.count("--hash") > len(LOCK.TORCH_CPU_HASHES)
    assert all(digest in native for digest in LOCK.TORCH_CPU_HASHES)


def test_the_image_lock_leaves_torch_and_its_libraries_to_the_base() -> None:
    assert not [name for name in blocks("requirements-image.lock") if LOCK.is_of_cuda(name) or name.startswith("torch")]


def test_no_package_has_two_versions_across_the_locks_that_are_installed_together() -> None:
    versions: dict[str, set[str]] = {}
    for lock in LOCK.INPUTS.keys() - {"requirements-sbom.lock", "requirements-tools.lock"}:
        for name, block in blocks(lock).items():
            versions.setdefault(name, set()).add(",".join(re.findall(r"==([^ ;\\\n+]+)", block)))
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_a_lock_has_what_others_install_on_some_machines_only() -> None:
    given = {
        "colorama": "colorama==0.4.6 ; sys_platform == 'win32' \\\n    --hash=sha256:0\n",
        "numpy": "numpy==2.0 \\\n    --hash=sha256:1\n",
    }
    wanted = {"colorama": "colorama==0.4.6 \\\n    --hash=sha256:0\n", "numpy": given["numpy"], "rouge": "rouge==1.0\n"}
    assert LOCK.beyond(wanted, given) == {"colorama": wanted["colorama"], "rouge": wanted["rouge"]}
    assert LOCK.beyond({"colorama": given["colorama"]}, given) == {}


def test_the_lock_for_lm_eval_has_colorama_for_every_machine() -> None:
    assert re.search(r"^colorama==[^;\n]+$", blocks("requirements-eval.lock")["colorama"], re.MULTILINE)


def test_every_image_is_pinned_by_a_whole_digest() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    digests = re.findall(r"pytorch/pytorch:\S+?@(\S+)", dockerfile)
    assert digests
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in digests)

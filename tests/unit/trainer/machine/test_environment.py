from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.paths import ENV
from trainer.machine import environment
from trainer.machine.environment import (
    ChangedFact,
    describe_unlocked,
    environment_facts,
    find_differences,
    installed_packages,
    lock_name,
    same_facts,
    unlocked_packages,
)


def test_a_package_that_was_removed_by_half_is_no_part_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    installed_packages.cache_clear()
    packages = environment_facts()["packages"]
    assert "torch" in packages
    assert "gone" not in packages


@pytest.mark.parametrize(
    "name",
    ["device", "torch", "threads", "code", "flags.MKL_CBWR", "packages.nvidia-cublas", "gpus", "nccl", "nodes", "image_base"],
)
def test_what_can_change_bits_is_marked(name: str) -> None:
    [found] = find_differences({name: "1", "same": 1}, {name: "2", "same": 1})
    assert found == ChangedFact(name, "1", "2", True)
    assert found.describe() == f"* {name}: 1 before, 2 now"


@pytest.mark.parametrize("name", ["python", "platform", "packages.tensorboard", "locks.requirements.lock"])
def test_what_cannot_change_bits_is_not_marked(name: str) -> None:
    [found] = find_differences({}, {name: "2"})
    assert found.describe() == f"  {name}: none before, 2 now"
    [found] = find_differences({}, {name: "2"}, deciding=(name,))
    assert found.describe() == f"* {name}: none before, 2 now", "if it is in `deciding`"


def test_facts_that_an_older_version_did_not_record_are_not_compared() -> None:
    recorded = {"python": "3.11", "packages": {"numpy": "2.0", "gone": "1"}, "removed": "x"}
    found = {"python": "3.12", "packages": {"numpy": "2.1"}, "nccl": "2.27.7", "lock": "requirements.lock", "unlocked": {"a": "b"}}
    differing = [one.name for one in find_differences(*same_facts(recorded, found))]
    assert differing == ["packages.gone", "packages.numpy", "python", "removed"]
    assert same_facts(found, found)[0].keys() == {"python", "packages.numpy", "nccl"}


DIGEST = f"sha256:{'0123456789abcdef' * 4}"


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (f"abc-dirty@{DIGEST}", DIGEST),
        (f"old@{DIGEST}", None),
        (f"@{DIGEST}", None),
        (DIGEST, None),
        ("abc-dirty@sha256:short", None),
        ("", None),
    ],
)
def test_the_digest_of_the_image_is_recorded_only_with_the_revision_of_this_code(
    monkeypatch: pytest.MonkeyPatch, variable: str, expected: str | None
) -> None:
    monkeypatch.setenv("CODE_REVISION", "abc-dirty")
    monkeypatch.setenv("IMAGE_DIGEST", variable)
    assert environment_facts()["image_digest"] == expected


def test_without_a_revision_there_is_no_digest_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_REVISION", "")
    monkeypatch.setenv("IMAGE_DIGEST", f"@{DIGEST}")
    assert environment_facts()["image_digest"] is None


def test_the_base_of_the_image_and_its_system_packages_are_part_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("IMAGE_BASE_DIGEST", raising=False)
    outside = environment_facts()
    assert (outside["image_base"], outside["system_packages"]) == (None, None)
    packages = tmp_path / "apt-packages.txt"
    monkeypatch.setattr(environment, "SYSTEM_PACKAGES", packages)
    monkeypatch.setenv("IMAGE_BASE_DIGEST", DIGEST)
    packages.write_text("g++=4:12.2.0-3\n")
    recorded = environment_facts()
    assert recorded["image_base"] == DIGEST
    monkeypatch.setenv("IMAGE_BASE_DIGEST", DIGEST.replace("0", "f"))
    packages.write_text("g++=4:12.2.0-4\n")
    differing = [(one.name, one.changes_bits) for one in find_differences(*same_facts(recorded, environment_facts()))]
    assert differing == [("image_base", True), ("system_packages", True)]


def test_the_environment_names_gpus_their_memory_driver_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(environment.torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr(environment.torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(environment.torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(environment.torch.cuda.nccl, "version", lambda: (2, 27, 7))
    monkeypatch.setattr(environment.torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(environment, "driver_version", lambda: "580.65.06")
    facts = environment_facts()
    assert (facts["gpus"], facts["gpu_memory_bytes"]) == (["GPU 0", "GPU 1"], [80 << 30] * 2)
    assert (facts["driver"], facts["nccl"], facts["cudnn"]) == ("580.65.06", "2.27.7", "9.20.0")


# The lock


LOCK = """# Made by `make lock`; do not edit.
tqdm==4.70.1 \\
    --hash=sha256:00
Foo_Bar==1.0 \\
    --hash=sha256:00
torch==2.13.0 \\
    --hash=sha256:00
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:00
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:00
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:00
"""
AS_LOCKED = {"tqdm": "4.70.1", "foo.bar": "1.0", "torch": "2.13.0+cpu", "numpy": "2.5.5", "own-package": "9"}


def test_of_two_installations_the_one_that_is_imported_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("first", "2"), ("second", "1")):
        metadata = tmp_path / folder / f"twice-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: Twice\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert installed_packages.__wrapped__() == {"twice": "2"}


def test_packages_as_in_the_lock_are_not_named() -> None:
    assert unlocked_packages(LOCK, AS_LOCKED) == {}


@pytest.mark.parametrize(
    ("installed", "unlocked"),
    [
        ({"tqdm": "4.67.1"}, {"tqdm": "4.67.1 (lock: 4.70.1)"}),
        ({"torch": "2.11.0+cu130"}, {"torch": "2.11.0+cu130 (lock: 2.13.0)"}),
        ({"numpy": "2.4.7"}, {"numpy": "2.4.7 (lock: 2.4.6 or 2.5.5)"}),
        ({"foo.bar": None}, {"foo-bar": "missing (lock: 1.0)"}),
        ({"colorama": "0.4.5"}, {"colorama": "0.4.5 (lock: 0.4.6)"}),
    ],
)
def test_a_package_with_another_version_or_none_is_named_with_both(
    installed: dict[str, str | None], unlocked: dict[str, str]
) -> None:
    found = {name: version for name, version in (AS_LOCKED | installed).items() if version is not None}
    assert unlocked_packages(LOCK, found) == unlocked


def test_the_lock_of_an_image_has_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("IMAGE_REVISION", raising=False)
    assert lock_name() == "requirements.lock"
    assert "torch" in unlocked_packages((ENV / "requirements.lock").read_text(), {})
    monkeypatch.setenv("IMAGE_REVISION", "abc on base")
    assert lock_name() == "requirements-image.lock"
    assert "torch" not in unlocked_packages((ENV / "requirements-image.lock").read_text(), {})
    monkeypatch.setattr(environment, "ENV", tmp_path)
    assert lock_name() is None


def test_every_package_of_the_lock_is_compared() -> None:
    text = (ENV / "requirements.lock").read_text()
    names = {line.partition("==")[0] for line in text.splitlines() if "==" in line and ";" not in line and not line.startswith("#")}
    assert unlocked_packages(text, {}).keys() >= names
    installed = {found.metadata["Name"]: found.version for found in distributions() if found.metadata["Name"]}
    assert len(unlocked_packages(text, installed)) < len(names)


def test_the_sentence_names_the_first_packages_and_the_number_of_the_others() -> None:
    assert describe_unlocked("requirements.lock", {}) == ""
    one = {"tqdm": "4.67.1 (lock: 4.70.1)"}
    assert describe_unlocked("requirements.lock", one) == "1 package differs from env/requirements.lock: tqdm 4.67.1 (lock: 4.70.1)"
    many = {f"p{number}": "1 (lock: 2)" for number in range(10)}
    said = describe_unlocked("requirements.lock", many)
    assert said.startswith("10 packages differ from env/requirements.lock: p0 1 (lock: 2), ")
    assert said.endswith("p7 1 (lock: 2) and 2 more")
    assert "is missing" in describe_unlocked(None, {})

from importlib.metadata import distributions
from pathlib import Path

import pytest

from common.paths import ENV
from trainer.machine import locks
from trainer.machine.locks import describe_unlocked, installed_packages, lock_name, unlocked_packages

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
    monkeypatch.setattr(locks, "ENV", tmp_path)
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

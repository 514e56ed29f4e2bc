from pathlib import Path

import pytest

from trainer.machine.environment import Difference, _packages, environment_facts, find_differences


def test_a_package_that_was_removed_by_half_is_no_part_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    _packages.cache_clear()
    packages = environment_facts()["packages"]
    assert "torch" in packages
    assert "gone" not in packages


@pytest.mark.parametrize("name", ["device", "torch", "threads", "code", "flags.MKL_CBWR", "packages.nvidia-cublas", "gpus"])
def test_what_can_change_bits_is_marked(name: str) -> None:
    [found] = find_differences({name: "1", "same": 1}, {name: "2", "same": 1})
    assert found == Difference(name, "1", "2", True)
    assert found.describe() == f"* {name}: 1 before, 2 now"


@pytest.mark.parametrize("name", ["python", "platform", "packages.tensorboard", "locks.requirements.lock"])
def test_what_cannot_change_bits_is_not_marked(name: str) -> None:
    [found] = find_differences({}, {name: "2"})
    assert found.describe() == f"  {name}: none before, 2 now"
    [found] = find_differences({}, {name: "2"}, deciding=(name,))
    assert found.describe() == f"* {name}: none before, 2 now", "if it is in `deciding`"

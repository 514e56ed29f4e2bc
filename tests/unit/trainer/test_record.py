from pathlib import Path

import pytest

from trainer.record import _packages, environment_facts


def test_a_package_that_was_removed_by_half_is_no_part_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    _packages.cache_clear()
    packages = environment_facts()["packages"]
    assert "torch" in packages
    assert "gone" not in packages

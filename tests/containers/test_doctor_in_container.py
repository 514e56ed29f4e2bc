"""`docker compose run train doctor` on a real engine: what it says of the services, and of faults that are planted there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.containers.services import PROJECT, ROOT, Services

pytestmark = pytest.mark.containers

TINY = f"{PROJECT}-tiny"
"""Name of a volume without free space."""


def examined(services: Services, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the fast checks in a new container of `train` with these options. Return the exit code and the rows by name."""
    done = services.compose("run", "--rm", "-T", "--no-deps", *options, "train", "doctor", "--fast", "--json", check=False)
    found = json.loads(done.stdout)
    assert found["ready"] == (done.returncode == 0), done.stderr
    return done.returncode, {row["name"]: row for row in found["checks"]}


def test_the_machine_of_the_services_is_ready_and_its_packages_are_those_of_the_lock(services: Services) -> None:
    code, rows = examined(services)
    assert code == 0
    assert rows["packages"]["found"] == "all as in env/requirements-image.lock"
    assert {name: row for name, row in rows.items() if row["severity"] == "error"} == {}
    assert rows["run folder"]["found"].startswith("/workspace")


def test_all_checks_end_and_print_a_table(services: Services) -> None:
    shown = services.compose("run", "--rm", "-T", "--no-deps", "train", "doctor", timeout_s=120).stdout
    assert "gloo on 2 ranks: same bits in 3 runs" in shown
    assert "fsync" in shown


def test_a_volume_of_another_user_is_an_error_that_names_both(services: Services) -> None:
    code, rows = examined(services, "--user", "4321:4321")
    assert code == 2
    assert rows["run folder"]["severity"] == "error"
    assert "4321" in rows["run folder"]["found"]
    assert rows["run folder"]["remedy"]


def test_a_full_disk_is_an_error(services: Services) -> None:
    options = ("--driver=local", "--opt=type=tmpfs", "--opt=device=tmpfs", "--opt=o=size=1m,uid=1000,gid=1000")
    subprocess.run(["docker", "volume", "create", *options, TINY], check=True, capture_output=True, timeout=60)
    try:
        code, rows = examined(services, "--volume", f"{TINY}:/full", "--env", "TRAIN_RUN=/full/runs/demo")
    finally:
        subprocess.run(["docker", "volume", "rm", TINY], check=False, capture_output=True, timeout=60)
    assert code == 2
    assert rows["run space"]["severity"] == "error"
    assert "of 1.0 MB free" in rows["run space"]["found"]


def test_another_lock_is_a_warning_that_names_the_package(services: Services, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    lock = (ROOT / "env/requirements-image.lock").read_text().replace("\njinja2==", "\njinja2==0.", 1)
    (tmp_path / "other.lock").write_text(lock)
    code, rows = examined(services, "--volume", f"{tmp_path}/other.lock:/app/env/requirements-image.lock:ro")
    assert code == 0
    assert rows["packages"]["severity"] == "warning"
    assert "jinja2" in rows["packages"]["found"]


def test_a_first_node_that_nobody_knows_is_an_error(services: Services) -> None:
    """Names that end with `.invalid` never have an address (RFC 6761)."""
    nodes = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first.invalid", "PET_MASTER_PORT": "29500"}
    options = [word for name, value in nodes.items() for word in ("--env", f"{name}={value}")]
    code, rows = examined(services, *options)
    assert code == 2
    assert rows["nodes"]["severity"] == "error"
    assert rows["nodes"]["found"].startswith("first.invalid:29500")

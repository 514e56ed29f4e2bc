import pytest
import torch

from common.errors import ConfigError, ExitCode, PreparedDataError, ProjectError
from tests.support.ranks import run_ranks
from trainer.distributed.group import Group, RemoteError


def each(group: Group, failing: tuple[int, ...]) -> tuple[str, str, int]:
    """The kind, message and exit code of what is raised on this rank; or its result."""

    def act() -> str:
        if group.rank in failing:
            raise PreparedDataError(f"no data for rank {group.rank}")
        return f"done {group.rank}"

    try:
        return "", group.on_all(act), 0
    except ProjectError as error:
        return type(error).__name__, str(error), error.exit_code


def test_an_error_on_any_rank_is_raised_on_every_rank_with_its_exit_code() -> None:
    code = int(ExitCode.DATA)
    assert run_ranks(each, 3, ()) == [("", f"done {rank}", 0) for rank in range(3)]
    assert run_ranks(each, 3, (1, 2)) == [
        ("RemoteError", "", code),
        ("PreparedDataError", "no data for rank 1", code),
        ("PreparedDataError", "no data for rank 2", code),
    ]


def test_a_single_rank_raises_its_error() -> None:
    group = Group(0, 1, 0, torch.device("cpu"))
    assert group.on_all(lambda: 3) == 3

    def fail() -> None:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        group.on_all(fail)
    assert not isinstance(ConfigError("wrong"), RemoteError)

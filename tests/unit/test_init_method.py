from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.agent.init_method import usable_init_method
from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed
from trainer.environments.decision import Decision
from trainer.environments.dispatch import decide
from trainer.host.ports import is_port_free


def decision(init_method: str, *, first: int = 0, here: int = 1, world: int = 2) -> Decision:
    options = Distributed(
        cpu=True,
        distributed_init_method=init_method,
        distributed_world_size=world,
        distributed_gpus=here,
        distributed_rank=first,
    )
    return decide(options, {}, 0)


def refused(wanted: Decision) -> str:
    with pytest.raises(RequestError) as caught, usable_init_method(wanted):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- tcp ------------------------------------------------------------------------------------------------------------


def test_ranks_of_one_machine_get_a_port_that_can_be_bound() -> None:
    alone = decide(Distributed(cpu=True, distributed_world_size=2), {}, 0)
    with usable_init_method(alone) as init_method:
        assert init_method is not None
        host, _, port = init_method.removeprefix("tcp://").partition(":")
        assert host == "127.0.0.1"
        assert is_port_free(int(port))


def test_a_port_in_use_is_refused_where_rank_0_would_listen_and_nowhere_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        url = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        assert "is in use on this machine" in refused(decision(url))
        with usable_init_method(decision(url, first=1)) as init_method:
            assert init_method == url


def test_a_host_without_an_address_is_refused() -> None:
    assert "cannot be resolved" in refused(decision("tcp://no-such-host.invalid:29500"))


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here", [1, 2])
def test_a_file_from_an_earlier_run_is_refused_and_kept(tmp_path: Path, here: int) -> None:
    left = tmp_path / "rendezvous"
    left.write_text("rank 0 was here")
    assert "is left from an earlier run" in refused(decision(f"file://{left}", here=here))
    assert list(tmp_path.iterdir()) == [left]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_an_init_file_that_is_no_regular_file_is_refused_and_kept(tmp_path: Path, make: Callable[[Path], None]) -> None:
    odd = tmp_path / "rendezvous"
    make(odd)
    assert refused(decision(f"file://{odd}", here=2)) == (
        f"file://{odd} is not a regular file: choose an unused name (a new one for every run)"
    )
    assert list(tmp_path.iterdir()) == [odd]


def test_a_party_that_comes_late_finds_the_file_in_use_and_joins(tmp_path: Path) -> None:
    file = tmp_path / "rendezvous"
    url = f"file://{file}"
    with usable_init_method(decision(url, first=1)):
        file.write_text("rank 1 is here")
        with usable_init_method(decision(url)) as init_method:
            assert init_method == url
        assert file.exists()
    assert list(tmp_path.iterdir()) == []


def test_an_init_file_of_an_interrupted_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rendezvous"
    with contextlib.suppress(KeyboardInterrupt), usable_init_method(decision(f"file://{file}")):
        file.write_text("rank 0 is here")
        raise KeyboardInterrupt
    assert "is left from an earlier run" in refused(decision(f"file://{file}"))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot be written" in refused(decision(f"file://{tmp_path}/missing/rendezvous"))

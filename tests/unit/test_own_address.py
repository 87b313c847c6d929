from __future__ import annotations

import pytest

from trainer.distributed.store import _reaches_itself
from trainer.host.ports import free_port


@pytest.mark.parametrize(("host", "is_own"), [("127.0.0.1", True), ("127.0.0.2", True), ("192.0.2.1", False)])
def test_an_address_is_this_machine_s_if_a_connection_to_it_arrives_here(host: str, is_own: bool) -> None:
    assert _reaches_itself(host, free_port()) == is_own  # 192.0.2.0/24 belongs to nobody (RFC 5737)

from __future__ import annotations

import subprocess
import sys

# Counts page faults of blocks that are made and freed again and again, as a step's temporaries are.
PROGRAM = """\
import resource
from trainer.host.memory import keep_freed_memory
{call}
blocks = [bytearray(6 << 20) for _ in range(4)]
del blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    blocks = [bytearray(6 << 20) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call: str, **environment: str) -> int:
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=call)], env=environment, capture_output=True, text=True, check=True
    )
    return int(out.stdout)


def test_freed_memory_is_used_again_without_page_faults_unless_a_user_has_chosen() -> None:
    default = faults("pass")
    assert faults("assert keep_freed_memory()") < default / 4
    assert faults("assert not keep_freed_memory()", GLIBC_TUNABLES="glibc.malloc.arena_max=4") > default / 4

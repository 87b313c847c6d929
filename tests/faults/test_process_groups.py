"""A script whose ranks wait in sub-groups: who is late, who waits for it, and who has called something else."""

from __future__ import annotations

from pathlib import Path

from bench import LIMIT_S, Bench

from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.state import RunState
from gputrain_tui.state.figures import group_figures

RECIPE = """\
name = "mesh"

[[cluster.nodes]]
cpu_ranks = 4

[cluster]
stall_timeout = 12

[train]
script = "{script}"
args = ["{late_from}", "{even_from}", "{odd_at}"]
"""
LATE_FROM, EVEN_FROM, ODD_AT = 45, 66, 70
SOON = 20


def test_in_a_mesh_the_late_rank_is_named_with_those_that_wait_and_one_that_calls_another_collective(
    bench: Bench,
) -> None:
    recipe = bench.folder / "mesh.toml"
    script = Path(__file__).parent / "mesh_script.py"
    recipe.write_text(RECIPE.format(script=script, late_from=LATE_FROM, even_from=EVEN_FROM, odd_at=ODD_AT))
    process = bench.start("run", recipe)
    _, err = process.communicate(timeout=3 * LIMIT_S)  # four ranks, and a stall
    assert process.returncode == 1, err
    state = RunState()
    reader = RunReader(bench.runs()[0].dir)
    while events := reader.poll():
        state.apply_all(events)
    reader.close()

    # Four ranks on fewer cores are late by chance, too.
    found = [each for each in state.past_findings if (each.kind, each.state) == ("straggler", "raised")]
    late = [each for each in found if each.step is not None and LATE_FROM <= each.step < LATE_FROM + SOON]
    late = [each for each in late if (each.rank, each.cause) == (3, "backward")]
    assert late, [(each.step, each.message) for each in found]
    assert "rank 2 of tp" in late[0].message
    assert 150.0 < late[0].evidence["excess_ms"] < 600.0  # 200 ms, and longer where its core is taken

    (stalled,) = [each for each in state.past_findings if (each.kind, each.state) == ("stalled", "raised")]
    assert (stalled.rank, stalled.cause, stalled.step) == (3, "collectives", ODD_AT - 1)
    assert stalled.message.endswith("; rank 3 waits in all_gather of dp, rank 1 waits in all_reduce of dp")
    assert "rank 3 on" in err
    assert "hangs after step 69" in err
    for view in state.ranks.values():
        assert {(each.group, len(each.ranks)) for each in group_figures(view)} == {("tp", 2), ("dp", 2)}

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rank_group import Gang
from torch import nn

from trainer.contract.record import Checksum, EventWriter, Finding, decode_events
from trainer.engine.reports import DesyncReports
from trainer.telemetry.desync import DesyncCheck, Fingerprint, ReplicatedTensors, minority

CPU = torch.device("cpu")


def _model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, dtype=torch.bfloat16))
    model.register_buffer("seen", torch.tensor([1, 2, 3]))
    model.register_buffer("flag", torch.tensor(True))
    return model


def fingerprint(model: nn.Module) -> Fingerprint:
    return fingerprint_of(ReplicatedTensors(model))


def fingerprint_of(replica: ReplicatedTensors) -> Fingerprint:
    return replica.fingerprint(replica.checksums().tolist())


def test_equal_models_have_equal_fingerprints() -> None:
    assert fingerprint(_model()) == fingerprint(_model())


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "2.weight", "2.bias"])
def test_one_changed_bit_anywhere_in_a_parameter_shows(name: str) -> None:
    model = _model()
    before = fingerprint(model)
    tensor = model.get_parameter(name).detach().view(-1)
    tensor[-1] = torch.nextafter(tensor[-1].float(), torch.tensor(torch.inf)).to(tensor.dtype) * 1.01
    after = fingerprint(model)
    assert after.digests[0] != before.digests[0]
    assert after.digests[1] == before.digests[1]
    assert sum(one != other for one, other in zip(before.parameters, after.parameters, strict=True)) == 1


def test_a_changed_buffer_shows_and_statistics_of_a_ranks_own_batches_do_not() -> None:
    model = _model()
    before = fingerprint(model)
    model[1](torch.randn(4, 7))  # type: ignore[index]
    assert fingerprint(model) == before
    model.flag.fill_(False)  # type: ignore[operator, union-attr]
    after = fingerprint(model)
    assert after.digests[0] == before.digests[0]
    assert after.digests[1] != before.digests[1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_a_parameter_that_is_no_number_is_in_the_checksum(name: str, value: float) -> None:
    model = _model()
    assert not fingerprint(model).non_finite
    model.get_parameter(name).detach().view(-1)[-1] = value
    assert fingerprint(model).non_finite
    check = DesyncCheck(ReplicatedTensors(model), step=3, rank=0, device=CPU)
    assert check.result()[0].non_finite


def _trained(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight += 1.0  # type: ignore[index, operator]


def _replaced(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight + 1.0)  # type: ignore[index, operator]


def _moved(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data + 1.0  # type: ignore[index, operator, union-attr]


def _grown(model: nn.Module) -> None:
    model[0].register_parameter("more", nn.Parameter(torch.ones(2)))  # type: ignore[index, operator, union-attr]
    _replaced(model)


@pytest.mark.parametrize("change", [_trained, _replaced, _moved, _grown])
def test_a_fingerprint_is_of_the_current_replica(change: Callable[[nn.Module], None]) -> None:
    model = _model()
    replica = ReplicatedTensors(model)
    before = fingerprint_of(replica)
    assert fingerprint_of(replica) == before
    change(model)
    assert fingerprint_of(replica) == fingerprint(model) != before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(()),
        torch.randn(0),
        torch.randn(3, 5).t(),
        torch.randn(7)[1:],
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([True, False, True]),
        torch.randn(3, dtype=torch.float16),
    ],
    ids=["scalar", "empty", "transposed", "off the word boundary", "complex", "bool", "half"],
)
def test_every_kind_of_tensor_has_a_checksum(tensor: torch.Tensor) -> None:
    module = nn.Module()
    module.register_buffer("x", tensor)
    other = nn.Module()
    other.register_buffer("x", tensor.clone())
    assert fingerprint(module) == fingerprint(other)


@pytest.mark.parametrize(
    ("keys", "apart"),
    [("aab", [12]), ("ab", [11]), ("baa", [10]), ("aabb", [12, 13]), ("abc", [11, 12])],
)
def test_the_smaller_part_stands_apart_and_the_first_rank_decides_a_tie(keys: str, apart: list[int]) -> None:
    assert minority(list(keys), [10 + index for index in range(len(keys))]) == apart


def test_a_single_rank_has_a_checksum_and_no_desync() -> None:
    check = DesyncCheck(ReplicatedTensors(_model()), step=3, rank=0, device=CPU, now=5.0)
    event, findings = check.result()
    assert findings == []
    assert (event.step, event.rank, event.time, len(event.parameters)) == (3, 0, 5.0, 16)


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang(3)
    yield gang
    gang.close()


def _check(rank: int, world_size: int, what: str, apart: list[int], unlike: bool) -> list[Any]:
    model = _model()
    if rank in apart:
        with torch.no_grad():
            match what:
                case "nothing":
                    pass
                case "last bits":
                    model[0].weight[3, 3] += 1e-7  # type: ignore[index]
                case "parameter":
                    model[0].bias[0] += 1.0  # type: ignore[index]
                    model[2].bias[0] += 1.0  # type: ignore[index]
                case "buffer":
                    model.seen[0] = 9  # type: ignore[index, operator, union-attr]
                case "shape":
                    model = nn.Sequential(nn.Linear(5, 7))
    if unlike:
        with mock.patch("torch.backends.cpu.get_cpu_capability", return_value=f"kind {rank}"):
            # A name of its own for the processor, which is read once for each device.
            check = DesyncCheck(ReplicatedTensors(model), step=100, rank=rank, device=torch.device("cpu", 0))
    else:
        check = DesyncCheck(ReplicatedTensors(model), step=100, rank=rank, device=CPU)
    checksum, findings = check.result()
    return [checksum, *findings]


def _run(gang: Gang, what: str, apart: list[int], unlike: bool = False) -> tuple[list[Checksum], list[Finding]]:
    events = [event for result in gang.run(_check, what, apart, unlike) for event in result]
    return (
        [event for event in events if isinstance(event, Checksum)],
        [event for event in events if isinstance(event, Finding)],
    )


def test_ranks_in_step_have_equal_checksums_and_no_finding(gang: Gang) -> None:
    checksums, findings = _run(gang, "nothing", [])
    assert [event.rank for event in checksums] == [0, 1, 2]
    assert len({(event.parameters, event.buffers) for event in checksums}) == 1
    assert findings == []


@pytest.mark.parametrize(
    ("what", "apart", "severity", "message"),
    [
        (
            "parameter",
            [2],
            "critical",
            "rank 2 holds different parameters than the others, first in parameter 0.bias (2 of 6",
        ),
        (
            "parameter",
            [0],
            "critical",
            "rank 0 holds different parameters than the others, first in parameter 0.bias (2 of 6",
        ),
        (
            "last bits",
            [1],
            "critical",
            "rank 1 holds different parameters than the others, first in parameter 0.weight (1 of",
        ),
        (
            "buffer",
            [1],
            "warning",
            "rank 1 holds different buffers than the others, first in buffer seen (1 of 2 differ)",
        ),
        (
            "shape",
            [1],
            "critical",
            "rank 1 holds different parameters than the others, a different number of parameters",
        ),
    ],
)
def test_a_desync_names_the_rank_and_the_first_tensor_that_differs(
    gang: Gang, what: str, apart: list[int], severity: str, message: str
) -> None:
    checksums, findings = _run(gang, what, apart)
    finding = findings[0]
    assert len({(event.parameters, event.buffers) for event in checksums}) == 2
    assert finding.message.startswith(message)
    assert (finding.kind, finding.severity, finding.rank, finding.step) == ("desync", severity, apart[0], 100)
    assert finding.advice


def _follow(rank: int, world_size: int, folder: str) -> list[str]:
    model = _model()
    weight: Any = model[0].weight
    writer = EventWriter(Path(folder) / f"{rank}.ndjson", rank=rank)
    lines: list[str] = []
    ctx: Any = SimpleNamespace(rank=rank, device=CPU, writer=writer, print_line=lines.append, copies=None)
    reports = DesyncReports(ctx, model)
    first = float(weight[0, 0])
    for step, differs in ((100, False), (200, True), (300, True), (400, False)):
        with torch.no_grad():
            weight[0, 0] = first + (differs and rank == 1)
        reports.begin(step=step)
        reports.finish()
        reports.finish()
    writer.close()
    return lines


def test_a_lasting_desync_is_raised_once_and_cleared_once(gang: Gang, tmp_path: Path) -> None:
    lines = gang.run(_follow, str(tmp_path))
    assert [[line.partition(":")[0] for line in each] for each in lines] == [
        ["desync at step 200", "desync is over at step 400"],
        [],
        [],
    ]
    events = [list(decode_events((tmp_path / f"{rank}.ndjson").read_bytes())) for rank in range(3)]
    assert [[event.step for event in each if isinstance(event, Checksum)] for each in events] == 3 * [
        [100, 200, 300, 400]
    ]
    findings = [[(e.state, e.step, e.rank) for e in each if isinstance(e, Finding)] for each in events]
    assert findings == [[("raised", 200, 1), ("cleared", 400, 1)], [], []]


DRIFTING = """
import torch
from tiny_task import TinyTask
from trainer.distributed import get_rank

class Drifting(TinyTask):
    def loss(self, model, batch):
        if model.training and get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).add_(1e-3)
        return super().loss(model, batch)
"""


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "recorded"])
def test_a_training_that_ends_desynchronised_fails_with_the_reason(tmp_path: Path, recorded: bool) -> None:
    (tmp_path / "drifting_task.py").write_text(DRIFTING)
    support = Path(__file__).parents[1] / "support"
    words = ["--task", "drifting_task:Drifting", "--cpu", "--distributed-world-size", "2", "--max-updates", "6"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "trainer",
            *words,
            "--desync-every",
            "2",
            *(["--run-dir", "record"] if recorded else []),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(support), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = done.stdout + done.stderr
    different = "rank 1 holds different parameters than the others, first in parameter 0.weight"
    assert done.returncode == 1, output
    assert f"trained, but {different}" in done.stderr
    if not recorded:
        assert f"desync at step 2: {different}" in done.stdout
    assert "finished: " not in output


@pytest.mark.parametrize(
    ("what", "severity", "cause"), [("last bits", "info", "drift"), ("parameter", "critical", "parameters")]
)
def test_unlike_processors_may_drift_in_the_last_bits_but_not_further(
    gang: Gang, what: str, severity: str, cause: str
) -> None:
    _, findings = _run(gang, what, [1], unlike=True)
    assert [(finding.severity, finding.cause) for finding in findings] == [(severity, cause)]

"""Mirrors of tracker clients: small stand-ins have the calls of mlflow, trackio, tensorboardX and older wandb."""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trainer.telemetry.instrument import tracker_clients
from trainer.telemetry.own_metrics import OWN

STAND_INS = {
    "mlflow/__init__.py": """
calls = []
def log_metric(key, value, step=None, synchronous=None):
    calls.append((key, value, step))
    return "metric"
def log_metrics(metrics, step=None, synchronous=None):
    for key, value in metrics.items():
        log_metric(key, value, step)
    if step == 13:
        raise OSError("not reachable")
""",
    "mlflow/tracking/__init__.py": "",
    "mlflow/tracking/client.py": """
class MlflowClient:
    def log_metric(self, run_id, key, value, timestamp=None, step=None, synchronous=None):
        self.log_batch(run_id, [])
    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        return len(metrics)
""",
    "trackio/__init__.py": """
def log(metrics, step=None):
    return metrics, step
""",
    "tensorboardX/__init__.py": "from .writer import SummaryWriter",
    "tensorboardX/writer.py": """
class SummaryWriter:
    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        return self
    def add_scalars(self, main_tag, tag_scalar_dict, global_step=None, walltime=None):
        return self
""",
    "wandb/__init__.py": """
from .sdk.wandb_init import _WandbInit
log = None
def init():
    return _WandbInit().make_disabled_run()
""",
    "wandb/sdk/__init__.py": "",
    "wandb/sdk/wandb_init.py": """
import sys
class Run:
    summary = {}
class _WandbInit:
    def make_disabled_run(self):
        run = Run()
        run.log = lambda data, *_, **__: run.summary.update(data)
        sys.modules["wandb"].log = run.log
        return run
""",
}
PACKAGES = ("mlflow", "trackio", "tensorboardX", "wandb")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[Any, Any]]]:
    """Metrics in the order in which they are mirrored; the stand-ins can be imported."""
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    # Modules of torch and the like that other tests have imported are left as they are.
    stood_in = [client for client in tracker_clients._CLIENTS if client.module.partition(".")[0] in PACKAGES]
    monkeypatch.setattr(tracker_clients, "_CLIENTS", stood_in)
    found: list[dict[Any, Any]] = []
    monkeypatch.setattr(OWN, "add", lambda metrics: found.append(dict(metrics)))
    tracker_clients.mirror()
    yield found
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


def test_each_call_is_mirrored_once_and_returns_what_the_client_returns(given: list[dict[Any, Any]]) -> None:
    mlflow, trackio = (importlib.import_module(name) for name in ("mlflow", "trackio"))
    writer = importlib.import_module("tensorboardX").SummaryWriter()
    assert mlflow.log_metric("a", 1.0, step=3) == "metric"
    assert mlflow.log_metrics({"b": 2.0, "c": 3.0}) is None
    assert trackio.log({"d": 4.0}, 7) == ({"d": 4.0}, 7)
    assert writer.add_scalar(scalar_value=5.0, tag="e") is writer
    assert writer.add_scalars("f", {"g": 6.0}, 2) is writer
    assert given == [{"a": 1.0}, {"b": 2.0, "c": 3.0}, {"d": 4.0}, {"e": 5.0}, {"f/g": 6.0}]
    assert mlflow.calls == [("a", 1.0, 3), ("b", 2.0, None), ("c", 3.0, None)]


def test_calls_of_the_client_class_of_mlflow_are_mirrored_once(given: list[dict[Any, Any]]) -> None:
    class Metric(NamedTuple):
        key: str
        value: float

    client = importlib.import_module("mlflow.tracking.client").MlflowClient()
    client.log_metric("run", "a", 1.0)
    assert client.log_batch("run", metrics=[Metric("b", 2.0), Metric("c", 3.0)]) == 2
    client.log_batch("run", params=["no metric"])
    assert given == [{"a": 1.0}, {"b": 2.0, "c": 3.0}]


def test_a_disabled_run_with_a_log_of_its_own_is_mirrored(given: list[dict[Any, Any]]) -> None:
    wandb = importlib.import_module("wandb")
    run = wandb.init()
    run.log({"a": 1}, step=1)
    wandb.log({"b": 2})
    assert given == [{"a": 1}, {"b": 2}]
    assert run.summary == {"a": 1, "b": 2}


def test_a_client_that_raises_is_mirrored_and_its_traceback_has_one_line_more(given: list[dict[Any, Any]]) -> None:
    mlflow = importlib.import_module("mlflow")
    with pytest.raises(OSError, match="not reachable") as raised:
        mlflow.log_metrics({"a": 1.0}, step=13)
    assert [frame.name for frame in traceback.extract_tb(raised.tb)][1:] == ["mirrored", "log_metrics"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        mlflow.log_metrics({"a": 1.0}, wrong=1)
    mlflow.log_metric("b", 2.0)
    assert given == [{"a": 1.0}, {"b": 2.0}]


def test_a_mirror_that_fails_is_not_seen_by_the_script(
    given: list[dict[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(metrics: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(OWN, "add", add)
    assert importlib.import_module("mlflow").log_metric([], None) == "metric"
    assert importlib.import_module("trackio").log(None) == (None, None)
    assert not given


def test_a_call_in_another_thread_is_not_within_this_one(given: list[dict[Any, Any]]) -> None:
    trackio, mlflow = importlib.import_module("trackio"), importlib.import_module("mlflow")

    class Metrics(dict[str, float]):
        def items(self) -> Any:
            thread = threading.Thread(target=trackio.log, args=({"other": 1.0},))
            thread.start()
            thread.join()
            return super().items()

    mlflow.log_metrics(Metrics(a=2.0))
    assert given == [{"a": 2.0}, {"other": 1.0}]

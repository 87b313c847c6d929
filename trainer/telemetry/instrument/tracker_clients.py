"""Metrics that an unchanged script gives to the client of an experiment tracker, mirrored into the record.

A client's function is wrapped once its module has been imported. It gets exactly the arguments given, and what it
returns or raises is the script's, whether or not the tracker is reachable, offline or disabled. What a client passes on
to another one within such a call is not mirrored again. No client is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainer.telemetry.instrument.started_process import after_import
from trainer.telemetry.own_metrics import OWN

Metrics = Callable[[Mapping[str, Any]], Mapping[Any, Any]]
"""Returns the metrics from a call's arguments by name, those absent are missing."""


class _Client(NamedTuple):
    module: str
    function: str
    """In the module; with its class."""
    metrics: Metrics


def _argument(name: str) -> Metrics:
    """Return the mapping that an argument has."""
    return lambda given: given[name]


def _named(name: str, value: str) -> Metrics:
    """Return a metric of which two arguments are name and value."""
    return lambda given: {given[name]: given[value]}


def _scalars(given: Mapping[str, Any]) -> Mapping[Any, Any]:
    return {f"{given['main_tag']}/{tag}": value for tag, value in given["tag_scalar_dict"].items()}


def _lightning(given: Mapping[str, Any]) -> Mapping[Any, Any]:
    metrics = given["metrics"]
    if not metrics or given.get("step") is not None or "step" in metrics:
        return metrics  # type: ignore[no-any-return]
    return {"epoch": given["self"].trainer.current_epoch, **metrics}  # as the connector adds it for its loggers


def _accelerate(given: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the values; the method's decorator hides the names of its arguments."""
    named: dict[str, Any] = {**given, **given.get("kwargs", {})}
    values: Mapping[Any, Any] = named["values"] if "values" in named else named["args"][1]
    return values


def _batch(given: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the values of MLflow's own class for a metric, a list of which it takes as one call."""
    return {metric.key: metric.value for metric in given["metrics"]}


_LIGHTNING = "trainer.connectors.logger_connector.logger_connector"
_CLIENTS = (
    _Client("wandb.sdk.wandb_run", "Run.log", _argument("data")),
    _Client("wandb.sdk.lib.noop_run", "NoopRun.log", _argument("data")),
    _Client("torch.utils.tensorboard.writer", "SummaryWriter.add_scalar", _named("tag", "scalar_value")),
    _Client("torch.utils.tensorboard.writer", "SummaryWriter.add_scalars", _scalars),
    _Client("tensorboardX.writer", "SummaryWriter.add_scalar", _named("tag", "scalar_value")),
    _Client("tensorboardX.writer", "SummaryWriter.add_scalars", _scalars),
    _Client("transformers.trainer_callback", "CallbackHandler.on_log", _argument("logs")),
    _Client(f"lightning.pytorch.{_LIGHTNING}", "_LoggerConnector.log_metrics", _lightning),
    _Client(f"pytorch_lightning.{_LIGHTNING}", "_LoggerConnector.log_metrics", _lightning),
    _Client("accelerate.accelerator", "Accelerator.log", _accelerate),
    _Client("mlflow", "log_metric", _named("key", "value")),
    _Client("mlflow", "log_metrics", _argument("metrics")),
    _Client("mlflow.tracking.client", "MlflowClient.log_metric", _named("key", "value")),
    _Client("mlflow.tracking.client", "MlflowClient.log_batch", _batch),
    _Client("trackio", "log", _argument("metrics")),
)
_WANDB_INIT = "wandb.sdk.wandb_init"


def mirror() -> None:
    """Mirror what the script gives to each client that it has imported or imports later."""
    for module in dict.fromkeys(client.module for client in _CLIENTS):
        after_import(module, functools.partial(_wrap_all, module))
    after_import(_WANDB_INIT, _wrap_disabled)


def _wrap_all(module: str) -> None:
    for client in _CLIENTS:
        if client.module == module:
            with contextlib.suppress(Exception):  # a client of an unknown version: the script trains without a mirror
                *holder, name = client.function.split(".")
                owner: Any = sys.modules[module]
                for part in holder:
                    owner = getattr(owner, part)
                setattr(owner, name, _mirrored(getattr(owner, name), client.metrics))


def _wrap_disabled() -> None:
    """Mirror a disabled run of older wandb too, which gets a ``log`` of its own that does nothing."""
    with contextlib.suppress(Exception):
        maker: Any = sys.modules[_WANDB_INIT]._WandbInit
        make = maker.make_disabled_run

        @functools.wraps(make)
        def make_disabled_run(*given: Any, **named: Any) -> Any:
            run = make(*given, **named)
            with contextlib.suppress(Exception):
                original, wandb = vars(run)["log"], sys.modules["wandb"]
                run.log = _mirrored(original, _argument("data"))
                if wandb.log is original:
                    wandb.log = run.log  # type: ignore[attr-defined]
            return run

        maker.make_disabled_run = make_disabled_run


_call = threading.local()
"""``depth`` is the number of mirrored calls that the thread is in."""


def _mirrored(original: Callable[..., Any], metrics: Metrics) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def mirrored(*given: Any, **named: Any) -> Any:
        depth = getattr(_call, "depth", 0)
        if not depth:
            with contextlib.suppress(Exception):
                OWN.add(metrics(signature.bind_partial(*given, **named).arguments))
        _call.depth = depth + 1
        try:
            return original(*given, **named)
        finally:
            _call.depth = depth

    return mirrored

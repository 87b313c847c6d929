"""Models of a script that are wrapped in DistributedDataParallel, and the comm hooks that measure them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.nn.parallel import DistributedDataParallel

from trainer.telemetry.comm_hook import BucketHook, CommHook, HookRelay
from trainer.telemetry.step_tracker import StepTracker


class FollowedModels:
    """Models whose gradient synchronisation is measured from their first forward pass on."""

    def __init__(self) -> None:
        self._models: WeakKeyDictionary[DistributedDataParallel, BucketHook | None] = WeakKeyDictionary()
        """Models that are followed, each with the comm hook that it was given."""
        self._newest: Callable[[], DistributedDataParallel | None] = lambda: None
        """Reference to the model that was followed last."""
        self._relays: WeakKeyDictionary[DistributedDataParallel, HookRelay] = WeakKeyDictionary()
        """Models with a comm hook of their own."""
        self._registering = False

    def register_comm_hook(
        self, register: Callable[..., None], model: DistributedDataParallel, state: object, hook: CommHook, *, on: bool
    ) -> None:
        """Register a comm hook of the script, as ``register`` would, with a measuring hook around it if ``on``."""
        measuring_hook = self._models.get(model)
        hooks: list[Any] | None = getattr(model, "_comm_hooks", None)
        if hooks is None or hooks or self._registering:
            register(model, state, hook)
        elif measuring_hook is not None and measuring_hook.fault is None:
            check: Any = model._check_comm_hook
            check(hook)
            hooks.append((hook, state))
            measuring_hook.average_by(hook, state)
        elif on:
            relay = HookRelay(hook)
            # With the name and the annotations of the script's hook, which DDP checks.
            register(model, state, functools.wraps(hook)(lambda state, bucket: relay(state, bucket)))
            hooks[-1] = (hook, state)
            self._relays[model] = relay
        else:
            register(model, state, hook)

    def follow(self, model: DistributedDataParallel, tracker: StepTracker) -> None:
        """Measure a model's synchronisation, if it is not measured yet."""
        if self._newest() is model or model in self._models:
            return
        relay = self._relays.get(model)
        hooks: list[Any] = model._comm_hooks
        # In these modes DDP does not reduce by a comm hook.
        special = model._use_python_reducer or model._delay_all_reduce_all_params
        own_hooks = len(hooks)
        self._registering = True
        try:
            self._newest = ref(model)
            self._models[model] = tracker.meter.follow(model, relay=relay, own_hook=bool(hooks) or special)
        finally:
            self._registering = False
            del hooks[own_hooks:]  # the measuring hook: the list is pickled with the model
        tracker.replicate(model if len(self._models) == 1 else None)

"""Running sums over a rank's steps: a mean over a window costs the same after a week."""

from __future__ import annotations

from operator import sub
from typing import NamedTuple

from trainer.contract.record import Step


class Totals(NamedTuple):
    """Sums over a rank's step events; the difference of two is a window."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    step_ms: float = 0.0
    """Over steps whose duration was measured."""
    timed_steps: int = 0
    """Steps that ``step_ms`` sums over."""
    timed_samples: int = 0
    """Samples of those steps."""
    phases_ms: float = 0.0
    """Durations of the steps whose phases were measured: denominator of the shares of the phases."""
    phased_steps: int = 0
    """Steps that ``phases_ms`` sums over."""
    data_ms: float = 0.0
    """Waiting for data and copying it to the device."""
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    """Without the exposed synchronisation."""
    optimizer_ms: float = 0.0
    other_ms: float = 0.0
    """The rest of the steps, outside of all other phases."""
    whole_ms: float = 0.0
    """Durations of the steps of which that was measured."""
    synced_ms: float = 0.0
    """Durations of the steps whose exposed synchronisation was measured."""
    synced_steps: int = 0
    exposed_ms: float = 0.0
    loss: float = 0.0
    """Sum over steps."""
    loss_steps: int = 0
    token_ms: float = 0.0
    """Durations of the steps whose tokens are known."""
    timed_tokens: int = 0
    """Tokens of those steps."""

    def plus(self, event: Step) -> Totals:
        """Return the sums with one more event; an absent value adds nothing.

        Unpacking all fields at once takes half as long as ``_replace``, which counts at 100,000 events a second.
        """
        (
            steps, samples, tokens, step_ms, timed_steps, timed_samples, phases_ms, phased_steps, data_ms, forward_ms,
            backward_ms, optimizer_ms, other_ms, whole_ms, synced_ms, synced_steps, exposed_ms, loss, loss_steps,
            token_ms, timed_tokens,
        ) = self  # fmt: skip
        n, duration_ms, waited_ms, event_tokens = event.steps, event.step_ms, event.sync_exposed_ms, event.tokens
        if duration_ms is not None:
            covered_ms = duration_ms * n
            step_ms += covered_ms
            timed_steps += n
            timed_samples += event.samples
            if event_tokens is not None:
                token_ms += covered_ms
                timed_tokens += event_tokens
            if event.forward_ms is not None:
                phases_ms += covered_ms
                phased_steps += n
                data_ms += ((event.data_ms or 0.0) + (event.h2d_ms or 0.0)) * n
                forward_ms += event.forward_ms * n
                backward_ms += (event.backward_ms or 0.0) * n
                optimizer_ms += (event.optimizer_ms or 0.0) * n
                if event.other_ms is not None:
                    other_ms += event.other_ms * n
                    whole_ms += covered_ms
            if waited_ms is not None:
                synced_ms += covered_ms
                synced_steps += n
                exposed_ms += waited_ms * n
        if event.loss is not None:
            loss += event.loss * n
            loss_steps += n
        return Totals._make((
            steps + n, samples + event.samples, tokens + (event_tokens or 0), step_ms, timed_steps, timed_samples,
            phases_ms, phased_steps, data_ms, forward_ms, backward_ms, optimizer_ms, other_ms, whole_ms, synced_ms,
            synced_steps, exposed_ms, loss, loss_steps, token_ms, timed_tokens,
        ))  # fmt: skip

    def since(self, earlier: Totals) -> Totals:
        """Return the sums over the events after ``earlier``."""
        return Totals._make(map(sub, self, earlier))

    @property
    def mean_loss(self) -> float | None:
        """Mean loss per step, nats."""
        return self.loss / self.loss_steps if self.loss_steps else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of stepping."""
        return 1000 * self.timed_samples / self.step_ms if self.step_ms > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of stepping; None where no step has counted them."""
        return 1000 * self.timed_tokens / self.token_ms if self.token_ms > 0 else None

    @property
    def mean_step_ms(self) -> float | None:
        """Mean duration of a step, ms."""
        return self.step_ms / self.timed_steps if self.timed_steps else None

    @property
    def mean_exposed_ms(self) -> float | None:
        """Mean wait for the gradient synchronisation per step, ms."""
        return self.exposed_ms / self.synced_steps if self.synced_steps else None

    @property
    def mean_data_ms(self) -> float | None:
        """Mean wait for data, and its copy to the device, per step, ms."""
        return self.data_ms / self.phased_steps if self.phased_steps else None

    @property
    def mean_forward_ms(self) -> float | None:
        """Mean duration of the forward pass per step, ms."""
        return self.forward_ms / self.phased_steps if self.phased_steps else None

    @property
    def mean_backward_ms(self) -> float | None:
        """Mean duration of the backward pass per step, without the wait for the synchronisation, ms."""
        return self.backward_ms / self.phased_steps if self.phased_steps else None

    @property
    def mean_optimizer_ms(self) -> float | None:
        """Mean duration of clipping and the optimizer's step, ms."""
        return self.optimizer_ms / self.phased_steps if self.phased_steps else None

    @property
    def mean_other_ms(self) -> float | None:
        """Mean rest of a step, outside of all measured phases, ms."""
        share = self.other_share
        return None if share is None else share * self.phases_ms / self.phased_steps

    @property
    def data_share(self) -> float | None:
        """Share of step time spent waiting for data and copying it, 0 to 1."""
        return self.data_ms / self.phases_ms if self.phases_ms > 0 else None

    @property
    def compute_share(self) -> float | None:
        """Share of step time in forward and backward, 0 to 1."""
        return (self.forward_ms + self.backward_ms) / self.phases_ms if self.phases_ms > 0 else None

    @property
    def optimizer_share(self) -> float | None:
        """Share of step time in clipping and the optimizer, 0 to 1."""
        return self.optimizer_ms / self.phases_ms if self.phases_ms > 0 else None

    @property
    def other_share(self) -> float | None:
        """Share of step time outside of all measured phases, 0 to 1."""
        return self.other_ms / self.whole_ms if self.whole_ms > 0 else None

    @property
    def sync_share(self) -> float | None:
        """Share of step time waiting for the gradient synchronisation, 0 to 1."""
        return self.exposed_ms / self.synced_ms if self.synced_ms > 0 else None


ZERO_TOTALS = Totals()

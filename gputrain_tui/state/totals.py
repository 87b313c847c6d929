"""Running sums over a rank's steps: a mean over a window costs the same after a week."""

from __future__ import annotations

from operator import sub
from typing import Any, Literal, NamedTuple

from trainer.contract.record import Step, samples_of_each

Phase = Literal["data", "forward", "backward", "sync", "optimizer", "other"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "sync", "optimizer", "other")
"""Phases of a step in order; ``other`` is the rest of it, outside of all others."""
MEASURED_SHARE = 0.99
"""Share of a step that its phases must account for: clocks are read between phases, too."""


class Totals(NamedTuple):
    """Sums over a rank's step events; the difference of two is a window.

    Phases and their shares are over the steps of which every phase was measured, so that shares add up to 1. In the
    first steps the gradient synchronisation is not; a rank that never measures one does not synchronise.
    """

    steps: int = 0
    samples: int = 0
    """Of the steps whose samples are known, as ``tokens``."""
    tokens: int = 0
    step_ms: float = 0.0
    """Over steps whose duration was measured."""
    timed_steps: int = 0
    """Steps that ``step_ms`` sums over."""
    whole_ms: float = 0.0
    """Sum of all phases of the steps of which every phase was measured: denominator of all shares."""
    whole_steps: int = 0
    """Those steps."""
    data_ms: float = 0.0
    """Waiting for data and copying it to the device."""
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    """Without the exposed synchronisation."""
    sync_ms: float = 0.0
    """The exposed synchronisation, over the same steps as the other phases."""
    optimizer_ms: float = 0.0
    other_ms: float = 0.0
    """The rest of the steps, outside of all other phases."""
    exposed_ms: float = 0.0
    """The exposed synchronisation, over all steps in which it was measured."""
    synced_steps: int = 0
    """Those steps."""
    loss: float = 0.0
    """Sum of the losses of all steps that have one."""
    loss_steps: int = 0
    """Those steps."""
    sample_loss: float = 0.0
    """Sum of the losses of all samples, over the steps whose loss and samples are known."""
    loss_samples: int = 0
    """Those samples."""
    sample_ms: float = 0.0
    """Durations of the steps whose samples are known."""
    timed_samples: int = 0
    """Samples of those steps."""
    token_ms: float = 0.0
    """Durations of the steps whose tokens are known."""
    timed_tokens: int = 0
    """Tokens of those steps."""
    compile_ms: float = 0.0
    """Of ``torch.compile``, which is in no duration of a step."""
    counted_steps: int = 0
    """Steps whose samples are known."""

    def plus(self, event: Step) -> Totals:
        """Return the sums with one more event; an absent value adds nothing.

        Unpacking all fields at once takes half as long as ``_replace``, which counts at 100,000 events a second.
        """
        (
            steps, samples, tokens, step_ms, timed_steps, whole_ms, whole_steps, data_ms, forward_ms, backward_ms,
            sync_ms, optimizer_ms, other_ms, exposed_ms, synced_steps, loss, loss_steps, sample_loss, loss_samples,
            sample_ms, timed_samples, token_ms, timed_tokens, compile_ms, counted_steps,
        ) = self  # fmt: skip
        n, duration_ms, mean_wait_ms = event.steps, event.step_ms, event.sync_exposed_ms
        event_samples, event_tokens, each = event.samples, event.tokens, samples_of_each(event)
        counted = 0 if event_samples is None else n if each is None else n - each.count(None)
        waited_ms = 0.0
        if mean_wait_ms is not None:
            waits = event.sync_exposed_ms_each
            synced = n if waits is None else len(waits) - waits.count(None)
            waited_ms = mean_wait_ms * synced
            if not synced_steps:  # what came before lacks the synchronisation
                whole_ms = data_ms = forward_ms = backward_ms = optimizer_ms = other_ms = 0.0
                whole_steps = 0
            exposed_ms += waited_ms
            synced_steps += synced
        if duration_ms is not None:
            covered_ms = duration_ms * n
            step_ms += covered_ms
            timed_steps += n
            if event_samples is not None:
                sample_ms += covered_ms * counted / n
                timed_samples += event_samples
            if event_tokens is not None:
                token_ms += covered_ms
                timed_tokens += event_tokens
            if event.forward_ms is not None and (mean_wait_ms is not None or not synced_steps):
                data = ((event.data_ms or 0.0) + (event.h2d_ms or 0.0)) * n
                forward, backward = event.forward_ms * n, (event.backward_ms or 0.0) * n
                optimizer = (event.optimizer_ms or 0.0) * n
                named_ms = data + forward + backward + optimizer + waited_ms
                other = (event.other_ms or 0.0) * n
                if named_ms + other >= MEASURED_SHARE * covered_ms:
                    whole_ms += named_ms + other
                    whole_steps += n
                    data_ms += data
                    forward_ms += forward
                    backward_ms += backward
                    sync_ms += waited_ms
                    optimizer_ms += optimizer
                    other_ms += other
        if event.loss is not None:
            loss += event.loss * n
            loss_steps += n
            if event_samples is not None:
                losses = event.losses
                if losses is not None and each is not None and len(losses) == len(each):
                    known = [(one, count) for one, count in zip(losses, each, strict=True) if one is not None and count]
                    sample_loss += sum([one * count for one, count in known])
                    loss_samples += sum([count for _, count in known])
                else:
                    sample_loss += event.loss * event_samples
                    loss_samples += event_samples
        return Totals._make((
            steps + n, samples + (event_samples or 0), tokens + (event_tokens or 0), step_ms, timed_steps, whole_ms,
            whole_steps, data_ms, forward_ms, backward_ms, sync_ms, optimizer_ms, other_ms, exposed_ms, synced_steps,
            loss, loss_steps, sample_loss, loss_samples, sample_ms, timed_samples, token_ms, timed_tokens,
            compile_ms + (event.compile_ms or 0.0), counted_steps + counted,
        ))  # fmt: skip

    def since(self, earlier: Totals) -> Totals:
        """Return the sums over the events after ``earlier``."""
        if self.synced_steps and not earlier.synced_steps:  # the phases before the first synchronisation were dropped
            earlier = earlier._replace(**NO_PHASES)
        return Totals._make(map(sub, self, earlier))

    @property
    def counts_samples(self) -> bool:
        """Whether the samples of most steps are known: those of the others are neither a count nor a rate of all."""
        return self.samples > 0 and 2 * self.counted_steps >= self.steps

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of stepping; None where they are not known."""
        is_known = self.counts_samples and self.timed_samples and self.sample_ms > 0
        return 1000 * self.timed_samples / self.sample_ms if is_known else None

    @property
    def steps_per_s(self) -> float | None:
        return 1000 * self.timed_steps / self.step_ms if self.step_ms > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of stepping; None where no step has counted them, or few their samples."""
        is_known = self.token_ms > 0 and (self.counts_samples or not self.samples)
        return 1000 * self.timed_tokens / self.token_ms if is_known else None

    @property
    def mean_step_ms(self) -> float | None:
        return self.step_ms / self.timed_steps if self.timed_steps else None

    @property
    def mean_exposed_ms(self) -> float | None:
        return self.exposed_ms / self.synced_steps if self.synced_steps else None

    def mean_phase_ms(self, phase: Phase) -> float | None:
        return self.phase_ms(phase) / self.whole_steps if self.whole_steps and self._is_measured(phase) else None

    def phase_ms(self, phase: Phase) -> float:
        """Return the sum of a phase over the steps that were measured whole, ms."""
        total: float = getattr(self, f"{phase}_ms")
        return total

    def share(self, phase: Phase) -> float | None:
        """Return a phase's share of step time, 0 to 1; the shares of all phases add up to 1."""
        return self.phase_ms(phase) / self.whole_ms if self.whole_ms > 0 and self._is_measured(phase) else None

    def _is_measured(self, phase: Phase) -> bool:
        """Whether a phase was measured: without a DataLoader the wait for data is within others, and takes no time."""
        return bool(self.synced_steps) if phase == "sync" else phase == "other" or self.phase_ms(phase) > 0.0

    @property
    def compute_share(self) -> float | None:
        return (self.forward_ms + self.backward_ms) / self.whole_ms if self.whole_ms > 0 else None


ZERO_TOTALS = Totals()
NO_PHASES: dict[str, Any] = {"whole_ms": 0.0, "whole_steps": 0, **{f"{phase}_ms": 0.0 for phase in PHASES}}

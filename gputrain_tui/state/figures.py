"""Figures of a whole run, from the states of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean as mean

from gputrain_tui.state.rank_state import RankView
from gputrain_tui.state.step_losses import run_loss
from gputrain_tui.state.totals import Phase, Totals
from trainer.contract.record import GroupSync, NoiseScale, Step

DDP = "DDP"
"""Group of DDP's buckets, whose process group the record does not name."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates of all ranks together; None: not measured."""

    stepping_s: float = 0.0
    """Mean over the ranks of the duration of the steps that the rates are over, seconds."""
    steps_per_s: float | None = None
    """Of one rank, as all step together."""
    samples_per_s: float | None = None
    """Over the ranks that count samples."""
    tokens_per_s: float | None = None
    """None where a rank counts none."""
    mfu: float | None = None
    """Model FLOPs utilization: share of the GPUs' peak that the model's operations take, 0 to 1. None where the
    operations of a rank or the peak of its GPU are not known."""

    @property
    def rate(self) -> tuple[float | None, str]:
        """The rate and its unit: samples a second, or steps where no rank counts samples."""
        return (self.steps_per_s, "steps/s") if self.samples_per_s is None else (self.samples_per_s, "samples/s")


@dataclass(frozen=True, kw_only=True)
class RunFigures(Throughput):
    """Figures of a whole run, as every view shows them; None: not measured.

    Rates, durations and shares are over the ranks' last steps while the run goes on, and over all steps after its end;
    a rate is per second of stepping, without validations, checkpoints and a hang after the last step.
    """

    step: int = 0
    epoch: int = 0
    loss: float | None = None
    """Mean of the ranks' losses at ``step``, nats; ranks count by their samples."""
    step_ms: float | None = None
    sync_ms: float | None = None
    """Mean wait for the gradient synchronisation per step, over the ranks."""
    compute_share: float | None = None
    """Share of step time in which the ranks computed: forward and backward, 0 to 1."""
    sync_share: float | None = None
    """Share of step time in which they waited for the gradient synchronisation, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """Collectives in one process group, of a rank or as means over its ranks: per step of their last events."""

    group: str
    """Its name; ``DDP`` for the buckets of DDP, whose group the record does not name."""
    ranks: tuple[int, ...] = ()
    """Empty where they are not known."""
    calls: float
    """Calls in a step."""
    operations: Mapping[str, float] = field(default_factory=dict)
    """Calls by operation, the most frequent first."""
    operation_exposed_ms: Mapping[str, float] = field(default_factory=dict)
    """``exposed_ms`` by operation, where there are several."""
    bytes: float
    """Bytes in a step: of the inputs, of an ``all_gather`` of its output."""
    exposed_ms: float | None = None
    """Time for which a rank was blocked; None: not measured."""
    share: float | None = None
    """That time as a share of the step, 0 to 1."""


def members_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group, of a larger one only their number; empty where they are not known."""
    most_named = 4
    return ", ".join(map(str, ranks)) if len(ranks) <= most_named else f"{len(ranks):,} ranks"


def operations_text(operations: Mapping[str, float], exposed_ms: Mapping[str, float]) -> str:
    """Return calls by operation, with their waits where these are known, such as ``all_gather 48 (5.12 ms)``."""
    return ", ".join(
        f"{name} {calls:.4g}" + (f" ({exposed_ms[name]:.2f} ms)" if name in exposed_ms else "")
        for name, calls in operations.items()
    )


def group_figures(view: RankView) -> list[GroupFigures]:
    """Return the figures of each group of a rank, those in which it waits longest first.

    Over the same steps their exposed times sum up to the rank's wait for the synchronisation.
    """
    events = list(view.groups.recent)
    steps = sum(event.steps for event in events)
    step_ms = sum((event.step_ms or 0.0) * event.steps for event in events)
    of_group: dict[str, list[tuple[int, GroupSync]]] = {}
    for event in events:
        waits = [sync.exposed_ms or 0.0 for sync in event.groups or ()]
        ddp = _ddp_sync(event, sum(waits))
        for sync in (*(event.groups or ()), *ddp):
            of_group.setdefault(sync.group, []).append((event.steps, sync))
    figures = []
    for name, syncs in of_group.items():
        operations = _sums((count / steps, sync.operations) for count, sync in syncs)
        waited = [count * sync.exposed_ms for count, sync in syncs if sync.exposed_ms is not None]
        figures.append(
            GroupFigures(
                group=name,
                ranks=view.groups.group(name).ranks,
                calls=sum(count * sync.calls for count, sync in syncs) / steps,
                operations=dict(sorted(operations.items(), key=lambda item: -item[1])),
                operation_exposed_ms=_sums((count / steps, sync.operation_exposed_ms) for count, sync in syncs),
                bytes=sum(count * sync.bytes for count, sync in syncs) / steps,
                exposed_ms=sum(waited) / steps if waited else None,
                share=sum(waited) / step_ms if waited and step_ms > 0 else None,
            )
        )
    return sorted(figures, key=lambda each: -(each.exposed_ms or 0.0))


def _sums(parts: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the sum of each entry, times its weight."""
    sums: dict[str, float] = {}
    for weight, values in parts:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value * weight
    return sums


def run_groups(views: Iterable[RankView]) -> list[GroupFigures]:
    """Return the figures of the process groups of all ranks: means over the ranks of each, the longest wait first."""
    of_group: dict[tuple[str, tuple[int, ...]], list[GroupFigures]] = {}
    for view in views:
        for each in group_figures(view):
            of_group.setdefault((each.group, each.ranks), []).append(each)
    figures = [
        GroupFigures(
            group=name,
            ranks=ranks,
            calls=mean(each.calls for each in of_ranks),
            operations=_sums((1 / len(of_ranks), each.operations) for each in of_ranks),
            operation_exposed_ms=_sums((1 / len(of_ranks), each.operation_exposed_ms) for each in of_ranks),
            bytes=mean(each.bytes for each in of_ranks),
            exposed_ms=_mean_of([each.exposed_ms for each in of_ranks]),
            share=_mean_of([each.share for each in of_ranks]),
        )
        for (name, ranks), of_ranks in of_group.items()
    ]
    return sorted(figures, key=lambda each: -(each.exposed_ms or 0.0))


def _mean_of(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return mean(measured) if measured else None


def _ddp_sync(event: Step, waited_ms: float) -> list[GroupSync]:
    """Return what DDP's buckets are in an event, whose collectives of other groups waited so long."""
    if event.sync_buckets is None or event.sync_exposed_ms is None:
        return []
    exposed_ms = max(event.sync_exposed_ms - waited_ms, 0.0)
    calls, size = float(event.sync_buckets), float(event.sync_bytes or 0)
    return [GroupSync(group=DDP, calls=calls, bytes=size, exposed_ms=exposed_ms, operations={"all_reduce": calls})]


def run_figures(views: Iterable[RankView]) -> RunFigures:
    """Return the figures; the step is the newest that every reporting rank has done."""
    reporting = [(view, view.last, view.sums) for view in views if view.last is not None]
    step = min((last.step for _, last, _ in reporting), default=0)
    epoch = min((last.epoch for _, last, _ in reporting), default=0)
    all_sums = [sums for _, _, sums in reporting]
    synced_steps = sum(sums.synced_steps for sums in all_sums)
    return RunFigures(
        **vars(_throughput([(view, sums) for view, _, sums in reporting])),
        step=step,
        epoch=epoch,
        loss=run_loss(view.loss_and_samples_at(step) for view, _, _ in reporting),
        step_ms=mean_step_ms(all_sums),
        sync_ms=sum(sums.exposed_ms for sums in all_sums) / synced_steps if synced_steps else None,
        compute_share=mean_share(all_sums, "forward", "backward"),
        sync_share=mean_share(all_sums, "sync"),
    )


def samples_per_s(all_sums: Iterable[Totals]) -> float | None:
    """Return the samples of all ranks per second of stepping, from the sums of each; None where none is known."""
    rates = [rate for sums in all_sums if (rate := sums.samples_per_s) is not None]
    return sum(rates) if rates else None


def steps_per_s(all_sums: Iterable[Totals]) -> float | None:
    """Return the steps of a rank per second of stepping, the mean over the ranks; None where none was timed."""
    rates = [rate for sums in all_sums if (rate := sums.steps_per_s) is not None]
    return sum(rates) / len(rates) if rates else None


def mean_step_ms(all_sums: Sequence[Totals]) -> float | None:
    """Return the mean duration of a step over all ranks, ms; None where none was timed."""
    timed_steps = sum(sums.timed_steps for sums in all_sums)
    return sum(sums.step_ms for sums in all_sums) / timed_steps if timed_steps else None


def mean_phase_ms(all_sums: Iterable[Totals], phase: Phase) -> float | None:
    """Return the mean of a phase over all ranks, ms; None where no rank has measured it."""
    measured = [sums for sums in all_sums if sums.share(phase) is not None]
    steps = sum(sums.whole_steps for sums in measured)
    return sum(sums.phase_ms(phase) for sums in measured) / steps if steps else None


def mean_share(all_sums: Iterable[Totals], *phases: Phase) -> float | None:
    """Return the share of phases in the step time of all ranks, 0 to 1; None where no rank has measured them."""
    measured = [sums for sums in all_sums if sums.share(phases[0]) is not None]
    total_ms = sum(sums.whole_ms for sums in measured)
    return sum(sums.phase_ms(phase) for sums in measured for phase in phases) / total_ms if total_ms > 0 else None


def run_throughput(views: Iterable[RankView]) -> Throughput:
    """Return the rates over the whole run."""
    return _throughput([(view, view.totals) for view in views])


def _throughput(ranks: Sequence[tuple[RankView, Totals]]) -> Throughput:
    """Return the rates of ranks, each with its sums; the utilization only since the last start: GPUs may change."""
    stepping = [(view, sums) for view, sums in ranks if sums.step_ms > 0]
    counted = [(sums.samples_per_s, sums.tokens_per_s) for _, sums in stepping]
    tokens = [each for samples, each in counted if samples is not None or each is not None]
    used = [(view, sums.since(view.totals_at_start) if sums is view.totals else sums) for view, sums in stepping]
    return Throughput(
        stepping_s=sum(sums.step_ms for _, sums in stepping) / len(stepping) / 1e3 if stepping else 0.0,
        steps_per_s=steps_per_s(sums for _, sums in stepping),
        samples_per_s=samples_per_s(sums for _, sums in stepping),
        tokens_per_s=sum(rate or 0.0 for rate in tokens) if tokens and None not in tokens else None,
        mfu=_utilization([(view, sums.samples_per_s) for view, sums in used]),
    )


def _utilization(ranks: Sequence[tuple[RankView, float | None]]) -> float | None:
    """Return the used share of the peak of all GPUs; a GPU that several ranks share counts once.

    Source: Chowdhery et al., PaLM, appendix B.
    """
    used, peaks = 0.0, dict[str, float]()
    for view, samples_per_s in ranks:
        flops = view.flops
        if flops is None or flops.varies or not flops.peak_flops_per_s or samples_per_s is None:
            return None
        used += samples_per_s * flops.flops_per_sample
        uuid = (view.device or "").partition(" ")[2]
        peaks[uuid if uuid.startswith("GPU-") else f"rank {view.rank}"] = flops.peak_flops_per_s
    return used / sum(peaks.values()) if peaks else None


def noise_text(scale: NoiseScale | None) -> str:
    """Return the gradient noise scale and its meaning for the batch size; empty where it is not known.

    At a batch of the noise scale a training takes twice the fewest steps and twice the fewest samples (McCandlish et
    al. 2018, section 2.2). The estimate may be off by a few times, so within four times of the batch it tells no more.
    """
    if scale is None or scale.samples is None:
        return ""
    samples = float(f"{scale.samples:.2g}")  # more digits would be noise
    if scale.batch / 4 < samples < scale.batch * 4:
        return f"about {samples:,.0f} samples, near the batch of {scale.batch:,}"
    advice = "still helps" if scale.batch < samples else "saves few steps"
    return f"about {samples:,.0f} samples: a larger batch than {scale.batch:,} {advice}"

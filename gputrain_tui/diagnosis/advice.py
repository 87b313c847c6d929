"""Texts for causes and findings: names in sentences, and advice, the likeliest remedy first."""

from __future__ import annotations

CAUSE_NAMES = {
    "data": "its data loading",
    "h2d": "copying batches to its device",
    "forward": "its forward pass",
    "backward": "its backward pass",
    "optimizer": "its optimizer step",
    "garbage_collection": "Python's garbage collection",
    "cpu_steal": "processor time that other guests of its host take",
    "core_wait": "waiting for a free core",
    "gpu_clock": "its GPU's lower clock",
    "gpu_thermal": "its GPU, which slows down because of heat",
}
"""A straggler's cause as words of a sentence."""
THROTTLE_NAMES = {
    "application_clocks": "a clock that was set",
    "power_cap": "its power cap",
    "hardware_slowdown": "a slowdown of the hardware (heat or power)",
    "sync_boost": "a clock shared with other GPUs",
    "power_brake": "the machine's power brake",
    "display_clocks": "the display",
}
"""Throttle reasons of the samples as words of a sentence."""

ADVICE = {
    "data": "look at what this rank reads: its disk, its share of the data, longer samples; more reading workers "
    "(num_workers) hide reading behind computing",
    "h2d": "check the PCIe link of its GPU (nvidia-smi -q: width and generation), that memory is pinned, and what "
    "else uses the bus",
    "forward": "compare its device, its input sizes and what else runs there with the other ranks; code that only "
    "this rank runs is a usual reason",
    "backward": "compare its device, its input sizes and what else runs there with the other ranks; hooks that only "
    "this rank runs are a usual reason",
    "optimizer": "look for work that only this rank does after a step: logging, saving, clipping",
    "garbage_collection": "collect at chosen moments on all ranks together (gc.disable, gc.collect every some hundred "
    "steps) and call gc.freeze before training",
    "cpu_steal": "the host is overbooked: move this node to another host, or ask for dedicated cores",
    "core_wait": "give the ranks cores of their own: fewer threads per rank, fewer reading workers, no other jobs here",
    "gpu_clock": "read its clocks and what holds them down (nvidia-smi -q -d CLOCK,PERFORMANCE,POWER); check the power "
    "limit and fixed clocks, or take another GPU; one of a slower kind stays behind as long as ranks get equal batches",
    "gpu_thermal": "check its fans, air flow and the slots beside it; until then lower its power limit "
    "(nvidia-smi -pl) or leave this GPU out",
    "unattributed": "compare this rank's parts with the others' in the evidence; several parts longer at once point "
    "to the device itself or to another job on it",
    "input_bound": "more reading workers (num_workers), cheaper preprocessing, or the data on a faster disk; the "
    "ranks wait for data before every step",
    "communication_bound": "synchronise less often (update_freq), reduce larger buckets (bucket_cap_mb), send bf16 "
    "gradients (ddp_comm_hook = bf16), and check that the fastest network interface is used",
    "imbalance": "batches of unequal length are the usual reason: group samples of equal length (sort them, "
    "max_tokens) or balance the tokens over the ranks; else look for work that one rank does now and then: "
    "augmentation, reading, logging, garbage collection",
    "imbalance_tokens": "give all ranks equally many tokens in each step: group samples of equal length (sort them, "
    "max_tokens), or balance the tokens over the ranks",
    "imbalance_samples": "give all ranks equally many samples in each step (a DistributedSampler with drop_last), or "
    "as many as their speed allows if they differ",
    "memory_creep": "something keeps growing: losses kept with their graphs, lists of outputs, caches without a bound",
    "non_finite": "stop: nothing more is learnt. Go on from a checkpoint that is older than step {step}, with a lower "
    "learning rate or gradients clipped from there on (clip_norm; a NaN that is clipped stays NaN), in fp16 with bf16 "
    "instead. If it comes again at the same step, look at that batch; torch.autograd.set_detect_anomaly(True) names "
    "the operation",
    "desync": "stop and resume from the last checkpoint; look for a step, a learning rate or a random choice that "
    "depends on the rank, and for parameters that changed outside the optimizer",
    "loss_spike": "lower the learning rate or clip gradients (clip_norm); look at the data of these steps",
    "stalled_behind": "in the console (gputrain attach), K on the rank's page prints where its Python code hangs; a "
    "rank that leaves the common path waits for nobody and everybody waits for it",
    "stalled_left": "give all ranks equally many batches (drop_last, a DistributedSampler), or leave the loop on all "
    "of them together",
    "stalled_together": "in the console (gputrain attach), K on a rank's page prints where its Python code hangs; an "
    "unequal number of synchronisations and a dead network are the usual reasons",
}

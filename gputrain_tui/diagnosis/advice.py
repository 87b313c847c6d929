"""Texts for causes and findings: names in sentences, and advice, the likeliest remedy first."""

from __future__ import annotations

CAUSE_NAMES = {
    "data": "its data loading",
    "h2d": "copying batches to its device",
    "forward": "its forward pass",
    "backward": "its backward pass",
    "optimizer": "its optimizer step",
    "other": "the script's own code outside of forward, backward and optimizer",
    "garbage_collection": "Python's garbage collection",
    "cpu_steal": "CPU time that other virtual machines take on its host",
    "core_wait": "waiting for a free core",
    "cpu_quota": "the cpu quota of its cgroup",
    "gpu_clock": "its GPU's lower clock",
    "gpu_thermal": "thermal throttling of its GPU",
}
"""A straggler's cause as words of a sentence."""
THROTTLE_NAMES = {
    "application_clocks": "a fixed clock setting",
    "power_cap": "its power cap",
    "hardware_slowdown": "a slowdown of the hardware (heat or power)",
    "sync_boost": "a clock synchronised with other GPUs",
    "power_brake": "the machine's power brake",
    "display_clocks": "a display clock setting",
}
"""Throttle reasons of the samples as words of a sentence."""

WHERE = "while it runs, `gputrain stacks`, or K on a rank's page in the console, shows where"
DEVICE = "compare its device, its input sizes and other processes there with those of the other ranks; "
FORWARD = DEVICE + "code that only this rank runs is a common cause. If its time grows with its samples, "
BACKWARD = DEVICE + "hooks that only this rank runs are a common cause. If its time grows with its samples, "
SEVERAL = (
    "compare this rank's phases with the others' in the evidence; if several are longer at once, suspect the device "
    "itself or another job on it"
)
SMALLER_SHARE = (
    "it gets a smaller share of the batch; one that is too slow even with a single sample needs a larger "
    "global_batch_size, or stays out (gputrain help shares)"
)
ADVICE = {
    "data": "check the rank's disk, its share of the data and its sample lengths; more loader workers (num_workers) "
    "hide reading behind computing",
    "h2d": "check the PCIe link of its GPU (nvidia-smi -q: width and generation), that memory is pinned, and other "
    "traffic on the bus",
    "forward": FORWARD + "batch_size = balanced makes up for it",
    "backward": BACKWARD + "batch_size = balanced makes up for it",
    "optimizer": "look for work that only this rank does after a step: logging, saving, clipping",
    "other": "look for work that only this rank does there: reading data without a DataLoader, logging, metrics, "
    f"saving; {WHERE}",
    "garbage_collection": "collect on all ranks at the same step (gc.disable, then gc.collect every few hundred "
    "steps) and call gc.freeze before training",
    "cpu_steal": "the host is overcommitted: move this node to another host, or ask for dedicated cores",
    "core_wait": "give each rank enough cores: no other jobs here, and no more threads and loader workers than cores",
    "cpu_quota": "raise that quota (cpu.max or cpu.cfs_quota_us of the cgroup; docker --cpus, Kubernetes limits.cpu, "
    "systemd CPUQuota)",
    "cpuset": "give it more cores (cpuset.cpus of the cgroup; docker --cpuset-cpus, Slurm --cpus-per-task)",
    "cpu_affinity": "give it more cores (taskset, numactl, srun --cpu-bind)",
    "gpu_clock": "check its clocks and throttle reasons (nvidia-smi -q -d CLOCK,PERFORMANCE,POWER), its power limit "
    "and fixed clocks, or use another GPU; a slower model stays behind as long as ranks get equal batches "
    "(batch_size = balanced)",
    "gpu_thermal": "check its fans, air flow and the slots beside it; until then lower its power limit "
    "(nvidia-smi -pl) or leave this GPU out",
    "unattributed": SEVERAL + ". If forward and backward pass grow with its samples, batch_size = balanced makes up "
    "for them",
    "input_bound": "use more loader workers (num_workers), cheaper preprocessing or a faster disk; the "
    "ranks wait for data before every step",
    "outside_torch": f"{WHERE}; metrics, logging, saving and .item() in every step are common causes: do them every "
    "few steps",
    "outside_torch_data": "the data of this script comes from no DataLoader, so reading it counts there: a DataLoader "
    "with num_workers reads ahead; otherwise metrics, logging, saving and .item() in every step are common causes; "
    f"{WHERE}",
    "communication_bound": "synchronise less often (update_freq), use larger buckets (bucket_cap_mb), send bf16 "
    "gradients (ddp_comm_hook = bf16), and check that the fastest network interface is used",
    "communication_bound_groups": "synchronise less often (gradient accumulation), send bf16 (MixedPrecisionPolicy), "
    "shard in larger parts (fewer fully_shard calls) so that they overlap with computing, keep groups that exchange "
    "most, as of tensor parallelism, within a host, and check that the fastest network interface is used",
    "slow_evaluation": "look for work that only this rank does there: more samples than the others', metrics, saving, "
    "printing; `gputrain stacks` shows where while it runs",
    "periodic_delay": "look for what only this rank does every so many steps: saving, logging, metrics, an evaluation; "
    "do it less often, in a thread, or on all ranks at once; `gputrain stacks` shows where while it runs",
    "imbalance": "batches of unequal length are the usual cause: group samples of equal length (sort them, "
    "max_tokens) or balance the tokens over the ranks; otherwise look for occasional work of single ranks: "
    "augmentation, reading, logging, garbage collection",
    "imbalance_tokens": "give all ranks the same number of tokens in each step: group samples of equal length "
    "(sort them, max_tokens), or balance the tokens over the ranks",
    "imbalance_samples": "give all ranks the same number of samples in each step (a DistributedSampler with "
    "drop_last) or, if their speeds differ, in proportion to speed (batch_size = balanced)",
    "uneven_speeds": 'set batch_size = "balanced" and global_batch_size to the samples of all ranks in a step: each '
    "rank gets the share that it can carry, and what is learned stays the same (gputrain help shares). If a device "
    "should be as fast as the others, look for another job on it, its clock and its cooling first",
    "forward_script": FORWARD + "the shares of watched.shares() make up for it (gputrain help scripts)",
    "backward_script": BACKWARD + "the shares of watched.shares() make up for it (gputrain help scripts)",
    "unattributed_script": SEVERAL + ". If forward and backward pass grow with its samples, the shares of "
    "watched.shares() make up for them (gputrain help scripts)",
    "forward_balanced": FORWARD + SMALLER_SHARE,
    "backward_balanced": BACKWARD + SMALLER_SHARE,
    "unattributed_balanced": SEVERAL,
    "uneven_speeds_script": "let each rank take the share of watched.shares() (gputrain help scripts). If a device "
    "should be as fast as the others, look for another job on it, its clock and its cooling first",
    "memory_creep": "something keeps growing: losses kept with their graphs, lists of outputs, unbounded caches",
    "non_finite": "a learning rate that is too high is the usual cause. Stop the run, as it learns nothing more, and "
    "resume from a checkpoint from before step {step} with a lower one, with clipped gradients (clipping does not "
    "remove a NaN), or with bf16 instead of fp16. If it recurs at the same step, look at that batch; "
    "torch.autograd.set_detect_anomaly(True) names the operation",
    "collectives": "all ranks of a group must call the same collectives in the same order, with tensors of equal size: "
    "look for a branch, a loop or a batch that depends on the rank; `gputrain stacks RUN` shows the lines",
    "desync": "stop and resume from the last checkpoint; look for a step, a learning rate or a random choice that "
    "depends on the rank, and for parameters that changed outside the optimizer",
    "loss_spike": "lower the learning rate or clip gradients (clip_norm); look at the data of these steps",
    "stalled_behind": "`gputrain stacks` prints where each rank is, and the worker processes of its DataLoader; if "
    "ranks are in different collectives, look for a branch that only some of them take",
    "stalled_held": "continue what holds them: a paused container, a frozen cgroup, a suspended virtual machine, or "
    "a stopped process group (`kill -CONT`)",
    "stalled_left": "give all ranks the same number of batches (drop_last, a DistributedSampler), or leave the loop "
    "on all of them at the same step",
    "stalled_left_at_once": "its script ended with exit code 0 before it met the others: look for a branch on "
    "the rank that leaves it, and have all ranks call init_process_group()",
    "stalled_ended": "a thread that is to end with the script is a daemon thread (daemon=True); another one must be "
    "told to end",
    "stalled_together": "`gputrain stacks` prints where each rank is; an "
    "unequal number of collectives and a network failure are the usual causes",
}

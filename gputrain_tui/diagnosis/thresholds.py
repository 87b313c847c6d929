"""Thresholds of the diagnosis, each with unit, meaning, reason, and the test that notices when it is moved."""

from __future__ import annotations

from typing import TypeVar

Number = TypeVar("Number", int, float)


def threshold(value: Number, unit: str, test: str) -> Number:
    """Return a threshold's value; a share, a ratio and a correlation have no unit.

    Args:
        value: the threshold.
        unit: its unit.
        test: a test of ``tests/unit/test_diagnosis*.py``, without ``test_``, that fails when it is halved or when it is
            doubled (a few only when it is a quarter or four times as large, or ten); ``test_thresholds.py`` checks that
            there is one.
    """
    return value


# ------------------------------------------------------------ every finding

CLEAR_SHARE = threshold(0.5, "share", "a_finding_stands_while_more_than_half_of_the_threshold_is_left")
"""Share of the threshold below which a finding is cleared, so that it does not flicker around its threshold."""
MIN_AGREEING_SHARE = threshold(0.75, "share", "a_delay_in_one_part_names_rank_and_part_within_twenty_steps")
"""Share of a window's steps in which a delay must be at least half of its median."""


# ------------------------------------------------------------ the rows of steps

HISTORY = threshold(128, "events", "a_core_slower_for_some_seconds_makes_no_straggler_and_one_that_stays_so_does")
"""Step events per rank that the run state must keep, and rows kept here: ten windows for the noise of earlier steps."""
WARM_UP_STEPS = threshold(5, "steps", "a_rank_that_is_slow_from_the_first_step_is_found")
"""First steps of a start that are skipped: caches and allocators fill, DDP rebuilds its buckets."""


# ------------------------------------------------------------ stragglers

WINDOW_ROWS = threshold(12, "rows", "a_cause_is_named_only_when_it_covers_four_fifths")
"""Rows over which medians are compared: a slow rank is in more than half of them after seven steps."""
SHORT_WINDOW_ROWS = threshold(6, "rows", "a_rank_far_slower_than_very_fast_steps_is_found_within_a_dozen_slow_ones")
"""Rows that suffice where each covers several steps and a rank is more than ``OVERWHELMING_SHARE`` late; of single
steps ``WINDOW_ROWS`` do."""
OVERWHELMING_SHARE = threshold(0.5, "share", "a_rank_far_slower_than_very_fast_steps_is_found_within_a_dozen_slow_ones")
"""Lateness as a share of a step from which the others wait longer than they work."""
MIN_STRAGGLER_ROWS = threshold(20, "rows", "a_rank_that_is_slow_from_the_first_step_is_found")
"""Rows before the first finding, to estimate the noise."""
STRAGGLER_SHARE = threshold(0.1, "share", "a_little_lateness_must_last_longer_than_much")
"""Lateness as a share of a step for a finding (TraceML's gates)."""
STRAGGLER_CRITICAL_SHARE = threshold(0.2, "share", "lateness_counts_by_its_share_of_the_step")
"""Lateness as a share of a step for a critical finding."""
ONE_WINDOW_SHARE = threshold(0.15, "share", "lateness_within_the_noise_is_no_finding")
"""Lateness as a share of a step from which one window is enough; below, ``SUSTAINED_WINDOWS`` windows must show it."""
SUSTAINED_WINDOWS = threshold(4, "windows", "a_little_lateness_must_last_longer_than_much")
"""Windows in a row that must show a small lateness: noise rarely goes the same way four times."""
UNEXPLAINED_WINDOWS = threshold(2, "windows", "a_rank_slower_in_every_phase_is_not_attributed_to_its_longest_phase")
"""Windows in a row that must show lateness without a cause. When all work of a CPU rank takes longer, its core is
slower: other processes or guests of the host cause that for a second or two now and then."""
UNEXPLAINED_S = threshold(5.0, "s", "a_core_slower_for_some_seconds_makes_no_straggler_and_one_that_stays_so_does")
"""Minimum duration of a lateness without a cause of a rank on a CPU, for however many steps: as above."""
NOISE_SIGMAS = threshold(6.0, "deviations", "lateness_counts_by_the_deviation_of_a_windows_median")
"""Threshold in standard errors of the window's median, estimated from successive differences."""
BLOCK_SIGMAS = threshold(4.0, "deviations", "a_small_lateness_counts_against_the_medians_of_earlier_windows")
"""Threshold in standard deviations of the medians of earlier windows, which include noise in bursts."""
MIN_NOISE_BLOCKS = threshold(4, "blocks", "a_part_that_stands_out_of_its_noise_is_found_where_other_parts_are_noisier")
"""Earlier windows needed to estimate that deviation."""
CHANCE = threshold(1e-6, "share", "the_steps_in_which_a_rank_is_late_are_too_many_for_chance")
"""Probability with which an even rank may be late in as many of the last rows. One that is late by varying amounts
exceeds no noise of a window, but is late in nearly every row."""
GROWN_RATIO = threshold(1.5, "ratio", "a_straggler_that_becomes_much_slower_is_raised_anew_with_its_new_lateness")
"""Lateness over that of the raised finding from which it is raised anew: its first rows may be the least slow."""
CORE_WAIT_ROWS = threshold(8 * WINDOW_ROWS, "rows", "a_rank_that_shares_its_core_is_found_to_wait_for_it")
"""Rows in which a rank must have waited for a core: bursts of other work on the machine are shorter."""
CORE_WAIT_AGREEING_SHARE = threshold(0.80, "share", "a_rank_that_shares_its_core_is_found_to_wait_for_it")
"""Share of these rows in which the wait must be at least half of the median."""


# ------------------------------------------------------------ the cause of a lateness

MIN_EXPLAINED_SHARE = threshold(0.80, "share", "a_cause_is_named_only_when_it_covers_four_fifths")
"""Share of the lateness that a cause must explain to be reported."""
MIN_PHASE_RATIO = threshold(4.0, "ratio", "a_cause_is_named_only_when_it_covers_four_fifths")
"""Ratio of the relative excess of a phase to that of the rest of the rank's work. Below it, all of the rank's work is
slower, as on a slower core or device, and the phase is only the longest."""
NEGLIGIBLE_SHARE = threshold(0.05, "share", "a_rank_slower_in_every_phase_is_not_attributed_to_its_longest_phase")
"""Share of the lateness up to which an excess of the remaining work is ignored, however short that work is."""


# ------------------------------------------------------------ waits for a broadcast

MIN_LEAD_SHARE = threshold(0.05, "share", "who_waits_in_its_forward_pass_for_another_rank_is_not_taken_for_slow")
"""Share of a step by which the leader must begin its forward pass later than the first rank."""
MAX_LEAD_DEVIATION_SHARE = threshold(0.20, "share", "two_ranks_that_are_slow_in_two_ways_are_both_named")
"""Maximum difference between a follower's extra forward time and its lead, as a share of the lead (medians)."""


# ------------------------------------------------------------ uneven work

IMBALANCE_BLOCK_ROWS = threshold(12, "rows", "uneven_work_is_found_with_its_cause_and_never_as_a_slow_network")
"""Rows of a block: a hiccup is in one block alone."""
IMBALANCE_BLOCKS = threshold(5, "blocks", "uneven_work_is_found_with_its_cause_and_never_as_a_slow_network")
"""Blocks, most of which must show imbalance: a hiccup or a straggler's begin is in one alone."""
IMBALANCE_SHARE = threshold(0.15, "share", "uneven_work_is_found_with_its_cause_and_never_as_a_slow_network")
"""Lost share of a step for a finding; balanced work that varies by half of its length from step to step loses a tenth
and more."""
IMBALANCE_CRITICAL_SHARE = threshold(0.3, "share", "the_cost_of_uneven_work_is_the_saving_by_even_work")
"""Lost share of a step for a critical finding."""
MIN_CORRELATION = threshold(0.7, "correlation", "uneven_batch_sizes_are_named_with_their_range")
"""Between a rank's work and the size of its batch, from which the size explains half of the difference."""
MAX_CORE_WAIT_SHARE = threshold(0.5, "share", "uneven_work_is_found_with_its_cause_and_never_as_a_slow_network")
"""Maximum wait for cores as a share of a lateness or transfer: above, the cores and not the batches or the network
are the cause."""


# ------------------------------------------------------------ ranks of different speeds

SPEED_BLOCKS = threshold(5, "blocks", "ranks_that_are_slow_for_a_while_from_the_first_step_on_have_no_uneven_speeds")
"""Windows of rows from the first step on that must show the same differences of speed: a minute's other work on a
machine, or caches that fill, must not look like another device."""
SPEED_GAIN_SHARE = threshold(0.1, "share", "uneven_speeds_count_by_what_shares_in_proportion_would_bring")
"""Share of a step that balanced shares would save for a finding; below, noise and what does not depend on samples
take the gain."""


# ------------------------------------------------------------ runs bound by input, communication or their own code

BOUND_WINDOW_STEPS = threshold(60, "steps", "waiting_for_data_on_all_ranks_is_input_bound")
"""Such findings are not urgent: many steps make them certain."""
MIN_DATA_SHARE = threshold(0.30, "share", "waiting_for_data_on_all_ranks_is_input_bound")
"""Share of a step spent waiting for data, or outside of torch, from which a run is bound by that."""
MIN_WIRE_SHARE = threshold(0.40, "share", "bare_transfers_bind_a_run_but_waiting_for_a_late_rank_does_not")
"""Share of a step spent in exposed transfers from which a run is bound by communication."""
BOUND_CRITICAL_SHARE = threshold(0.60, "share", "waiting_for_data_on_all_ranks_is_input_bound")
"""Share of a step for a critical finding."""


# ------------------------------------------------------------ evaluations

EVALUATIONS = threshold(3, "events", "a_rank_that_is_late_in_each_evaluation_is_named")
"""Evaluations in a row in which the same rank must be late: other work on a machine delays one or another."""
EVALUATION_SHARE = threshold(0.05, "share", "a_late_evaluation_counts_by_its_share_of_the_time_between_two")
"""Lateness as a share of the time from one evaluation to the next, for a finding."""


# ------------------------------------------------------------ delays in few steps

DELAYS = threshold(5, "events", "a_rank_that_is_late_once_in_so_many_steps_is_named")
"""Delays one after the other of the same rank, at equal distances: two ranks have them by chance once in hundreds of
times already without regard to the distances."""
DISTANCE_SHARE = threshold(0.1, "share", "delays_at_unequal_distances_are_other_work_on_the_machine")
"""Difference of two distances as a share of one up to which they are equal: saving by the clock is nearly so."""


# ------------------------------------------------------------ waits for cores

CORE_WAIT_SAMPLES = threshold(10, "samples", "more_busy_threads_than_cores_are_reported_with_the_threads_to_set")
"""Samples, one a second, over which medians are taken: other work takes cores for some seconds now and then."""
MIN_CORE_WAIT_SHARE = threshold(0.25, "share", "more_busy_threads_than_cores_are_reported_with_the_threads_to_set")
"""Share of time in which the ranks' main threads are ready to run without a core, for a finding."""
CRITICAL_CORE_WAIT_SHARE = threshold(0.5, "share", "more_busy_threads_than_cores_are_reported_with_the_threads_to_set")
"""That share for a critical finding."""
CROWDED_RATIO = threshold(4.0, "ratio", "where_ranks_wait_for_each_other_their_busy_threads_show_that_cores_are_few")
"""Ranks per core from which the busy threads count: the main threads of most ranks wait for a reduction then, which
needs the cores as well."""
MIN_THREAD_EXCESS = threshold(1.1, "ratio", "more_busy_threads_than_cores_are_reported_with_the_threads_to_set")
"""Minimum ratio of busy threads to cores: as many threads as cores also wait for each other now and then."""
MIN_THROTTLED_SHARE = threshold(0.1, "share", "a_quota_that_holds_ranks_back_is_named_and_nothing_else_is_blamed")
"""Share of time in which a CPU quota holds ranks back, for a finding: as much of a step is lost to it, and the kernel
counts some throttled time also for ranks that use their quota up only now and then."""
MIN_OTHERS_SHARE = threshold(0.25, "share", "no_advice_is_given_that_is_followed_already")
"""Share of the cores from which other processes are mentioned."""


# ------------------------------------------------------------ throttled GPUs

GPU_CLOCK_SAMPLES = threshold(10, "samples", "throttled_gpus_of_a_host_are_one_finding_that_names_the_reason")
"""Samples, one a second, over which throttling is counted: a clock dips for a second or two now and then."""
GPU_THROTTLED_SHARE = threshold(0.5, "share", "throttled_gpus_of_a_host_are_one_finding_that_names_the_reason")
"""Share of these samples in which a GPU must be throttled for a finding: software slowdowns come and go by seconds."""
SLOWDOWN_CLOCK_SHARE = threshold(0.9, "share", "a_gpu_is_throttled_by_its_reason_and_its_clock")
"""Share of the maximum clock below which heat or a power brake costs more than noise."""
POWER_CAP_CLOCK_SHARE = threshold(0.5, "share", "a_gpu_is_throttled_by_its_reason_and_its_clock")
"""Likewise for the power cap, which holds most busy GPUs at two thirds of it or more: below half, it was set low."""


# ------------------------------------------------------------ losses and gradients

MIN_EARLIER_EVENTS = threshold(20, "events", "a_jump_of_the_loss_counts_by_its_height")
"""Step events that must precede a jump of the loss for a finding."""
MIN_NON_FINITE_NORMS = threshold(3, "events", "a_step_that_a_loss_scaler_skips_is_none_and_gradients_that_stay_so_are")
"""Non-finite gradient norms in a row for a finding: a loss scaler skips some steps, on overflow."""
SPIKE_EVENTS = threshold(3, "events", "a_jump_of_the_loss_is_a_finding_and_a_single_high_one_is_not")
"""Step events that a jump must last: a single hard batch is no finding."""
SPIKE_SIGMAS = threshold(10.0, "deviations", "a_jump_of_the_loss_counts_by_its_height")
"""Height of a jump in standard deviations of the losses before it."""
MIN_SPIKE_SHARE = threshold(0.5, "share", "a_jump_of_the_loss_counts_by_its_height")
"""Height of a jump as a share of the loss before it."""


# ------------------------------------------------------------ growing memory

GROWTH_BLOCKS = threshold(6, "blocks", "growth_that_does_not_use_up_the_memory_is_not_forecast")
"""Equal blocks of the samples; memory must have grown from each to the next."""
GROWTH_SAMPLES = threshold(90, "samples", "memory_that_goes_on_growing_is_a_finding")
"""Machine samples, one a second, before slow growth is computed."""
GROWTH_WARM_UP_SAMPLES = threshold(30, "samples", "memory_that_goes_on_growing_is_a_finding")
"""First samples after the first step that are skipped: caches fill, optimizers create their state."""
MIN_GROWTH_SHARE = threshold(0.10, "share", "memory_that_goes_on_growing_is_a_finding")
"""Growth as a share of the first block's memory."""
MIN_BLOCK_GROWTH_SHARE = threshold(0.5, "share", "memory_that_will_soon_run_out_is_raised_in_time")
"""Growth between two blocks as a share of the mean growth: a cache that fills up grows less and less."""
GROWTH_SIGMAS = threshold(5.0, "deviations", "memory_that_will_soon_run_out_is_raised_in_time")
"""Growth in standard deviations of the memory within a block."""
FORECAST_SAMPLES = threshold(24, "samples", "memory_that_will_soon_run_out_is_raised_in_time")
"""Newest samples from which a forecast is made: four a block."""
FORECAST_WARM_UP_SAMPLES = threshold(10, "samples", "memory_that_will_soon_run_out_is_raised_in_time")
"""First samples after the first step that are skipped for a forecast."""
FORECAST_S = threshold(600.0, "s", "growth_that_does_not_use_up_the_memory_is_not_forecast")
"""Longest forecast time until memory is used up that is a finding."""
MIN_LASTING_SHARE = threshold(0.8, "share", "memory_that_will_soon_run_out_is_raised_in_time")
"""Growth in the second half of these samples as a share of that in the first, for growth that will go on."""
MIN_PART_SHARE = threshold(0.5, "share", "memory_that_will_soon_run_out_is_raised_in_time")
"""Share of the host's growth that its ranks must explain if each grows like this one, and share of this rank's growth
that the host must show: pages of mapped files count as a rank's memory, but are given back when memory is short."""


# ------------------------------------------------------------ stalls

MIN_STALL_S = threshold(10.0, "s", "a_rank_that_does_no_step_while_the_others_wait_is_named")
"""Minimum threshold: machines pause up to this long without fault (a slow disk, a suspended guest)."""
MIN_STOPPED_S = threshold(3.0, "s", "a_stopped_process_is_reported_soon_with_the_command_that_continues_it")
"""Threshold for a stopped process (state T), which does not go on by itself."""
STAY_MULTIPLE = threshold(4.0, "ratio", "in_a_validation_the_rank_that_takes_several_times_as_long_is_named")
"""Threshold as a multiple of the longest stay in the same stage so far."""
STEP_MULTIPLE = threshold(20.0, "ratio", "patience_grows_with_the_length_of_steps")
"""Threshold as a multiple of the median step, for a rank that trains."""
MIN_COMMON_STALL_S = threshold(20.0, "s", "a_run_without_steps_is_stalled_and_cleared_when_it_goes_on")
"""Minimum threshold when no rank is behind: a watched script may evaluate between two steps."""
HANG_MULTIPLE = threshold(10.0, "ratio", "a_hang_is_taken_to_last_by_what_the_run_has_shown")
"""Time after which a stall ends the run, as a multiple of the longest stay in the same stage so far."""
MIN_HANG_S = threshold(60.0, "s", "a_hang_is_taken_to_last_by_what_the_run_has_shown")
"""Least time after which a stall ends the run: file systems and networks pause for tens of seconds."""
LOST_TOGETHER_S = threshold(2.0, "s", "a_host_is_lost_where_it_is_silent_and_the_others_wait")
"""Hosts that were heard of last within this time of each other were cut off together: each is heard of every second."""
NEW_STAGE_IDLE_S = threshold(60.0, "s", "while_ranks_join_those_that_are_missing_are_named")
"""Threshold in a stage that no rank has left yet, while its processes are idle."""
NEW_STAGE_BUSY_S = threshold(300.0, "s", "ranks_that_are_all_busy_between_two_steps_may_be_evaluating")
"""Threshold in a stage that no rank has left yet, while its processes compute."""
BUSY_PERCENT = threshold(50.0, "%", "ranks_that_are_all_busy_between_two_steps_may_be_evaluating")
"""Use of a core, waits for one included, from which a process is busy: computing or busy-waiting."""
ACTIVE_PERCENT = threshold(5.0, "%", "ranks_without_step_events_are_judged_by_their_processes")
"""Use of a core or GPU in a second from which it is active: a wait that polls every 10 ms, as torch's store does,
takes one to three."""
WORKING_S = threshold(10.0, "s", "a_rank_that_imports_on_a_busy_machine_is_not_stalled_while_it_gets_on")
"""Time since its last activity for which a rank counts as working."""

"""The parser of the command ``deepspeed`` of DeepSpeed 0.19.8 (``deepspeed/launcher/runner.py``), as its options."""

from __future__ import annotations

import argparse

SWITCHES = (
    "--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid",
    "--bind_cores_to_rank",
)  # fmt: skip
NUMBERS = ("--num_nodes", "--master_port", "--node_rank", "--ssh_port")
TEXTS = ("--master_addr", "--launcher", "--launcher_args", "--enable_each_rank_log", "--bind_core_list",
         "--venv_script")  # fmt: skip


def deepspeed_parser() -> argparse.ArgumentParser:
    """Return a parser that reads the words of a ``deepspeed`` command as DeepSpeed's own does."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-H", "--hostfile", default="/job/hostfile")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("--autotuning", default="", choices=["tune", "run"])
    parser.add_argument("--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"])
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true")
    for flag in NUMBERS:
        parser.add_argument(flag, type=int, default=-1)
    for flag in TEXTS:
        parser.add_argument(flag, default="")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser

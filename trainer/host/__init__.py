"""Facts of this machine: processes, signals, memory, devices. Without torch."""

"""Facts of this machine, torch-free: processes, signals, memory, devices."""

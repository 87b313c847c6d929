"""A run's processes on this machine: starting it, standing by it, and seeing that nothing of it is left."""

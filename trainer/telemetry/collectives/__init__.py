"""Measurement of the collectives that a script calls, whoever calls them: itself, FSDP, DTensor, an optimizer.

``interception`` wraps torch's calls, ``collective_meter`` takes the readings in the training thread, ``group_names``
names the process groups, and ``collective_times`` makes the record's numbers of the readings on the writer's thread.
"""

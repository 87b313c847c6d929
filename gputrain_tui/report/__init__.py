"""What a run's record says, as data: the report of one run, the comparison of several, and their pages."""

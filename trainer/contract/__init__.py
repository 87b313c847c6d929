"""What ranks and console agree on: errors, options, the record of a run, how ranks ended. Without torch."""

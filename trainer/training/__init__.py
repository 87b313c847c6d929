"""What surrounds the loop: the model as it trains, reading, evaluation, when to stop, where a NaN began."""

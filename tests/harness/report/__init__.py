"""What a user reads of a run, and what outlives it."""

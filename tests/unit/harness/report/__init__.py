"""Tests of what a user reads of a run, and of what outlives it."""

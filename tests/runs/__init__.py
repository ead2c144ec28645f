"""Tests that start processes: runs of pytest, child processes, scripts and commands."""

"""Tests of what a bug is, and of which failures are the same bug."""

"""Tests of one case on one kernel."""

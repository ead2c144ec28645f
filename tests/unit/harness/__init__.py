"""Tests of the harness, by its packages."""

"""Tests of the search for what explains wrong calls."""

"""Tests of our own code."""

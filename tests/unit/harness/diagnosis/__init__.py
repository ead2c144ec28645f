"""Tests of the way from a failing case to a reported bug."""

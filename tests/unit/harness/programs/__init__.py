"""Tests of what programs are told of a run."""

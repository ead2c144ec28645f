"""Tests of the mutation campaign."""

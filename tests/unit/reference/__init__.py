"""Tests of references and bounds."""

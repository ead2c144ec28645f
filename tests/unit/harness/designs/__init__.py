"""Tests of certificates: what a wrong kernel computes instead."""

"""Tests of what a kernel runs on."""

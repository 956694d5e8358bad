"""Benchmarks: Shoal beside its yardstick in one run, one table of ratios. Never part of the tests; see README.md here."""

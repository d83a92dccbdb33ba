"""Benchmarks: what `paceline bench` runs."""

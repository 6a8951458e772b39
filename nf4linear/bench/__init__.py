"""Benchmarks against the peers; each writes a JSON file, a table and a plot (benchmarks/results)."""

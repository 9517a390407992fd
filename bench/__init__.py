"""Benchmarks: one script a claim. `python -m bench` runs them all and prints the tables of docs/benchmarks.md."""

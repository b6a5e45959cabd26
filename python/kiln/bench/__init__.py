"""Benchmarks: models, cells that run in processes of their own, and the report."""

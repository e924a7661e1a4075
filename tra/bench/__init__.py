"""Speed and memory of the operator and of whole models, as ratios of sides that are measured in turn."""

from tra.bench.run import BenchRequest, run_benchmarks

__all__ = ["BenchRequest", "run_benchmarks"]

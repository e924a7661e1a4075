"""The colours of attention: dark is strong, white is exactly 0 and nothing else."""

NULL = "#ffffff"
STEPS = ("#c5e0c4", "#9ccfc1", "#68b8bd", "#3c98b8", "#2873a7", "#274f8c", "#232f68", "#100d36")
"""From the smallest weight to the greatest; the first is far enough from white to be told from it in print."""
SMALLEST_SHOWN = 1e-4
"""Weights below this share the palest colour; only weights of exactly 0 are white."""

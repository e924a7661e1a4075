"""The colours of attention: on paper and on light pages dark is strong and white is exactly 0; on dark pages bright is
strong and the page's own dark is exactly 0. Nothing else has the colour of 0."""

NULL = "#ffffff"
STEPS = ("#c5e0c4", "#9ccfc1", "#68b8bd", "#3c98b8", "#2873a7", "#274f8c", "#232f68", "#100d36")
"""From the smallest weight to the greatest; the first is far enough from white to be told from it in print."""
DARK_NULL = "#1a1f29"
"""That of a panel on a dark page: `--panel` in base.css."""
DARK_STEPS = ("#33505f", "#336a78", "#35848a", "#4c9f91", "#74b990", "#a6d18d", "#dae693", "#fffbd6")
SMALLEST_SHOWN = 1e-4
"""Weights below this share the palest colour; only weights of exactly 0 are white."""

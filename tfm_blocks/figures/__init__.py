"""Figure 1 of any model: spec → drawing tree → picture with coordinates → SVG, TikZ, PDF or PNG."""

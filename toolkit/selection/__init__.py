"""Stage 2: selections and the laws they are drawn from. No torch."""

"""From evidence to verdicts: ranks, families over budgets, corrections, intervals, headroom."""

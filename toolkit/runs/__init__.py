"""Stage 3: building a planned model, evaluating it, and the study runner."""

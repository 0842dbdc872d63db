"""Stage 4: tables, figures and tests, from report files alone. No torch."""

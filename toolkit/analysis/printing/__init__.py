"""Tables and figures: plain data as Markdown, JSON, CSV, LaTeX and pictures."""

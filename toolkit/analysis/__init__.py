"""From report files to tables and figures: reports, inference, summaries, their renderings.

Reads files only, and imports neither torch nor the stages that made them (`toolkit.selection` at most).
"""

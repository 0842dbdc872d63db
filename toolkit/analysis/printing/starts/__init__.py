"""Tables and figures of studies of starts."""

KIND = "started-table"
"""Kind of the plain data of such a study's table."""

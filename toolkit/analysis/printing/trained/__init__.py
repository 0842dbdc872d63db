"""Tables and figures of fine-tuning studies and timing sessions."""

KIND = "trained-table"
"""Kind of the plain data of a fine-tuning study's table."""

"""Tasks: rows read from their source, encoded for a tokenizer, and a model's scores on them."""

from toolkit.runs.tasks.encoding import Encoded, check_length, encode, padding
from toolkit.runs.tasks.evaluation import Evaluated, check_task, evaluate
from toolkit.runs.tasks.split import Split, read

__all__ = ["Encoded", "Evaluated", "Split", "check_length", "check_task", "encode", "evaluate", "padding", "read"]

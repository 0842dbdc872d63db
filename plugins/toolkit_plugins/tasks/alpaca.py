"""The Alpaca template, as every instruction task here renders it.

The text is Stanford Alpaca's, with a line break after "### Response:" and the answer at the beginning of the next line.
"""

HEAD = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
HEAD_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


def alpaca(instruction: str, context: str = "") -> str:
    """The prompt of an instruction, with its input where there is one."""
    if context:
        return f"{HEAD_INPUT}\n\n### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:\n"
    return f"{HEAD}\n\n### Instruction:\n{instruction}\n\n### Response:\n"

"""The built-in tasks, one file each."""

from toolkit_plugins.tasks.arithmetic import Arithmetic

COMPONENTS = [Arithmetic]

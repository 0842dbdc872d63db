"""The built-in initializers, one file each."""

from toolkit_plugins.initializers.loftq import LoftQ
from toolkit_plugins.initializers.zero import Zero

COMPONENTS = [LoftQ, Zero]

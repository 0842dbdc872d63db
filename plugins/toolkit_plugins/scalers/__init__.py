"""The built-in scalers, one file each."""

from toolkit_plugins.scalers.fixed import Fixed
from toolkit_plugins.scalers.lora import LoRA
from toolkit_plugins.scalers.rslora import RsLoRA

COMPONENTS = [Fixed, LoRA, RsLoRA]

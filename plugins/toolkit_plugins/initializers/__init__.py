"""The built-in initializers, one file each."""

from toolkit_plugins.initializers.gptq import GPTQ
from toolkit_plugins.initializers.loftq import LoftQ
from toolkit_plugins.initializers.loftq_peft import LoftQPEFT
from toolkit_plugins.initializers.olora import OLoRA
from toolkit_plugins.initializers.pissa import PiSSA
from toolkit_plugins.initializers.qera_approx import QeraApprox
from toolkit_plugins.initializers.qera_exact import QeraExact
from toolkit_plugins.initializers.stored import Stored
from toolkit_plugins.initializers.zero import Zero

COMPONENTS = [GPTQ, LoftQ, LoftQPEFT, OLoRA, PiSSA, QeraApprox, QeraExact, Stored, Zero]

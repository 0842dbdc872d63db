"""The built-in quantizers, one a file."""

from toolkit_plugins.quantizers.fp4_bnb import FP4BitsAndBytes
from toolkit_plugins.quantizers.fp4_e2m1 import FP4E2M1
from toolkit_plugins.quantizers.mxfp4 import MXFP4
from toolkit_plugins.quantizers.nf4 import NF4
from toolkit_plugins.quantizers.none import NoQuantization
from toolkit_plugins.quantizers.nvfp4 import NVFP4
from toolkit_plugins.quantizers.residual import Residual

COMPONENTS = [NF4, FP4BitsAndBytes, FP4E2M1, NVFP4, MXFP4, Residual, NoQuantization]

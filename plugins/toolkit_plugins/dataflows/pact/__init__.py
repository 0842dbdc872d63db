"""PACT: NVFP4 products for frozen layers, activations kept in NVFP4, nonlinear operations fused with the rounding."""

from toolkit_plugins.dataflows.pact.flow import Pact

__all__ = ["Pact"]

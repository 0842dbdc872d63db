"""The built-in data flows, one a file, or one a folder."""

from toolkit_plugins.dataflows.pact import Pact
from toolkit_plugins.dataflows.stock import Stock

COMPONENTS = [Stock, Pact]

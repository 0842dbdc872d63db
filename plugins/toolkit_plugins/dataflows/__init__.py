"""The built-in data flows, one a file."""

from toolkit_plugins.dataflows.stock import Stock

COMPONENTS = [Stock]

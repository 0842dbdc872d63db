"""The built-in dataflows, one file each."""

COMPONENTS = []

"""The built-in scalers, one file each."""

COMPONENTS = []

"""The built-in quantizers, one file each."""

COMPONENTS = []
